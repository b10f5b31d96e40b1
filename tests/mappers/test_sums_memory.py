"""The bytes that sums take, counted on tensors, and how a large pair is cut to a memory."""

import pytest

from mappers.errors import TooLittleMemory
from mappers.geometry import STRUCTURES, Geometry, Structure
from mappers.moments import PairMoments
from mappers.sums_memory import Shares, all_layers, shares_of_a_pass, sums_bytes

QWEN3_14B_TO_32B = Geometry(40, 8, 128, 64, 8, 128)
GIB = 2**30


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("lags", [0, 1])
def test_the_bytes_are_those_of_the_tensors(structure: Structure, lags: int) -> None:
    if lags and structure != "joint":
        lags = 0
    geometry = Geometry(3, 4, 8, 5, 2, 6)
    moments = PairMoments(geometry, structure, lags)
    parts = [moments.keys] if structure == "joint" else [moments.keys, moments.values]
    held = sum(part.gram.nbytes + part.cross.nbytes for part in parts)
    if structure == "joint":  # keys and values are views of one set of cross products
        held += moments.values.cross.nbytes
    assert sums_bytes(geometry, structure, lags, all_layers(geometry)) == held


def test_a_pair_of_large_models_cannot_be_held_at_once() -> None:
    def needed(structure: Structure, lags: int) -> int:
        return sums_bytes(QWEN3_14B_TO_32B, structure, lags, all_layers(QWEN3_14B_TO_32B))

    inputs, outputs = 2 * 2 * 40 * 8 * 128, 2 * 64 * 8 * 128
    assert (inputs, outputs) == (163_840, 131_072)
    assert needed("joint", 1) == 8 * inputs * (inputs + outputs) == 386_547_056_640
    assert needed("per_head", 0) == 8_724_152_320


def test_it_is_cut_to_what_fits_and_not_to_less() -> None:
    pair = QWEN3_14B_TO_32B
    shares = shares_of_a_pass(pair, "joint", 1, least=2, memory_bytes=16 * GIB)
    assert sums_bytes(pair, "joint", 1, shares) <= 16 * GIB
    for larger in (
        shares._replace(target_layers=shares.target_layers + 1),
        Shares(shares.source_layers + 1, 4),
    ):
        assert sums_bytes(pair, "joint", 1, larger) > 16 * GIB
    assert shares_of_a_pass(pair, "joint", 1, least=2, memory_bytes=400 * GIB) == (40, 64)


def test_with_little_memory_a_pass_serves_one_target_layer_and_with_less_there_is_none() -> None:
    geometry = Geometry(3, 1, 4, 5, 1, 4)
    least = sums_bytes(geometry, "joint", 0, Shares(2, 1))
    assert shares_of_a_pass(geometry, "joint", 0, least=2, memory_bytes=least) == (2, 1)
    with pytest.raises(TooLittleMemory, match=f"take {least:,} bytes, of {least - 1:,}") as refused:
        shares_of_a_pass(geometry, "joint", 0, least=2, memory_bytes=least - 1)
    assert (refused.value.needed_bytes, refused.value.given_bytes) == (least, least - 1)
