"""A part of a pair, fitted alone, gives the maps that the whole pair has of the same reads."""

from pathlib import Path

import pytest
import torch

from mappers.cache import KVCache
from mappers.geometry import Geometry, Structure
from mappers.mapper import HeadReads, LayerMap, Reads, check_layer
from mappers.moments import PairMoments
from mappers.part_maps import load_layers, save_layers
from mappers.parts import Part
from mappers.recipes import RECIPES, fit_layer
from tests.mappers.pairs import random_cache

WHOLE = Geometry(4, 2, 3, 3, 2, 3)
PART = Part(sources=(0, 3), targets=(1, 2))
READS: dict[str, tuple[Reads, Reads]] = {
    # Of a pool of two layers, and the same in the numbers of all four.
    "full_head": ((0, 1), (0, 3)),
    "head_local": ((1,), (3,)),
    "top_heads": (
        HeadReads(keys=((0, 3, 7),), values=((2, 8, 15),)),
        HeadReads(keys=((0, 7, 15),), values=((6, 16, 31),)),
    ),
}


def caches() -> tuple[KVCache, KVCache, list[KVCache]]:
    source = random_cache(4, 200, 2, 3, seed=1)
    noise = random_cache(3, 200, 2, 3, seed=2)
    keys = tuple(k + s for k, s in zip(noise.keys, source.keys[1:], strict=True))
    before = random_cache(4, 200, 2, 3, seed=3)
    return source, KVCache(keys, noise.values, source.positions), [before]


def fitted(recipe: str, part: Part | None) -> list[LayerMap]:
    structure: Structure = RECIPES[recipe].structure
    source, target, before = caches()
    before = before if structure == "joint" else []
    geometry, targets, reads = WHOLE, PART.targets, READS[recipe][1]
    if part is not None:
        geometry, targets, reads = part.geometry(WHOLE), (0, 1), READS[recipe][0]
        before = [part.caches(cache, target)[0] for cache in before]
        source, target = part.caches(source, target)
    moments = PairMoments(geometry, structure, len(before))
    moments.add_window(source, target, before)
    return [fit_layer(RECIPES[recipe], moments, layer, reads, 1e-3) for layer in targets]


@pytest.mark.parametrize("recipe", RECIPES)
def test_maps_of_a_part_are_those_of_the_whole_pair(recipe: str, tmp_path: Path) -> None:
    layers = [PART.whole_numbers(layer, WHOLE) for layer in fitted(recipe, PART)]
    save_layers(tmp_path / "maps", layers)
    for again in (layers, load_layers(tmp_path / "maps")):
        for ours, expected in zip(again, fitted(recipe, None), strict=True):
            check_layer(ours, WHOLE, "a target layer")
            assert (ours.sources, ours.heads) == (expected.sources, expected.heads)
            for one, other in ((ours.keys, expected.keys), (ours.values, expected.values)):
                torch.testing.assert_close(one.weight, other.weight, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(one.bias, other.bias, rtol=1e-5, atol=1e-6)
