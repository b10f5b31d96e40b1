"""A service whose device copies while it computes: layers come in early, and leave when they have
arrived."""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from starlette.testclient import TestClient
from torch import Tensor

from mappers.layouts import Layout
from mappers.translate import Translator
from service import buffer_transport, copied_output, translation
from service.app import create_app
from service.copied_output import CopiedOutput
from service.output import Output
from service.settings import Settings
from service.side import Side
from service.worker import Emission
from tests.mappers.fake_gpu import FakeStreams, LateStreams
from tests.service.asgi import Message, post
from tests.service.live import wait_until
from tests.service.pair import Request, good
from tests.service.sharing import Sharer
from tests.service.test_faults import break_third, hook, one, run, skip_last, telling
from tests.service.test_streaming import by_buffers, fed, layer_end, until


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> LateStreams:
    """Those of the device, as the service has it: all its answers go this way."""
    made = LateStreams()
    monkeypatch.setattr(copied_output, "_streams", lambda device: made)
    return made


@pytest.mark.parametrize("layout", [Layout.NHD, Layout.LMCACHE])
def test_nobody_is_told_of_what_has_not_arrived(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    """And in the end the answer is what it is without streams."""
    told: list[tuple[int, bytes]] = []
    memories: list[Tensor] = []
    advance = Emission.advance

    def noted(self: Emission, ready_bytes: int, *, last: bool = False) -> None:
        told.append((ready_bytes, memories[0][:ready_bytes].numpy().tobytes()))
        advance(self, ready_bytes, last=last)

    def late(side: Side, memory: Tensor, device: torch.device) -> Output:
        memories.append(memory)
        return CopiedOutput(side, memory, device, LateStreams())

    plain, _ = one(settings, good(layout=layout))
    monkeypatch.setattr(translation, "output_for", late)
    monkeypatch.setattr(Emission, "advance", noted)
    copied, _ = one(settings, good(layout=layout))
    assert copied.finished
    assert copied.body == plain.body
    whole = memories[0].numpy().tobytes()
    assert plain.body.endswith(whole)
    assert told[-1] == (len(whole), whole)
    assert all(whole.startswith(part) for _, part in told)


def test_a_layer_is_under_way_while_the_next_is_computed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, streams: LateStreams
) -> None:
    """It, and no other: keys and values are two copies."""
    under_way = []

    def note(index: int, layer: Any) -> Any:
        under_way.append(len(streams.late))
        return layer

    hook(monkeypatch, note)
    answer, _ = one(settings, good())
    assert answer.finished
    assert under_way == [0, 2, 2, 2]


def test_who_reads_slowly_holds_no_memory_of_the_device(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[Output]] = []

    def late(side: Side, memory: Tensor, device: torch.device) -> Output:
        made = CopiedOutput(side, memory, device, LateStreams())
        held.append(weakref.ref(made))
        return made

    async def read(message: Message) -> None:
        if message["type"] == "http.response.body" and not message["more_body"]:
            await until(lambda: held[0]() is None)

    monkeypatch.setattr(translation, "output_for", late)
    answer, _ = one(settings, good(), on_send=read)
    assert answer.finished


@pytest.mark.parametrize("change", [break_third, skip_last])
def test_copies_are_waited_for_when_a_translation_fails(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    streams: LateStreams,
    change: Callable[[int, Any], Any],
) -> None:
    """By then the first layer has left."""
    begun = threading.Event()
    hook(monkeypatch, change, begun)
    answer, _ = one(settings, good(), on_send=telling(begun))
    assert answer.cut
    assert streams.before_copy
    assert not streams.late


def test_copies_are_waited_for_when_the_client_leaves(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, streams: LateStreams
) -> None:
    leave, seen = asyncio.Event(), list[int]()

    async def test(app: FastAPI) -> None:
        turns, loop = app.state.service.worker.turns, asyncio.get_running_loop()

        def wait(index: int, layer: Any) -> Any:
            seen.append(index)
            if index == 2:
                loop.call_soon_threadsafe(leave.set)
                wait_until(lambda: turns._running.withdrawn)
            return layer

        hook(monkeypatch, wait)
        await post(app, good(), leave=leave)
        assert not streams.late

    run(settings, test)
    assert seen == [0, 1, 2]


def test_a_lease_is_wiped_when_nothing_is_copied_into_it_any_more(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, streams: LateStreams
) -> None:
    left: list[int] = []
    poison = buffer_transport._poison

    def poisoned(answer: Tensor) -> None:
        left.append(len(streams.late))
        poison(answer)

    hook(monkeypatch, skip_last)
    monkeypatch.setattr(buffer_transport, "_poison", poisoned)
    with leasing(settings, tmp_path) as client:
        sharer = Sharer(client)
        source, target = sharer.lease(), sharer.lease()
        assert sharer.translate(good(), source, target).status_code == 500
    assert streams.before_copy
    assert left == [0]


def test_an_answer_in_a_lease_is_what_it_is_without_streams(
    settings: Settings, tmp_path: Path, streams: LateStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    with leasing(settings, tmp_path) as client:
        given = by_buffers(client)
        monkeypatch.undo()
        assert given == by_buffers(client)
    assert len(streams.before_copy) == 4


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many source layers were on their way to the device when each target layer came."""
    real, counts = Translator.steps, list[int]()

    def steps(self: Translator, *args: Any, **names: Any) -> Iterator[Any]:
        lanes = FakeStreams()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "_streams", lanes)
            layers = real(self, *args, **names)
        for layer in layers:
            if layer is not None and names.get("prefix") is not None:
                counts.append(len(lanes.before_copy))
            yield layer

    monkeypatch.setattr(Translator, "steps", steps)
    return counts


def test_source_layers_that_have_arrived_are_sent_ahead(
    settings: Settings, tmp_path: Path, sent: list[int]
) -> None:
    """Target layer 0 reads source layers 0 and 1, target layer 1 the last."""
    with leasing(settings, tmp_path) as client:
        by_buffers(client)
    assert sent == [3] * 4


def test_a_layer_that_is_ready_before_the_source_is_there_has_arrived(
    settings: Settings, streams: LateStreams, sent: list[int]
) -> None:
    """And what has not come in yet was not sent ahead."""

    async def feed(request: Request) -> AsyncIterator[bytes]:
        end = layer_end(request, 2)
        yield request.body[:end]
        await until(lambda: sent and streams.synchronized >= 2 and not streams.late)
        assert sent == [2]
        yield request.body[end:]
        yield b""

    answer, _ = fed(settings, good(40), feed)
    assert answer.finished
    assert sent == [2, 3, 3, 3]


@contextmanager
def leasing(settings: Settings, tmp_path: Path) -> Iterator[TestClient]:
    shared = settings.model_copy(update={"buffers": tmp_path / "s"})
    with TestClient(create_app(shared)) as client:
        while client.get("/startupz").status_code != 200:
            pass
        yield client
