"""An answer that is cut off is no answer: nobody will report on it, so its place of a half-open
breaker, its share of the session's drift and the orders to measure it are free at once."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mappers import artifact
from mappers.manifest import ManifestFacts
from service import buffer_transport
from service.guards import Guards
from service.schemas import ShadowRequest
from service.settings import Settings
from service.state import Service
from service.translation import Translation
from tests.service.asgi import Answer, Message, post
from tests.service.pair import KLS, Request, good, mapper
from tests.service.reporting import BREAKS, KEEPS, Clock
from tests.service.sharing import Leased, fetched
from tests.service.test_admission import http, metric
from tests.service.test_faults import break_third, hook, run, telling
from tests.service.test_suffix import with_likelihoods


@pytest.fixture(scope="module")
def judging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair's mapper, with what judges native tails."""
    root = tmp_path_factory.mktemp("judging")
    artifact.publish(root, mapper(), ManifestFacts(ridge=0.01), with_likelihoods())
    return root


@pytest.fixture
def settings(judging: Path) -> Settings:
    """One place for probes, and drift for one answer."""
    return Settings(
        artifacts=(judging,),
        shadow_rate=1,
        breaker_cool_down_seconds=60,
        breaker_probes=1,
        drift_budget=1.5 * KLS[True, 32],
    )


def asked() -> Request:
    """A request whose answer can be measured and whose tail can be judged."""
    return good(64, max_kl=0.005, domain="chat", session_id="one")


async def told(app: FastAPI, answer: Answer, **said: float) -> httpx.Response:
    body = {"answer_id": answer.headers["kvt-answer-id"], **said}
    token = {"KVT-Feedback-Token": answer.headers["kvt-feedback-token"]}
    async with http(app) as client:
        return await client.post("/feedback", json=body, headers=token)


async def half_opened(app: FastAPI, clock: Clock) -> None:
    """By answers of no session."""
    request, breaker = asked(), "closed"
    del request.document["session_id"]
    while breaker == "closed":
        answer = await post(app, request)
        breaker = (await told(app, answer, kl=BREAKS)).json()["breaker"]
    clock.now += 61


async def all_is_given_back(app: FastAPI, cut: Answer | None) -> None:
    """So much that the next request is answered as if there had been none before it."""
    service: Service = app.state.service
    counted = metric(service, "kvt_shadow_requested_total", pair=service.store.entries[0].id)
    if cut is not None:
        assert (cut.headers["kvt-shadow"], cut.headers["kvt-suffix"]) == ("requested", "accepted")
        for said in ({"kl": KEEPS}, {"tail_nll": 2.0}):
            assert (await told(app, cut, **said)).json()["code"] == "answer_not_found"
    answer = await post(app, asked())
    assert answer.headers["kvt-decision"] == "translate"
    assert metric(service, "kvt_shadow_requested_total", pair=service.store.entries[0].id) == (
        (counted or 0) + 1
    )
    assert (await told(app, answer, tail_nll=2.0)).status_code == 200
    assert (await told(app, answer, kl=KEEPS)).json()["counted"] is True
    again = await post(app, asked())
    assert again.headers["kvt-reason"] == "drift_budget_exhausted"


async def by_buffers(app: FastAPI, mapped: list[Leased]) -> dict[str, Any]:
    """How the request is sent by two new leases, which are ``mapped``."""
    document = dict(asked().document)
    async with http(app) as client:
        for side in ("source", "target"):
            lease = (await client.post("/buffers", json={"nbytes": 1 << 16})).json()
            document[side] = {**document[side], "buffer": lease["id"]}
            mapped.append(Leased(lease, await asyncio.to_thread(fetched, lease)))
    return {"parts": [json.dumps(document).encode()], "content-type": "application/json"}


class Leaving:
    """A client that goes when the answer has begun."""

    def __init__(self) -> None:
        self.leave = asyncio.Event()

    async def on_send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.leave.set()
            await asyncio.sleep(0.01)


async def stall(message: Message) -> None:
    if message["type"] == "http.response.body":
        await asyncio.Event().wait()


async def leaves(app: FastAPI) -> Answer:
    client = Leaving()
    return await post(app, asked(), on_send=client.on_send, leave=client.leave)


async def reads_nothing(app: FastAPI) -> Answer:
    return await post(app, asked(), on_send=stall)


async def is_shut_down(app: FastAPI) -> Answer:
    seen: list[Message] = []

    async def note(message: Message) -> None:
        seen.append(message)
        await stall(message)

    asking = asyncio.create_task(post(app, asked(), on_send=note))
    while len(seen) < 2:
        await asyncio.sleep(0.001)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    answer = Answer()
    answer.take(seen[0])
    return answer


