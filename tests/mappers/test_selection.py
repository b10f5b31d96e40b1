"""Selection against R2 computed from the rows themselves by least squares."""

import dataclasses

import pytest
import torch
from torch import Tensor

from mappers.cache import KVCache
from mappers.errors import TooFewData
from mappers.geometry import Geometry
from mappers.moments import PairMoments, Structure
from mappers.selection import select
from tests.mappers.pairs import linear_target, matched_heads, random_cache, stacked

GEOMETRY = Geometry(4, 2, 4, 3, 4, 6)
TOKENS = 120


def noisy_pair() -> tuple[KVCache, KVCache]:
    source = random_cache(4, TOKENS, 2, 4, seed=1)
    target = linear_target(source, GEOMETRY, (1, 2), seed=2)
    noise = random_cache(3, TOKENS, 4, 6, seed=3)
    return source, KVCache(
        tuple(t + 0.5 * n for t, n in zip(target.keys, noise.keys, strict=True)),
        tuple(t + 5.0 * n for t, n in zip(target.values, noise.values, strict=True)),
        source.positions,
    )


def moments_of(source: KVCache, target: KVCache, structure: Structure) -> PairMoments:
    moments = PairMoments(GEOMETRY, structure)
    moments.add_window(source, target)
    return moments


def r2_from_rows(source: Tensor, target: Tensor, structure: Structure) -> float:
    """R2 of one source layer against one target layer, head by head, then the mean."""
    scores = []
    for head in range(GEOMETRY.target_heads):
        read = slice(0, 2) if structure == "all_heads" else matched_heads(GEOMETRY, head)
        x, y = stacked([source], read), target[:, head].double()
        rows = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
        residuals = y - rows @ torch.linalg.lstsq(rows, y).solution
        scores.append(1 - residuals.square().sum() / (y - y.mean(0)).square().sum())
    return float(torch.stack(scores).mean())


@pytest.mark.parametrize("structure", ["all_heads", "per_head"])
def test_r2_and_choice_equal_those_of_the_rows(structure: Structure) -> None:
    source, target = noisy_pair()
    chosen = select(moments_of(source, target, structure), k=2, ridge=0.0)
    assert chosen.r2_keys.shape == chosen.r2_values.shape == (4, 3)
    for j in range(4):
        for layer in range(3):
            keys = r2_from_rows(source.keys[j], target.keys[layer], structure)
            values = r2_from_rows(source.values[j], target.values[layer], structure)
            assert float(chosen.r2_keys[j, layer]) == pytest.approx(keys, abs=1e-9)
            assert float(chosen.r2_values[j, layer]) == pytest.approx(values, abs=1e-9)
    assert chosen.reads == ((1, 2),) * 3


def test_the_mean_of_keys_and_values_decides() -> None:
    """Keys read layer 0, values layers 0 and 3: alone neither kind would choose as both do."""
    source = random_cache(4, TOKENS, 2, 4, seed=4)
    keys, values = (linear_target(source, GEOMETRY, j, seed=5) for j in ((0,), (0, 3)))
    target = KVCache(keys.keys, values.values, source.positions)
    moments = moments_of(source, target, "per_head")
    assert select(moments, 1, 0.0).reads == ((0,),) * 3
    assert select(moments, 2, 0.0).reads == ((0, 3),) * 3


def test_sources_are_ascending_and_all_of_them_for_the_largest_k() -> None:
    moments = moments_of(*noisy_pair(), "all_heads")
    assert select(moments, 4, 0.01).reads == ((0, 1, 2, 3),) * 3
    for k in (1, 2, 3):
        assert all(list(s) == sorted(set(s)) for s in select(moments, k, 0.01).reads)


def test_ties_are_taken_from_the_lowest_layer_up() -> None:
    source = random_cache(4, TOKENS, 2, 4, seed=6)
    same = dataclasses.replace(source, keys=source.keys[:1] * 4, values=source.values[:1] * 4)
    target = linear_target(same, GEOMETRY, (0,), seed=7)
    moments = moments_of(same, target, "all_heads")
    chosen = select(moments, 2, 0.01)
    assert bool((chosen.r2_keys == chosen.r2_keys[0]).all())
    assert chosen.reads == ((0, 1),) * 3


def test_a_head_that_never_changes_counts_as_predicted() -> None:
    source, target = noisy_pair()
    for layer in (*target.keys, *target.values):
        layer[:, 3] = 2.0
    chosen = select(moments_of(source, target, "per_head"), 1, 0.01)
    assert bool(chosen.r2_keys.isfinite().all())
    assert bool((chosen.r2_keys >= 0.25).all())


@pytest.mark.parametrize("k", [0, -1, 5])
def test_k_beyond_the_source_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="k must be 1 to 4"):
        select(moments_of(*noisy_pair(), "all_heads"), k, 0.01)


def test_too_few_rows_are_refused() -> None:
    source, target = noisy_pair()
    moments = PairMoments(GEOMETRY, "all_heads")
    moments.add_window(source.slice(0, 8), target.slice(0, 8))
    with pytest.raises(TooFewData, match="8 rows for 8 inputs: at least 9"):
        select(moments, 1, 0.01)
