"""The way of a GPU's answers to the host, layer by layer, on a CPU whose copies come late."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mappers.errors import NonFinite
from mappers.layouts import Geometry, Layout
from mappers.quantize import Storage
from service import copied_output, output
from service.copied_output import CopiedOutput, output_for
from service.output import Output
from service.side import Side
from tests.mappers.fake_gpu import FakeStreams, LateStreams

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
