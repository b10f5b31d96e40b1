"""Copies ahead of the compute: what is ordered before what, by streams that only keep account."""

import pytest
import torch
from torch import Tensor

from mappers.cache import KVCache
from mappers.content_memory import Layer
from mappers.errors import NonFinite
from mappers.geometry import Geometry
from mappers.lanes import Lane, streams_of
from mappers.rope import RotaryTable
from mappers.translate import Translator
from tests.mappers.fake_gpu import FakeStreams, Operation, compute_in_bfloat16
from tests.mappers.pairs import random_cache
from tests.mappers.test_translate import (
    GEOMETRIES,
    SOURCES,
    assert_equals_dense,
    build_mapper,
    every_geometry,
    every_recipe,
    same_bits,
    source_of,
)

CPU = torch.device("cpu")


def layers_of(count: int, tokens: int = 4) -> list[Layer]:
    numbers = torch.arange(2.0 * count * tokens * 6).view(count, 2, tokens, 2, 3)
    return [(keys, values) for keys, values in numbers]


class Reader:
    """Sends and reads layers, and holds every step to the order that it needs."""

    def __init__(self) -> None:
        self.streams = FakeStreams()
        self.lane = Lane(CPU, self.streams)
        self.last_read: dict[int, Operation] = {}

    def send(self, layer: Layer) -> tuple[int, object]:
        number = len(self.streams.before_copy)
        shipment = self.lane.send(layer)
        overwritten = shipment.layer[0].data_ptr()
        if overwritten in self.last_read:
            assert self.last_read[overwritten] in self.streams.before_copy[number]
        return number, shipment

    def read(self, number: int, shipment: object, expected: Layer) -> None:
        received = self.lane.receive(shipment)  # type: ignore[arg-type]
        assert ("copy", number) in self.streams.compute.before
        assert all(map(torch.equal, received, expected))
        self.streams.compute.before.add(("read", number))
        self.last_read[received[0].data_ptr()] = ("read", number)
        self.lane.release(shipment)  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_reads_wait_for_their_copy_and_copies_for_the_reads_of_what_they_overwrite(
    ahead: int,
) -> None:
    layers, reader = layers_of(12), Reader()
    waiting = []
    for layer in layers:
        waiting.append((*reader.send(layer), layer))
        if len(waiting) > ahead:
            reader.read(*waiting.pop(0))
    for left in waiting:
        reader.read(*left)
    assert len(reader.last_read) <= ahead + 2


def test_a_copy_does_not_wait_for_the_layer_before() -> None:
    """Or nothing would overlap; the first two go into new memory, which others may still use."""
    layers, reader = layers_of(6), Reader()
    for layer in layers:
        reader.read(*reader.send(layer), layer)
    for number, before in enumerate(reader.streams.before_copy[2:], start=2):
        assert ("read", number - 2) in before
        assert ("read", number - 1) not in before


def test_a_layer_of_another_form_gets_memory_of_its_own() -> None:
    reader = Reader()
    for layer in (*layers_of(3), *layers_of(4, tokens=5), *layers_of(2)):
        reader.read(*reader.send(layer), layer)


def test_new_memory_is_written_only_after_what_computes_in_it_now() -> None:
    reader = Reader()
    reader.streams.compute.before.add(("other", 0))
    reader.send(layers_of(1)[0])
    assert ("other", 0) in reader.streams.before_copy[0]


def test_without_streams_layers_pass_as_they_are() -> None:
    (layer,) = layers_of(1)
    lane = Lane(CPU, streams_of(CPU))
    assert not lane.overlaps
    shipment = lane.send(layer)
    assert all(a is b for a, b in zip(lane.receive(shipment), layer, strict=True))
    lane.release(shipment)
    lane.close()


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> tuple[Translator, FakeStreams, list[int]]:
    """A translator on such streams, and the source layers whose copy each strip knew of."""
    translator = Translator(build_mapper("full_head", GEOMETRIES[0]))
    streams, copied = FakeStreams(), []
    monkeypatch.setattr(translator, "_streams", streams)
    strip = RotaryTable.strip

    def stripped(table: RotaryTable, keys: Tensor, out: Tensor | None = None) -> Tensor:
        copied.append(sum(kind == "copy" for kind, _ in streams.compute.before))
        streams.compute.before.add(("strip", len(copied) - 1))
        return strip(table, keys, out)

    monkeypatch.setattr(RotaryTable, "strip", stripped)
    return translator, streams, copied


def test_a_translation_with_overlap_gives_the_same_bits(
    overlapping: tuple[Translator, FakeStreams, list[int]],
) -> None:
    """Whole, and without a native tail, which is not copied."""
    translator, streams, copied = overlapping
    source = source_of(build_mapper("full_head", GEOMETRIES[0]))
    given = translator.translate(source, dtype=torch.float32)
    assert all(known > index for index, known in enumerate(copied))
    assert len(copied) == len({layer for sources in SOURCES for layer in sources})
    plain = Translator(build_mapper("full_head", GEOMETRIES[0]))
    assert same_bits(given, plain.translate(source, dtype=torch.float32))
    for tokens in (8, 20):
        given = translator.translate(source, dtype=torch.float32, tokens=tokens)
        assert same_bits(given, plain.translate(source, dtype=torch.float32, tokens=tokens))
    assert streams.synchronized == 3


