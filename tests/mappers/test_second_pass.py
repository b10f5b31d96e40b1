"""Weighted sums against weighted least squares on the rows, and the whole second pass."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mappers import artifact
from mappers.cache import KVCache
from mappers.fit import fit_pair
from mappers.geometry import Geometry
from mappers.mapper import HeadReads
from mappers.models import LoadedModel
from mappers.moments import Moments, PairMoments
from mappers.recipes import RECIPES
from mappers.recipes.contract import Recipe
from mappers.recipes.systems import LayerSums, cut
from mappers.second_pass import WeightedSums
from tests.mappers.pairs import matched_heads, random_cache, reads_of_layers, stacked
from tests.mappers.test_fit import plan

GEOMETRY = Geometry(3, 2, 4, 2, 2, 6)
SOURCES = (0, 2)
TOKENS = 400
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def sums_of(recipe: Recipe, weights: Tensor) -> tuple[PairMoments, WeightedSums, KVCache, KVCache]:
    source, target = random_cache(3, TOKENS, 2, 4, seed=1), random_cache(2, TOKENS, 2, 6, seed=2)
    plain = PairMoments(GEOMETRY, recipe.structure)
    reads = [reads_of_layers(recipe.structure, GEOMETRY, SOURCES)] * 2
    weighted = WeightedSums(GEOMETRY, recipe, reads)
    for start in range(0, TOKENS, 150):
        rows = slice(start, start + 150)
        pair = source.slice(rows.start, rows.stop), target.slice(rows.start, rows.stop)
        plain.add_window(*pair)
        weighted.add_window(*pair, list(weights[..., rows]))
    return plain, weighted, source, target


def layer_sums(recipe: Recipe, plain: PairMoments, layer: int) -> LayerSums:
    reads = reads_of_layers(recipe.structure, GEOMETRY, SOURCES)
    return cut(plain, layer, recipe.columns(reads, GEOMETRY))


@every_recipe
def test_a_fit_on_weighted_sums_is_weighted_least_squares(recipe: Recipe) -> None:
    weights = 0.5 + torch.rand(2, 2, 2, TOKENS, generator=torch.Generator().manual_seed(3))
    plain, weighted, source, target = sums_of(recipe, weights)
    layer, head = 1, 1
    reads = reads_of_layers(recipe.structure, GEOMETRY, SOURCES)
    sums = weighted.with_plain(layer, layer_sums(recipe, plain, layer))
    fitted = recipe.solve(sums, reads, GEOMETRY, 0.0)
    shared = recipe.name == "full_head"  # one group: the heads' weights are averaged
    read = slice(0, 2) if shared else matched_heads(GEOMETRY, head)
    for kind, affine, inputs, outputs in (
        (0, fitted.keys, source.keys, target.keys),
        (1, fitted.values, source.values, target.values),
    ):
        of_kind = weights[layer, kind]
        root = (of_kind.mean(0) if shared else of_kind[head]).double().sqrt()[:, None]
        x = torch.cat([stacked([inputs[j] for j in SOURCES], read), torch.ones(TOKENS, 1)], 1)
        y = outputs[layer][:, head].double()
        expected = torch.linalg.lstsq(root * x, root * y).solution
        columns = slice(head * 6, (head + 1) * 6)
        torch.testing.assert_close(affine.weight[:, columns].double(), expected[:-1], **TIGHT)
        torch.testing.assert_close(affine.bias[columns].double(), expected[-1], **TIGHT)


TIGHT = {"rtol": 1e-5, "atol": 1e-6}


@every_recipe
def test_equal_weights_are_none_and_a_single_heavy_row_is_drawn_back(recipe: Recipe) -> None:
    plain, equal, *_ = sums_of(recipe, torch.full((2, 2, 2, TOKENS), 7.0))
    expected = layer_sums(recipe, plain, 0)
    assert_same(equal.with_plain(0, expected).keys, expected.keys)
    lonely = torch.full((2, 2, 2, TOKENS), 1e-9)
    lonely[..., 5] = 1.0
    plain, weighted, *_ = sums_of(recipe, lonely)
    blended = weighted.with_plain(0, expected).keys
    assert blended.count == TOKENS
    spread = weighted.squares[0][0] / weighted.layers[0].keys.weight ** 2
    share = ((TOKENS / (2 * blended.gram.shape[1]) - 1) / (TOKENS * spread - 1)).sqrt()
    rest = (blended.gram - expected.keys.gram * (1 - share)[:, None, None]).abs().amax((1, 2))
    assert bool((share < 0.5).all())
    # What the one row adds is the outer product of its distance from the mean.
    assert bool((rest < share * TOKENS * 40).all())


def assert_same(given: Moments, expected: Moments) -> None:
    for name in ("weight", "mean_x", "mean_y", "gram", "cross", "squares_y"):
        torch.testing.assert_close(
            getattr(given, name), getattr(expected, name), rtol=1e-9, atol=1e-7
        )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_fit_with_row_weights_is_another_map_of_the_same_form(
    recipe: str, source: LoadedModel, target: LoadedModel, texts: Path, tmp_path: Path
) -> None:
    mappers = []
    for name in ("none", "attention"):
        asked = plan(texts, tmp_path / name, recipe=recipe, row_weights=name)
        mappers.append(artifact.load(fit_pair(asked, source, target, progress=False)).mapper)
    plain, weighted = mappers
    for first, second in zip(plain.layers, weighted.layers, strict=True):
        assert (first.sources, first.heads) == (second.sources, second.heads)
        assert (recipe == "top_heads") == isinstance(second.heads, HeadReads)
        assert first.keys.weight.shape == second.keys.weight.shape
        assert not torch.equal(first.keys.weight, second.keys.weight)
        assert not torch.equal(first.values.weight, second.values.weight)
