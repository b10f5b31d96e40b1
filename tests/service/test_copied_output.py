"""The way of a GPU's answers to the host, on a CPU: copies are made at the last possible moment, by
streams that keep account of what is ordered before what."""

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

from mappers.errors import NonFinite
from mappers.layouts import Geometry, Layout
from mappers.quantize import Storage
from mappers.translate import Translator
from service import buffer_transport, copied_output, output, translation
from service.app import create_app
from service.copied_output import CopiedOutput, output_for
from service.output import Output
from service.settings import Settings
from service.side import Side
from service.worker import Emission
from tests.mappers.fake_gpu import FakeStreams
from tests.service.asgi import Message, post
from tests.service.live import wait_until
from tests.service.pair import Request, good
from tests.service.sharing import Sharer
from tests.service.test_faults import break_third, hook, one, run, skip_last, telling
from tests.service.test_streaming import by_buffers, fed, layer_end, until

CPU = torch.device("cpu")
LAYERS, TOKENS, HEADS, DIM = 3, 5, 2, 4
LAYOUTS = [(layout, Storage("bfloat16")) for layout in Layout]
EIGHT_BITS = [
    (Layout.NHD, Storage("float8_e4m3fn")),
    (Layout.VLLM_HN2D, Storage("float8_e5m2", "per_head")),
    (Layout.LMCACHE, Storage("int8", "per_token_head", zero_points=True)),
]
every_form = pytest.mark.parametrize(
    ("layout", "storage"), [*LAYOUTS, *EIGHT_BITS], ids=lambda part: getattr(part, "dtype", part)
)


class LateStreams(FakeStreams):
    """A copy is made when the host waits for it, which is as late as a GPU may make it."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def copying(self) -> Iterator[None]:
        def later(there: Tensor, here: Tensor, *, non_blocking: bool) -> None:
            assert non_blocking
            self.late.append((there, here))

        with super().copying(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "copy_", later)
            yield

    def _synchronize(self) -> None:
        super()._synchronize()
        for there, here in self.late:
            there.copy_(here)
        self.late.clear()


def side_of(layout: Layout, storage: Storage, tokens: int = TOKENS, layers: int = LAYERS) -> Side:
    paged = layout in (Layout.VLLM_HN2D, Layout.VLLM_2BNHD)
    return Side(layout, Geometry(layers, tokens, HEADS, DIM, 4 if paged else None), storage)


def layers_of(tokens: int = TOKENS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(LAYERS, 2, tokens, HEADS, DIM, generator=generator)
    return [(keys, values) for keys, values in made]


def written_at_once(side: Side, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
    memory = torch.zeros(side.nbytes, dtype=torch.uint8)
    plain = Output(side, memory)
    for index, layer in enumerate(layers):
        plain.begin(index)
        plain.end(index, *layer)
    return memory


@every_form
def test_what_arrives_is_what_would_have_been_written(layout: Layout, storage: Storage) -> None:
    """Also what has arrived by the time that a layer is said to be ready."""
    side = side_of(layout, storage)
    expected = written_at_once(side, layers_of())
    memory = torch.zeros(side.nbytes, dtype=torch.uint8)
    copied = CopiedOutput(side, memory, CPU, LateStreams())
    assert copied.in_place(CPU) is None
    for index, layer in enumerate(layers_of()):
        copied.begin(index)
        copied.end(index, *layer)
        assert (copied.ended_layers, copied.ready_layers) == (index + 1, index)
        final = copied.final_bytes(copied.ready_layers)
        assert torch.equal(memory[:final], expected[:final])
    copied.arrive()
    assert copied.ready_layers == LAYERS
    assert copied.final_bytes(LAYERS) == side.nbytes
    assert torch.equal(memory, expected)


def test_a_copy_waits_for_what_wrote_the_layer_and_looked_at_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = LateStreams()
    write, looked = output.write_layer, output._sound

    def writing(*given: Any) -> None:
        assert not streams.late, "the layer before is still copied from there"
        write(*given)
        streams.compute.before.add(("write", len(streams.before_copy)))

    def looking(tensor: Tensor) -> bool:
        streams.compute.before.add(("look", len(streams.before_copy)))
        return looked(tensor)

    monkeypatch.setattr(output, "write_layer", writing)
    monkeypatch.setattr(output, "_sound", looking)
    side = side_of(Layout.NHD, Storage("float32"))
    copied = CopiedOutput(side, torch.zeros(side.nbytes, dtype=torch.uint8), CPU, streams)
    for index, layer in enumerate(layers_of()):
        copied.end(index, *layer)
    for number, before in enumerate(streams.before_copy):
        assert {("write", number), ("look", number)} <= before
    assert len(streams.before_copy) == LAYERS


@pytest.mark.parametrize("spoiled", ["a value", "a row that was never written"])
def test_nothing_departs_of_a_layer_that_must_not_leave(
    monkeypatch: pytest.MonkeyPatch, spoiled: str
) -> None:
    streams, side = LateStreams(), side_of(Layout.NHD, Storage("float32"))
    memory = torch.zeros(side.nbytes, dtype=torch.uint8)
    copied = CopiedOutput(side, memory, CPU, streams)
    first, (keys, values), _ = layers_of()
    copied.end(0, *first)
    if spoiled == "a value":
        values[2, 1, 0] = float("inf")
    else:
        monkeypatch.setattr(output, "write_layer", lambda *given: None)
    with pytest.raises(NonFinite):
        copied.end(1, keys, values)
    copied.arrive()
    assert copied.ready_layers == 1
    assert not memory[side.nbytes // LAYERS :].any()


def test_only_what_has_to_be_copied_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing where there are no streams, or where the answer's memory is the device's own."""
    side = side_of(Layout.NHD, Storage("float32"))
    memory = torch.zeros(side.nbytes, dtype=torch.uint8)
    assert type(output_for(side, memory, CPU)) is Output
    streams = FakeStreams()
    monkeypatch.setattr(copied_output, "_streams", lambda device: streams)
    assert type(output_for(side, memory, CPU)) is CopiedOutput
    monkeypatch.setattr(streams, "holds", lambda tensor: tensor is memory)
    assert type(output_for(side, memory, CPU)) is Output


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_form
@pytest.mark.parametrize("pinned", [True, False])
def test_on_cuda_what_is_copied_is_what_was_computed(
    layout: Layout, storage: Storage, pinned: bool
) -> None:
    """So many tokens that copies take longer than what is queued meanwhile."""
    side = side_of(layout, storage, tokens=400_000)
    layers = [(keys.cuda(), values.cuda()) for keys, values in layers_of(400_000)]
    on_device = torch.zeros(side.nbytes, dtype=torch.uint8, device="cuda")
    plain = output_for(side, on_device, torch.device("cuda"))
    assert type(plain) is Output
    for index, layer in enumerate(layers):
        plain.begin(index)
        plain.end(index, *layer)
    for _ in range(5):
        memory = torch.zeros(side.nbytes, dtype=torch.uint8, pin_memory=pinned)
        copied = output_for(side, memory, torch.device("cuda"))
        assert type(copied) is CopiedOutput
        for index, (keys, values) in enumerate(layers):
            copied.begin(index)
            copied.end(index, keys.clone(), values.clone())
        copied.arrive()
        assert torch.equal(memory, on_device.cpu())