def test_what_the_next_target_layer_reads_is_sent_before_this_one_comes(
    overlapping: tuple[Translator, FakeStreams, list[int]],
) -> None:
    """As far as it has arrived; else only what is needed now is looked at."""
    translator, streams, _ = overlapping
    source = source_of(build_mapper("full_head", GEOMETRIES[0]))
    read = [set(sources) for sources in SOURCES]
    sent = [len(set.union(*read[: index + 1])) for index in range(len(read))]
    for arrived, expected in ((lambda layer: True, [*sent[1:], sent[-1]]), (None, sent)):
        streams.before_copy.clear()
        stream = translator.stream(
            source.layers(), source.positions, dtype=torch.float32, arrived=arrived
        )
        assert [len(streams.before_copy) for _ in stream] == expected
    streams.before_copy.clear()
    asked: list[int] = []
    stream = translator.stream(
        source.layers(),
        source.positions,
        dtype=torch.float32,
        arrived=lambda layer: bool(asked.append(layer)),
    )
    assert [len(streams.before_copy) for _ in stream] == sent
    assert asked == [4, 0]


def test_layers_of_a_translation_take_turns_in_few_buffers(
    monkeypatch: pytest.MonkeyPatch, overlapping: tuple[Translator, FakeStreams, list[int]]
) -> None:
    """Each copy comes after a strip of a layer before the last: one does not wait for the other."""
    band = tuple((layer, layer + 1) for layer in range(9))
    mapper = build_mapper("head_local", Geometry(10, 2, 6, 9, 2, 6), sources=band)
    translator, streams = Translator(mapper), overlapping[1]
    monkeypatch.setattr(translator, "_streams", streams)
    translator.translate(source_of(mapper), dtype=torch.float32)
    strips = [
        max(number for kind, number in before if kind == "strip")
        for before in streams.before_copy[2:]
    ]
    assert strips == list(range(len(strips)))


@pytest.mark.parametrize("end", ["left early", "not finite"])
def test_copies_are_waited_for_when_a_translation_ends_early(
    overlapping: tuple[Translator, FakeStreams, list[int]], end: str
) -> None:
    translator, streams, _ = overlapping
    source: KVCache = source_of(build_mapper("full_head", GEOMETRIES[0]))
    if end == "not finite":
        source.values[1][2] = float("nan")
        with pytest.raises(NonFinite):
            translator.translate(source, dtype=torch.float32)
    else:
        steps = translator.steps(source.layers(), source.positions, dtype=torch.float32)
        next(steps)
        steps.close()  # type: ignore[attr-defined]
    assert streams.synchronized == 1


@every_recipe
@every_geometry
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_overlapping_copies_and_bfloat16_content_give_the_dense_answer(
    recipe: str, geometry: Geometry, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a GPU, where a layer's values may not stay in the buffer that they came in."""
    compute_in_bfloat16(monkeypatch)
    mapper = build_mapper(recipe, geometry)
    source = source_of(mapper, dtype=torch.bfloat16)
    prefix = random_cache(3, 5, geometry.target_heads, geometry.target_dim, seed=9, dtype=dtype)
    for chunk_tokens in (7, None):
        translator = Translator(mapper, chunk_tokens=chunk_tokens)
        monkeypatch.setattr(translator, "_streams", FakeStreams())
        given = translator.translate(source, dtype=dtype)
        assert_equals_dense(given, mapper, source, 3e-2)
        known = translator.translate(source, dtype=dtype, prefix=prefix, tokens=15)
        assert same_bits(known.slice(0, 5), prefix)
        for keys, others in zip(known.keys, given.keys, strict=True):
            torch.testing.assert_close(keys[5:], others[5:15], rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("recipe", ["full_head", "head_local", "top_heads"])
def test_on_cuda_source_layers_from_the_host_and_from_the_device_give_the_same(
    recipe: str, pinned: bool
) -> None:
    """A hundred times the tokens, so that copies take longer than what is queued meanwhile."""
    mapper = build_mapper(recipe, GEOMETRIES[1])
    translator = Translator(mapper, device="cuda")
    at_home = source_of(mapper, tokens=20_000, dtype=torch.bfloat16)
    if pinned:
        at_home = moved(at_home, Tensor.pin_memory)
    expected = translator.translate(moved(at_home, Tensor.cuda), dtype=torch.bfloat16)
    for _ in range(5):
        given = translator.translate(at_home, dtype=torch.bfloat16)
        assert same_bits(given, expected)


def moved(cache: KVCache, to: object) -> KVCache:
    keys, values = (tuple(map(to, layers)) for layers in (cache.keys, cache.values))  # type: ignore[call-overload]
    return KVCache(keys, values, cache.positions)
