"""A body that is translated while it arrives, and answers that begin before they are computed: the
same bits whichever way they come, and nothing of them where there is to be no answer."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from starlette.requests import Request as StarletteRequest
from starlette.testclient import TestClient

from mappers.errors import NonFinite
from mappers.layouts import Layout
from mappers.translate import Translator
from service.app import create_app
from service.pages import Pages
from service.settings import Settings
from service.state import Service
from tests.service.asgi import Answer, Message, post
from tests.service.live import SAFETENSORS, wait_until
from tests.service.pair import Request, cache, good, mapper, raw
from tests.service.sharing import Sharer
from tests.service.test_faults import counted, hook, one, run, skip_last, spoil_third

TOKENS = 40
PAGED = (Layout.VLLM_HN2D, Layout.VLLM_2BNHD)
Feed = Callable[[Request], AsyncIterator[bytes]]


@pytest.fixture
def translated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the target layers that the Translator has given out for requests."""
    real, seen = Translator.steps, []

    def steps(self: Translator, *args: Any, **names: Any) -> Iterator[Any]:
        index = 0
        for layer in real(self, *args, **names):
            if layer is not None and names.get("prefix") is not None:
                seen.append(index)
                index += 1
            yield layer

    monkeypatch.setattr(Translator, "steps", steps)
    return seen


async def until(condition: Callable[[], object]) -> None:
    """The device has its own thread; this fails when it does not do what is waited for."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def feeding(app: FastAPI, parts: AsyncIterator[bytes]) -> Any:
    """The application, with a body in these parts."""

    async def receive() -> Message:
        part = await anext(parts, None)
        if part is None:
            await asyncio.Event().wait()
        if part == b"gone":
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": part != b""}

    async def fed(scope: Any, _: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        await app(scope, receive, send)

    return fed


def fed(settings: Settings, request: Request, feed: Feed) -> tuple[Answer, Service]:
    """The answer to a request that arrives so."""
    answers: list[Answer] = []

    async def test(app: FastAPI) -> None:
        answers.append(await post(feeding(app, feed(request)), request))

    service = run(settings, test)
    return answers[0], service


def layer_end(request: Request, layers: int) -> int:
    """Bytes of the body with so many source layers."""
    return len(request.header) + layers * len(request.data) // 3


def test_a_target_layer_begins_when_its_source_layers_are_in(
    settings: Settings, translated: list[int]
) -> None:
    """Target layer 0 reads source layers 0 and 1; none of it leaves before all has arrived."""
    sent: list[Message] = []

    async def feed(request: Request) -> AsyncIterator[bytes]:
        end = layer_end(request, 2)
        yield request.body[: end - 1]
        await asyncio.sleep(0.05)
        assert translated == []
        yield request.body[end - 1 : end]
        await until(lambda: translated == [0])
        assert sent == []
        yield request.body[end:]
        yield b""

    async def note(message: Message) -> None:
        sent.append(message)

    async def test(app: FastAPI) -> None:
        request = good(TOKENS)
        answers.append(await post(feeding(app, feed(request)), request, on_send=note))
        answers.append(await post(app, request))

    answers: list[Answer] = []
    run(settings, test)
    assert answers[0].finished
    assert answers[0].body == answers[1].body
    assert translated == [0, 1, 2, 3] * 2


def test_bytes_go_past_the_frameworks_requests_and_responses(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent are views of the memory that the answer was written into; the route is
    described all the same."""
    sent: list[memoryview] = []

    async def never(*_: Any) -> None:
        raise NotImplementedError

    async def note(message: Message) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    async def test(app: FastAPI) -> None:
        monkeypatch.setattr(StarletteRequest, "stream", never)
        monkeypatch.setattr(StarletteRequest, "body", never)
        answer = await post(app, good(TOKENS), on_send=note)
        assert answer.finished
        assert "/translate" in app.openapi()["paths"]

    run(settings, test)
    _, *tensors = sent
    assert all(isinstance(part, memoryview) for part in tensors)
    assert len({id(part.obj) for part in tensors}) == 1


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("chunk_bytes", [64, 1000])
def test_every_layout_has_the_same_bits_however_it_arrives(
    settings: Settings, layout: Layout, chunk_bytes: int
) -> None:
    async def feed(request: Request) -> AsyncIterator[bytes]:
        for start in range(0, len(request.body), chunk_bytes):
            await asyncio.sleep(0)
            yield request.body[start : start + chunk_bytes]
        yield b""

    async def test(app: FastAPI) -> None:
        request = good(24, layout=layout, block_tokens=16 if layout in PAGED else None)
        answers.append(await post(feeding(app, feed(request)), request))
        answers.append(await post(app, request))

    answers: list[Answer] = []
    run(settings, test)
    assert answers[0].finished
    assert answers[0].body == answers[1].body


