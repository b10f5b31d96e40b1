"""Faults of ours, planted by hooks: no wrong byte may leave, and everything must be free again."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from fastapi import FastAPI

from mappers.errors import NonFinite
from mappers.translate import Translator
from service import answers, body_transport, output, translation
from service.app import create_app
from service.settings import Settings
from service.state import Service
from tests.service.asgi import Answer, Message, post
from tests.service.pair import Request, good

Layers = Callable[..., Iterator[tuple[torch.Tensor, torch.Tensor]]]


def run(settings: Settings, test: Callable[[FastAPI], Awaitable[None]]) -> Service:
    """Run a coroutine against a loaded application, then look that nothing is held."""
    app = create_app(settings)
    service: Service = app.state.service

    async def whole() -> None:
        async with app.router.lifespan_context(app):
            while service.lifecycle.starting:
                await asyncio.sleep(0.01)
            await test(app)
            assert (service.worker.in_flight, service.worker.in_flight_bytes) == (0, 0)
            assert service.worker.turns.left_seconds() == 0

    asyncio.run(whole())
    return service


def one(settings: Settings, request: Request, **names: Any) -> tuple[Answer, Service]:
    """One request and its answer."""
    answers: list[Answer] = []

    async def test(app: FastAPI) -> None:
        answers.append(await post(app, request, **names))

    service = run(settings, test)
    return answers[0], service


def counted(service: Service) -> dict[tuple[str, str], float]:
    """Outcomes that were counted."""
    samples = next(iter(service.metrics.translations.collect())).samples
    return {
        (s.labels["outcome"], s.labels["reason"]): s.value
        for s in samples
        if s.name.endswith("_total")
    }


@pytest.fixture
def begun() -> threading.Event:
    """Set when the first bytes of an answer have left."""
    return threading.Event()


def hook(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[int, Any], Any],
    begun: threading.Event | None = None,
) -> None:
    """Pass each layer that the Translator yields for a request through ``change``.

    With ``begun``, the third one waits until the answer has begun.
    """
    real: Layers = Translator.steps

    def layers(self: Translator, *args: Any, **names: Any) -> Iterator[Any]:
        trial = names.get("prefix") is None
        for index, layer in enumerate(real(self, *args, **names)):
            if begun is not None and index == 2 and not trial:
                assert begun.wait(20)
            changed = layer if trial else change(index, layer)
            if changed is not None:
                yield changed

    monkeypatch.setattr(Translator, "steps", layers)


def skip_last(index: int, layer: Any) -> Any:
    return None if index == 3 else layer


def spoil_third(index: int, layer: Any) -> Any:
    if index == 2:
        layer[1][0, 0, 0] = float("nan")
    return layer


def refuse_third(index: int, layer: Any) -> Any:
    if index == 2:
        raise NonFinite("target layer 2 holds a NaN")
    return layer


def break_third(index: int, layer: Any) -> Any:
    if index == 2:
        raise RuntimeError("secret /etc/path")
    return layer


def out_of_memory(index: int, layer: Any) -> Any:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")


def telling(begun: threading.Event) -> Callable[[Message], Awaitable[None]]:
    """An ``on_send`` that says when tensors have left."""
    sent = 0

    async def note(message: Message) -> None:
        nonlocal sent
        sent += len(message.get("body", b""))
        if sent > HEADER_BYTES:
            begun.set()

    return note


HEADER_BYTES = 2048  # of the answer to a good request, at most
CUTS = {
    "C17 a layer is missing": (skip_last, "internal_invariant"),
    "a value is not finite": (spoil_third, "non_finite"),
    "the translator finds it": (refuse_third, "non_finite"),
    "an error of another library": (break_third, "internal"),
}


@pytest.mark.parametrize("case", CUTS)
def test_a_fault_after_the_header_cuts_the_answer(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, begun: threading.Event, case: str
) -> None:
    change, reason = CUTS[case]
    hook(monkeypatch, change, begun)
    answer, service = one(settings, good(), on_send=telling(begun))
    assert answer.status == 200
    assert answer.cut
    assert answer.aborted
    assert counted(service) == {("failed", reason): 1}


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        (skip_last, 500, "internal_invariant"),
        (break_third, 500, "internal"),
        (out_of_memory, 507, "out_of_memory"),
    ],
)
def test_a_fault_before_the_header_is_a_problem(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[int, Any], Any],
    status: int,
    code: str,
) -> None:
    """Without the proof that nothing overflows, an answer begins when all of it has been seen."""
    hook(monkeypatch, change)
    monkeypatch.setattr(translation.Translation, "_bounded", lambda *_: False)
    if code == "internal":  # Starlette raises it again, for the server to log
        with pytest.raises(RuntimeError, match="secret"):
            one(settings, good())
        return
    answer, service = one(settings, good())
    assert (answer.status, json.loads(answer.body)["code"]) == (status, code)
    assert counted(service) == {("overloaded" if status == 507 else "failed", code): 1}


def test_a_value_that_is_not_finite_before_the_header_is_a_reprefill(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook(monkeypatch, spoil_third)
    monkeypatch.setattr(translation.Translation, "_bounded", lambda *_: False)
    answer, service = one(settings, good())
    assert (answer.status, json.loads(answer.body)["reason"]) == (200, "non_finite")
    assert counted(service) == {("reprefill", "non_finite"): 1}


def test_rows_that_were_never_written_do_not_leave(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, begun: threading.Event
) -> None:
    def forget_a_row(index: int, layer: Any) -> Any:
        if index == 2:
            layer[1][3].view(torch.uint8).fill_(output.POISON)
        return layer

    hook(monkeypatch, forget_a_row, begun)
    answer, service = one(settings, good(), on_send=telling(begun))
    assert answer.cut
    assert bytes([output.POISON] * 8) not in answer.body
    assert counted(service) == {("failed", "non_finite"): 1}


def test_memory_that_cannot_be_had(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(body_transport.np, "empty", none_left)
    answer, service = one(settings, good())
    assert (answer.status, json.loads(answer.body)["code"]) == (507, "out_of_memory")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("part", ["start", "body"])
def test_a_client_that_does_not_read_is_cut_off(settings: Settings, part: str) -> None:
    """Nor what was sent on its connection before: then the head cannot leave."""

    async def stall(message: Message) -> None:
        if message["type"] == f"http.response.{part}":
            await asyncio.Event().wait()

    impatient = settings.model_copy(update={"body_grace_seconds": 0.2})
    answer, service = one(impatient, good(), on_send=stall)
    assert answer.aborted
    assert counted(service) == {("disconnected", "client_disconnect"): 1}


def test_a_client_that_leaves_while_it_waits(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    leave = asyncio.Event()

    def gone(index: int, layer: Any) -> Any:
        seen.append(index)
        time.sleep(0.2)
        loop.call_soon_threadsafe(leave.set)
        return layer

    hook(monkeypatch, gone)
    monkeypatch.setattr(translation.Translation, "_bounded", lambda *_: False)
    answers = []

    async def test(app: FastAPI) -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        answers.append(await post(app, good(), leave=leave))

    loop: asyncio.AbstractEventLoop
    service = run(settings, test)
    assert seen[-1] < 3
    assert counted(service) == {("disconnected", "client_disconnect"): 1}
    assert answers[0].status == 499


def test_neighbours_of_a_bad_request_are_right(settings: Settings) -> None:
    """C8: one request with a NaN among good ones, all at once."""
    bad = good(seed=9)
    bad.tensors["layers.0.k"][3, 0, 0] = float("nan")
    alone: list[Answer] = []
    together: list[Answer] = []

    async def test(app: FastAPI) -> None:
        for seed in range(4):
            alone.append(await post(app, good(seed=seed)))
        requests = [good(seed=0), good(seed=1), bad, good(seed=2), good(seed=3)]
        together.extend(await asyncio.gather(*(post(app, request) for request in requests)))

    run(settings, test)
    refused = together.pop(2)
    assert json.loads(refused.body)["reason"] == "non_finite"
    assert [answer.body for answer in together] == [answer.body for answer in alone]
    assert len({answer.body for answer in alone}) == 4


def test_a_mapper_that_goes_while_it_translates_finishes_what_it_began(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the answer names the weights that it is from, not those that came meanwhile."""
    before: list[str | None] = []

    async def test(app: FastAPI) -> None:
        [entry] = app.state.service.store.entries
        before.append(entry.digest)

        def swap(index: int, layer: Any) -> Any:
            app.state.service.store.unload(entry)
            entry.digest, entry.evidence = "sha256:another", None
            return layer

        hook(monkeypatch, swap)
        given.append(await post(app, good()))

    given: list[Answer] = []
    run(settings, test)
    assert (given[0].status, given[0].finished) == (200, True)
    assert given[0].headers["kvt-mapper-digest"] == before[0]


def test_a_fault_just_before_the_header_holds_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("secret /etc/path")

    async def test(app: FastAPI) -> None:
        with pytest.raises(RuntimeError):
            await post(app, good())

    monkeypatch.setattr(answers, "translated_head", broken)
    assert counted(run(settings, test)) == {("failed", "internal"): 1}
