"""Fitting and choosing reads of earlier tokens, against least squares on rows made by hand."""

import pytest
import torch

from mappers.cache import KVCache
from mappers.collect import lagged
from mappers.errors import LayoutError
from mappers.mapper import HeadReads, lags_of
from mappers.moments import PairMoments
from mappers.recipes import RECIPES, fit_layer
from mappers.recipes.top_heads import TOP_HEADS
from mappers.second_pass import WeightedSums
from mappers.selection import Share, select
from tests.mappers.pairs import random_cache
from tests.mappers.test_lags import GEOMETRY, HEADS, numbered, random_heads, source_of

TIGHT = {"rtol": 1e-4, "atol": 1e-5}
ROWS = torch.arange(3, 400, 2)


def fitted_on(lags: int, *, noise: float = 1.0) -> tuple[PairMoments, KVCache, KVCache]:
    """Moments of every second row of a text, in two windows; the text's two caches."""
    source = source_of(tokens=400, seed=1)
    rows, generator = numbered(source, 2), torch.Generator().manual_seed(7)
    # Each target head is made of its own number of head 4's keys and the value before.
    mixing = torch.randn(2, 2, 4, 6, 8, generator=generator, dtype=torch.float64)
    sides = []
    for kind in (0, 1):
        made = [
            torch.einsum("td,hde->the", rows[:, 4], mixing[kind, layer])
            + torch.einsum("td,hde->the", rows[:, 12 + 9 - 2 * layer], mixing[kind, layer].flip(0))
            for layer in (0, 1)
        ]
        noises = torch.randn(2, 400, 4, 8, generator=generator, dtype=torch.float64)
        sides.append(tuple((m + noise * n).float() for m, n in zip(made, noises, strict=True)))
    target = KVCache(sides[0], sides[1], source.positions)
    moments = PairMoments(GEOMETRY, "joint", lags)
    for window in ROWS.tensor_split(2):
        own, *before = lagged(source, window, lags)
        moments.add_window(own, lagged(target, window, 0)[0], before)
    return moments, source, target


@pytest.mark.parametrize("share", ["head", "layer"])
@pytest.mark.parametrize("lags", [1, 2])
def test_fits_are_least_squares_on_the_assembled_rows(share: str, lags: int) -> None:
    moments, source, target = fitted_on(lags)
    generator = torch.Generator().manual_seed(3)
    groups = 1 if share == "layer" else 4
    reads = HeadReads(*(random_heads(generator, groups, 3, lags, HEADS) for _ in range(2)))
    layer = fit_layer(TOP_HEADS, moments, 1, reads, 0.0)
    assert lags_of(reads, GEOMETRY) == lags
    rows = numbered(source, lags)[ROWS]
    for affine, outputs in ((layer.keys, target.keys[1]), (layer.values, target.values[1])):
        assert affine.heads is not None
        for head in range(4):
            chosen = affine.heads[head % groups]
            x = torch.cat([*(rows[:, n] for n in chosen), torch.ones(len(rows), 1)], dim=1)
            expected = torch.linalg.lstsq(x, outputs[ROWS, head].double()).solution
            columns = slice(head * 8, (head + 1) * 8)
            torch.testing.assert_close(affine.weight[:, columns].double(), expected[:-1], **TIGHT)
            torch.testing.assert_close(affine.bias[columns].double(), expected[-1], **TIGHT)


@pytest.mark.parametrize("share", ["head", "layer"])
def test_what_a_target_is_made_of_is_chosen_across_lags(share: Share) -> None:
    moments, *_ = fitted_on(1)
    for layer, reads in enumerate(select(moments, 2, 1e-4, share=share).reads):
        assert isinstance(reads, HeadReads)
        groups = 1 if share == "layer" else 4
        assert reads.keys == reads.values == ((4, 12 + 9 - 2 * layer),) * groups


@pytest.mark.parametrize("share", ["head", "layer"])
def test_a_choice_with_fewer_lags_is_that_of_moments_without_them(share: Share) -> None:
    moments, plain = fitted_on(2)[0], fitted_on(0)[0]
    fewer = select(moments, 3, 1e-4, share=share, lags=0)
    expected = select(plain, 3, 1e-4, share=share)
    assert fewer.reads == expected.reads
    torch.testing.assert_close(fewer.r2_keys, expected.r2_keys)
    torch.testing.assert_close(fewer.r2_values, expected.r2_values)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=f"lags must be 0 to 2.* not {wrong}"):
            select(moments, 3, 1e-4, lags=wrong)
    with pytest.raises(ValueError, match="k must be 1 to 24"):
        select(moments, 25, 1e-4, lags=1)


def test_weighted_sums_read_earlier_tokens_too() -> None:
    moments, source, target = fitted_on(1)
    reads = HeadReads(((1, 14),), ((3, 20),))
    sums = WeightedSums(GEOMETRY, TOP_HEADS, [reads] * 2)
    weights = 0.5 + torch.rand(2, 4, len(ROWS), generator=torch.Generator().manual_seed(3))
    own, *before = lagged(source, ROWS, sums.lags)
    sums.add_window(own, lagged(target, ROWS, 0)[0], [weights] * 2, before)
    layer = TOP_HEADS.solve(sums.layers[1], reads, GEOMETRY, 0.0)
    rows = numbered(source, 1)[ROWS]
    x = torch.cat([rows[:, 1], rows[:, 14], torch.ones(len(rows), 1)], dim=1)
    root = weights[0].mean(0).double().sqrt()[:, None]
    y = target.keys[1][ROWS].flatten(1).double()
    expected = torch.linalg.lstsq(root * x, root * y).solution
    torch.testing.assert_close(layer.keys.weight.double(), expected[:-1], **TIGHT)


def test_what_was_not_collected_cannot_be_read() -> None:
    moments, *_ = fitted_on(1)
    with pytest.raises(LayoutError, match="target layer 0 reads tokens further back .* 1 lags"):
        fit_layer(TOP_HEADS, moments, 0, HeadReads(((0, 24),), ((0, 1),)), 0.0)
    with pytest.raises(LayoutError, match="all_heads moments cannot have 1 lags"):
        PairMoments(GEOMETRY, "all_heads", 1)
    for recipe in ("full_head", "head_local"):
        with pytest.raises(LayoutError, match="needs"):
            fit_layer(RECIPES[recipe], moments, 0, (0,), 0.0)


@pytest.mark.parametrize("before", [0, 2])
def test_rows_before_must_be_there_for_each_lag(before: int) -> None:
    source, target = source_of(tokens=8), random_cache(2, 8, 4, 8)
    moments = PairMoments(GEOMETRY, "joint", 1)
    with pytest.raises(LayoutError, match="expected 1 caches of the tokens before 8"):
        moments.add_window(source, target, [source] * before)
    with pytest.raises(LayoutError, match="expected 1 caches of the tokens before 8"):
        moments.add_window(source, target, [source.slice(0, 7)])
    assert moments.count == 0


def test_the_first_token_is_before_itself() -> None:
    cache = source_of(tokens=5)
    rows = [part.positions.tolist() for part in lagged(cache, torch.tensor([0, 1, 4]), 2)]
    assert rows == [[0, 1, 4], [0, 0, 3], [0, 0, 2]]
