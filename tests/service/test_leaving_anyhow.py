"""Requests by the dozen, each left, stalled, cancelled or broken off at a time of its own: what is
held afterwards is what was given, and nothing else."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI

from service.settings import Settings
from service.state import Service
from tests.service.asgi import Answer, Message, post
from tests.service.pair import KLS, good
from tests.service.sharing import Leased, fetched
from tests.service.test_admission import http, nothing_held
from tests.service.test_faults import hook, run
from tests.service.test_streaming import feeding

REQUESTS = 30
TOKENS = 32
DRIFT = KLS[True, 1]


class Client:
    """One request, and what becomes of it at a random moment."""

    def __init__(self, app: FastAPI, number: int, leases: list[Leased]) -> None:
        self.app, self.number, self.leases = app, number, leases
        self.dice = random.Random(number)
        self.leave = asyncio.Event()
        self.fate = self.dice.choice(["stays", "leaves", "cancelled", "stalls", "breaks off"])
        self.at_send = self.dice.randrange(6)
        self.sent, self.tensors = 0, False

    async def live(self) -> Answer | None:
        """Its answer, where there was one to its end."""
        changes: dict[str, Any] = {"session_id": f"s{self.number}"}
        asking = asyncio.create_task(self.ask(good(TOKENS, seed=self.number, **changes)))
        if self.fate in ("leaves", "cancelled"):
            await asyncio.sleep(self.dice.random() * 0.05)
            self.leave.set() if self.fate == "leaves" else asking.cancel()
        [answer] = await asyncio.gather(asking, return_exceptions=True)
        given = isinstance(answer, Answer) and answer.headers.get("kvt-decision") == "translate"
        return answer if given and answer.finished else None

    async def ask(self, request: Any) -> Answer:
        headers = {"kvt-deadline-ms": self.dice.choice(["1", "30", "60000", "60000"])}
        names = {"on_send": self.on_send, "leave": self.leave}
        if self.leases:
            document = dict(request.document)
            for side, lease in zip(("source", "target"), self.leases, strict=True):
                document[side] = {**document[side], "buffer": lease.id}
            kind = {"content-type": "application/json"}
            parts = [json.dumps(document).encode()]
            return await post(self.app, request, parts=parts, **names, **kind, **headers)
        fed = feeding(self.app, self.parts(request.body))
        return await post(fed, request, **names, **headers)

    async def parts(self, body: bytes) -> Any:
        size = self.dice.randrange(500, len(body))
        for at in range(0, len(body), size):
            await asyncio.sleep(self.dice.random() * 0.005)
            if self.fate == "breaks off" and self.dice.random() < 0.2:
                yield b"gone"
            yield body[at : at + size]
        yield b""
        await self.leave.wait()
        yield b"gone"

    async def on_send(self, message: Message) -> None:
        self.sent += 1
        if message["type"] == "http.response.start":
            self.tensors = (b"content-type", b"application/vnd.safetensors") in message["headers"]
        if self.fate == "stalls" and self.tensors and self.sent > self.at_send:
            await asyncio.Event().wait()
        await asyncio.sleep(self.dice.random() * 0.003)


async def leases(app: FastAPI) -> list[Leased]:
    found = []
    async with http(app) as client:
        for _ in range(2):
            info = (await client.post("/buffers", json={"nbytes": 1 << 16})).json()
            found.append(Leased(info, await asyncio.to_thread(fetched, info)))
    return found


@pytest.mark.parametrize("round_", range(3))
def test_what_is_held_in_the_end_is_what_was_given(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, round_: int
) -> None:
    dice = random.Random(round_)

    def sometimes(index: int, layer: Any) -> Any:
        torch.rand(96, 96) @ torch.rand(96, 96)
        if dice.random() < 0.01:
            raise RuntimeError("planted")
        return layer

    async def test(app: FastAPI) -> None:
        service: Service = app.state.service
        hook(monkeypatch, sometimes)
        mapped = [await leases(app) if number % 3 == 0 else [] for number in range(REQUESTS)]
        numbers = range(round_ * 1000, round_ * 1000 + REQUESTS)
        clients = [Client(app, n, m) for n, m in zip(numbers, mapped, strict=True)]
        answers = await asyncio.gather(*(client.live() for client in clients))
        given = {answer.headers["kvt-answer-id"] for answer in answers if answer is not None}
        assert 0 < len(given) < REQUESTS
        assert nothing_held(service)
        assert service.worker.working_ahead.take(self := object())
        service.worker.working_ahead.give_back(self)
        drifts = [account.spent for account in service.guards.sessions._accounts.values()]
        assert sum(drifts) == pytest.approx(DRIFT * len(given))
        file = service.guards._file
        rows = await file.run(lambda: file._db.execute("SELECT id FROM answers").fetchall())
        assert {row[0] for row in rows} == given
        [entry] = service.store.entries
        assert entry.resident is not None
        assert entry.resident.leases == 0
        async with http(app) as client:
            for lease in (lease for pair in mapped for lease in pair):
                assert (await client.delete(f"/buffers/{lease.id}")).status_code == 204

    many = {"queue_requests": REQUESTS, "shadow_rate": 1, "body_grace_seconds": 0.5}
    shared = {"buffers": tmp_path / "s", "buffer_client_bytes": 1 << 26}
    run(settings.model_copy(update=many | shared), test)