@pytest.mark.parametrize("cut", [leaves, reads_nothing, is_shut_down])
def test_an_answer_that_its_client_does_not_read_to_the_end(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    cut: Callable[[FastAPI], Awaitable[Answer]],
) -> None:
    async def test(app: FastAPI) -> None:
        await half_opened(app, clock)
        await all_is_given_back(app, await cut(app))

    clock = Clock(monkeypatch)
    run(settings.model_copy(update={"body_grace_seconds": 0.2}), test)


def test_an_answer_that_a_fault_cuts_off(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(app: FastAPI) -> None:
        await half_opened(app, clock)
        begun = threading.Event()
        with monkeypatch.context() as fault:
            hook(fault, break_third, begun)
            answer = await post(app, asked(), on_send=telling(begun))
        assert answer.cut
        await all_is_given_back(app, answer)

    clock = Clock(monkeypatch)
    run(settings, test)


@pytest.mark.parametrize("by", ["body", "buffers"])
def test_a_client_that_leaves_when_all_is_computed(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """While its answer is written down as one that is to be measured."""
    real = Guards.mark

    async def test(app: FastAPI) -> None:
        await half_opened(app, clock)
        leave = asyncio.Event()

        async def mark(self: Guards, *given: Any) -> ShadowRequest | None:
            leave.set()
            await asyncio.sleep(0.01)
            return await real(self, *given)

        way: dict[str, Any] = {} if by == "body" else await by_buffers(app, mapped)
        with monkeypatch.context() as patch:
            patch.setattr(Guards, "mark", mark)
            patch.setattr(Translation, "_bounded", lambda *_: False)
            answer = await post(app, asked(), leave=leave, **way)
        assert answer.status == (200 if by == "body" else 499)
        await all_is_given_back(app, answer if by == "body" else None)

    clock, mapped = Clock(monkeypatch), list[Leased]()
    run(settings.model_copy(update={"buffers": tmp_path / "s"}), test)


def test_an_answer_that_the_breaker_refuses_after_it_was_marked(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []
    real = Guards.mark

    async def mark(self: Guards, *args: Any) -> ShadowRequest | None:
        shadow = await real(self, *args)
        assert shadow is not None
        given.append(shadow.answer_id)
        given.append(shadow.token)
        return shadow

    async def test(app: FastAPI) -> None:
        await half_opened(app, clock)
        with monkeypatch.context() as patch:
            patch.setattr(Guards, "mark", mark)
            patch.setattr(Guards, "opened_since", lambda *_: True)
            assert (await post(app, asked())).headers["kvt-reason"] == "breaker_open"
        names = ("kvt-answer-id", "kvt-feedback-token")
        refused = Answer(headers=dict(zip(names, given, strict=True)))
        assert (await told(app, refused, kl=KEEPS)).json()["code"] == "answer_not_found"
        await all_is_given_back(app, None)

    clock = Clock(monkeypatch)
    run(settings, test)


def test_what_was_reported_before_the_end_stays(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may have measured an answer whose last bytes it did not wait for."""

    async def test(app: FastAPI) -> None:
        await half_opened(app, clock)
        leaving, first = Leaving(), Answer()

        async def report(message: Message) -> None:
            if message["type"] == "http.response.start":
                first.take(message)
            elif not leaving.leave.is_set():
                assert (await told(app, first, kl=KEEPS)).json()["counted"] is True
            await leaving.on_send(message)

        await post(app, asked(), on_send=report, leave=leaving.leave)
        assert (await told(app, first, kl=KEEPS)).json()["counted"] is True
        assert (await told(app, first, kl=BREAKS)).json()["code"] == "feedback_differs"

    clock = Clock(monkeypatch)
    run(settings, test)


def test_a_lease_is_its_callers_until_nothing_of_a_refused_answer_is_there(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the request is cancelled meanwhile: nobody may be given what is wiped."""
    poisoning, release = threading.Event(), threading.Event()
    real = buffer_transport._poison

    def slow(*given: Any) -> None:
        poisoning.set()
        assert release.wait(20)
        real(*given)

    async def test(app: FastAPI) -> None:
        way = await by_buffers(app, mapped)
        paths = [f"/buffers/{buffer.id}" for buffer in mapped]
        asking = asyncio.create_task(post(app, asked(), **way))
        await asyncio.to_thread(poisoning.wait, 20)
        async with http(app) as client:
            for _ in range(2):
                asking.cancel()
                await asyncio.sleep(0.01)
                assert [(await client.delete(path)).status_code for path in paths] == [409, 409]
            release.set()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert [(await client.delete(path)).status_code for path in paths] == [204, 204]

    mapped: list[Leased] = []
    monkeypatch.setattr(buffer_transport, "_poison", slow)
    monkeypatch.setattr(Guards, "opened_since", lambda *_: True)
    run(settings.model_copy(update={"buffers": tmp_path / "s"}), test)