@pytest.mark.parametrize(
    ("name", "value"), [("layers.2.v", torch.nan), ("layers.0.k", torch.inf), ("layers.1.v", 1e30)]
)
def test_what_was_translated_ahead_of_a_refusal_is_never_seen(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    """The first spoils the last source layer, the others the first target layer: the last of them
    only there, where it overflows float16."""
    request = good(TOKENS)
    request.tensors[name].view(-1)[100] = value
    request.document["target"]["kv_dtype"] = "float16"
    begun = threading.Event()
    real = Translator.steps

    def steps(*args: Any, **names: Any) -> Iterator[Any]:
        try:
            for layer in real(*args, **names):
                if layer is not None:
                    begun.set()
                yield layer
        except NonFinite:
            begun.set()
            raise

    async def feed(request: Request) -> AsyncIterator[bytes]:
        end = layer_end(request, 2)
        yield request.body[:end]
        await until(begun.is_set)
        yield request.body[end:]
        yield b""

    monkeypatch.setattr(Translator, "steps", steps)
    answer, service = fed(settings, request, feed)
    assert (answer.status, json.loads(answer.body)["reason"]) == (200, "non_finite")
    assert counted(service) == {("reprefill", "non_finite"): 1}


def test_a_client_that_leaves_in_the_middle_frees_all(
    settings: Settings, translated: list[int]
) -> None:
    async def feed(request: Request) -> AsyncIterator[bytes]:
        yield request.body[: layer_end(request, 2)]
        await until(lambda: translated == [0])
        yield b"gone"

    _, service = fed(settings, good(TOKENS), feed)
    assert counted(service) == {("disconnected", "client_disconnect"): 1}
    assert translated == [0]


def test_a_body_that_is_not_what_was_sent_is_refused_after_all(
    settings: Settings, translated: list[int]
) -> None:
    async def feed(request: Request) -> AsyncIterator[bytes]:
        yield request.body[: layer_end(request, 2)]
        await until(lambda: translated == [0])
        yield request.body[layer_end(request, 2) : -1]
        yield b""

    answer, service = fed(settings, good(TOKENS), feed)
    assert (answer.status, json.loads(answer.body)["code"]) == (400, "truncated_body")
    assert counted(service) == {("refused", "truncated_body"): 1}


def test_a_fault_while_it_arrives_is_a_problem(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def broken(*_: Any, **__: Any) -> Iterator[Any]:
        begun.set()
        raise NotImplementedError("secret /etc/path")
        yield

    async def feed(request: Request) -> AsyncIterator[bytes]:
        yield request.body[: layer_end(request, 2)]
        await until(begun.is_set)
        yield request.body[layer_end(request, 2) :]
        yield b""

    async def test(app: FastAPI) -> None:
        monkeypatch.setattr(Translator, "steps", broken)
        request = good(TOKENS)
        with pytest.raises(NotImplementedError):  # Starlette raises it again, for the log
            await post(feeding(app, feed(request)), request)

    assert counted(run(settings, test)) == {("failed", "internal"): 1}


class TestLmcache:
    """One tensor, values after all keys: there is nothing to send before the last layer is done."""

    @staticmethod
    def request(**changes: Any) -> Request:
        return good(TOKENS, layout=Layout.LMCACHE, **changes)

    def test_it_leaves_when_all_of_it_is_computed(
        self, settings: Settings, translated: list[int]
    ) -> None:
        done_at_start: list[int] = []

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                done_at_start.extend(translated)

        answer, service = one(settings, self.request(), on_send=note)
        assert answer.finished
        assert done_at_start == [0, 1, 2, 3]
        assert int(answer.headers["content-length"]) == len(answer.body)
        assert counted(service) == {("translate", ""): 1}

    @pytest.mark.parametrize(("change", "said"), [(spoil_third, 200), (skip_last, 500)])
    def test_a_fault_on_the_way_is_said_and_cuts_nothing_off(
        self,
        settings: Settings,
        monkeypatch: pytest.MonkeyPatch,
        change: Callable[[int, Any], Any],
        said: int,
    ) -> None:
        hook(monkeypatch, change)
        answer, _ = one(settings, self.request())
        assert (answer.status, answer.finished, answer.aborted) == (said, True, False)
        assert answer.headers["kvt-decision"] == "reprefill"
        assert json.loads(answer.body)["decision"] == "reprefill"

    def test_who_leaves_before_it_is_there_has_left_and_frees_all(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        leave, apps = asyncio.Event(), list[FastAPI]()

        def wait(index: int, layer: Any) -> Any:
            if index == 2:
                loop[0].call_soon_threadsafe(leave.set)
                turns = apps[0].state.service.worker.turns
                wait_until(lambda: turns._running.withdrawn)
            return layer

        async def test(app: FastAPI) -> None:
            loop.append(asyncio.get_running_loop())
            apps.append(app)
            answers.append(await post(app, self.request(), leave=leave))

        loop: list[asyncio.AbstractEventLoop] = []
        answers: list[Answer] = []
        hook(monkeypatch, wait)
        service = run(settings, test)
        assert answers[0].status == 499
        assert counted(service) == {("disconnected", "client_disconnect"): 1}

    def test_one_who_reads_too_slowly_is_given_the_same_time(self, settings: Settings) -> None:
        """It counts from when there is something to read."""

        async def stall(message: Message) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        impatient = settings.model_copy(update={"body_grace_seconds": 0.2})
        answer, service = one(impatient, self.request(), on_send=stall)
        assert answer.aborted
        assert counted(service) == {("disconnected", "client_disconnect"): 1}

    def test_its_source_is_let_go_of_while_its_layers_are_read(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Keys and values of a layer lie far apart, and both go."""
        gone: list[tuple[int, int]] = []
        real = Pages.let_go

        def let_go(self: Pages, begin: int, end: int) -> None:
            gone.append((begin, end))
            real(self, begin, end)

        monkeypatch.setattr(Pages, "let_go", let_go)
        request = self.request()
        answer, _ = one(settings, request)
        assert answer.finished
        size = len(request.data) // (2 * 3)
        assert sorted(gone) == [(at * size, (at + 1) * size) for at in range(6)]


@pytest.fixture(scope="module")
def truth() -> bytes:
    """The target's tensors in the order of the wire, from the library."""
    built = mapper()
    match = built.prefixes.longest_match((7, 9))
    assert match is not None
    answer = Translator(built).translate(
        cache(TOKENS), tokens=TOKENS - 1, prefix=match[1], dtype=torch.float32
    )
    pairs = zip(answer.keys, answer.values, strict=True)
    return b"".join(raw(tensor) for pair in pairs for tensor in pair)


def tensors_of(body: bytes) -> bytes:
    return body[8 + int.from_bytes(body[:8], "little") :]


def whole(client: TestClient) -> bytes:
    answer = client.post("/translate", content=good(TOKENS).body, headers=SAFETENSORS)
    return tensors_of(answer.content)


def chunked(client: TestClient) -> bytes:
    body = good(TOKENS).body
    parts = (body[at : at + 999] for at in range(0, len(body), 999))
    return tensors_of(client.post("/translate", content=parts, headers=SAFETENSORS).content)


def by_buffers(client: TestClient) -> bytes:
    sharer = Sharer(client)
    source, target = sharer.lease(), sharer.lease()
    assert sharer.translate(good(TOKENS), source, target).status_code == 200
    return target.content[: 4 * 2 * (TOKENS - 1) * 2 * 8 * 4]


def one_of_many(client: TestClient) -> bytes:
    for seed in range(1, 4):
        client.post("/translate", content=good(24, seed=seed).body, headers=SAFETENSORS)
    return whole(client)


@pytest.mark.parametrize("way", [whole, chunked, by_buffers, one_of_many])
def test_every_way_has_the_librarys_bits(
    settings: Settings, tmp_path: Path, truth: bytes, way: Callable[[TestClient], bytes]
) -> None:
    shared = settings.model_copy(update={"buffers": tmp_path / "s"})
    with TestClient(create_app(shared)) as client:
        while client.get("/startupz").status_code != 200:
            pass
        assert way(client) == truth
