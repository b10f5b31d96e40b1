"""Rejected ideas are what they say: a wrong one would be rejected for the wrong reason."""

import pytest
import torch

from mappers.corpus import Corpus
from mappers.geometry import Geometry
from mappers.mapper import Mapper
from mappers.moments import PairMoments
from mappers.prefixes import ExactPrefixes
from mappers.recipes import RECIPES, fit_layer
from tests.bench.recipe_bench import rejected
from tests.bench.recipe_bench.fitted import Models
from tests.bench.recipe_bench.low_rank import cut_to_rank
from tests.bench.recipe_bench.reading import Readings, load
from tests.bench.recipe_bench.rejected import Cosines, Ridge, trained
from tests.bench.recipe_bench.rows import key_norms, rows_of, translation
from tests.mappers.pairs import identity, random_cache

GENERATOR = torch.Generator().manual_seed(0)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def test_a_ridge_of_rows_finds_a_linear_map() -> None:
    x, true = _normal(400, 8), _normal(8, 6)
    ridge = Ridge(x, x @ true + 3.0, block=4)
    assert torch.allclose(ridge(x), x @ true + 3.0, atol=0.01)


def test_cosine_features_explain_what_no_linear_map_can() -> None:
    x = _normal(2000, 3)
    bent = x[:, :1].cos() * 2
    left = bent - bent.mean(0)
    for weights in (None, torch.ones(2000, 1)):
        cosines = Cosines(x, left, weights, dim=1, seed=0)
        assert float((left - cosines(x)).square().mean()) < 0.05 * float(left.square().mean())


def test_weighted_features_care_for_the_rows_that_count() -> None:
    x = _normal(2000, 3)
    heavy = (x[:, 0] > 0).float()
    left = torch.where(heavy[:, None] > 0, x[:, 1:2].cos(), -5.0)
    weights = heavy[:, None] + 1e-6
    even, uneven = (Cosines(x, left, w, dim=1, seed=0) for w in (None, weights))
    errors = [float((heavy * (left - c(x))[:, 0].square()).sum()) for c in (even, uneven)]
    assert errors[1] < 0.5 * errors[0]


def test_a_network_learns_what_is_not_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejected, "HIDDEN", 256)
    monkeypatch.setattr(rejected, "EPOCHS", 20)
    torch.manual_seed(0)
    x = _normal(4096, 2)
    y = (x[:, :1] * x[:, 1:]).abs()
    net = trained(x, y)
    assert float((net(x) - y).square().mean()) < 0.3 * float(y.var())


def test_rows_are_translated_as_they_were_read(
    models: Models, corpus: Corpus, readings: Readings
) -> None:
    """Of the source onto itself the identity must give the source's own cache back."""
    same = Models(models.source, models.source)
    rows = rows_of(same, corpus, lags=1)
    assert torch.equal(rows.inputs[:, : rows.outputs.shape[1]], rows.outputs)
    document = load(readings.files[0])
    half = rows.outputs.shape[1]
    norms = key_norms(same, rows)
    translate = translation(same, lambda inputs: inputs[:, :half], lags=1, norms=norms)
    found = translate(document)
    for mine, own in zip(
        found.keys + found.values, document.source.keys + document.source.values, strict=True
    ):
        torch.testing.assert_close(mine, own, rtol=1e-3, atol=1e-3)


def test_a_full_rank_changes_nothing_and_a_low_one_is_the_best_of_its_rank() -> None:
    geometry = Geometry(1, 2, 4, 1, 2, 4)
    moments = PairMoments(geometry, "all_heads")
    moments.add_window(random_cache(1, 200, 2, 4, seed=1), random_cache(1, 200, 2, 4, seed=2))
    recipe = RECIPES["full_head"]
    layer = fit_layer(recipe, moments, 0, (0,), 1e-9)
    sides = (identity(1, 2, 4), identity(1, 2, 4))
    mapper = Mapper(*sides, "full_head", (layer,), ExactPrefixes(), 0)
    whole = cut_to_rank(mapper, moments, 8).layers[0].keys
    torch.testing.assert_close(whole.weight, layer.keys.weight, rtol=1e-4, atol=1e-5)
    low = cut_to_rank(mapper, moments, 2).layers[0].keys.weight.double()
    assert int(torch.linalg.matrix_rank(low, rtol=1e-5)) == 2
    gram, weight = moments.keys.gram[0], layer.keys.weight.double()

    def error(other: torch.Tensor) -> float:
        return float(((weight - other).T @ gram @ (weight - other)).trace())

    u, s, v = torch.linalg.svd(weight)
    assert error(low) < error(u[:, :2] * s[:2] @ v[:2])
    factor = torch.linalg.cholesky(gram)
    singular = torch.linalg.svdvals(factor.T @ weight)
    assert abs(error(low) - float(singular[2:].square().sum())) < 1e-3 * error(low)


def test_only_pairs_with_few_numbers_a_token_are_tried() -> None:
    assert [*rejected.rejected(Geometry(22, 3, 64, 30, 3, 64))] == []
    assert len([*rejected.rejected(Geometry(4, 4, 32, 8, 4, 32))]) == 7
