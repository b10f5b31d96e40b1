"""The catalogue: every recipe is held to the one contract, over every relation of head counts."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from mappers.cache import KVCache
from mappers.errors import LayoutError, SingularSystem, TooFewData
from mappers.geometry import Geometry
from mappers.mapper import AffineMap, HeadReads, LayerMap, Mapper, Reads
from mappers.moments import Moments, PairMoments
from mappers.prefixes import ExactPrefixes
from mappers.recipes import RECIPES, check_shapes, fit_layer, flops_per_token, recipe_of
from mappers.recipes.contract import Recipe
from mappers.recipes.solve import residual_squares, solve
from tests.mappers.pairs import (
    identity,
    linear_target,
    matched_heads,
    random_cache,
    reads_of_layers,
    stacked,
)

CPU = torch.device("cpu")
TOKENS = 150  # more than the 96 inputs of the widest case
SOURCES = (0, 2, 3)
# Head counts equal, growing (source heads repeat) and shrinking (they pool); head dims too.
GEOMETRIES = [
    Geometry(4, 2, 6, 3, 2, 6),
    Geometry(4, 2, 6, 3, 4, 8),
    Geometry(4, 4, 8, 3, 2, 6),
    Geometry(4, 1, 4, 3, 3, 10),
]


def heads_of(geometry: Geometry) -> str:
    return f"{geometry.source_heads}-to-{geometry.target_heads}-heads"


every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=heads_of)


def source_cache(geometry: Geometry, *, seed: int = 0, tokens: int = TOKENS) -> KVCache:
    cache = random_cache(
        geometry.source_layers, tokens, geometry.source_heads, geometry.source_dim, seed=seed
    )
    # Away from zero, so that a forgotten bias or centring shows.
    return dataclasses.replace(
        cache,
        keys=tuple(layer + 3 for layer in cache.keys),
        values=tuple(layer - 2 for layer in cache.values),
    )


def random_target(geometry: Geometry, *, seed: int = 1) -> KVCache:
    return random_cache(
        geometry.target_layers, TOKENS, geometry.target_heads, geometry.target_dim, seed=seed
    )


def moments_of(recipe: Recipe, geometry: Geometry, source: KVCache, target: KVCache) -> PairMoments:
    moments = PairMoments(geometry, recipe.structure)
    for start in range(0, source.tokens, 80):
        moments.add_window(source.slice(start, start + 80), target.slice(start, start + 80))
    return moments


@functools.cache
def random_moments(recipe: Recipe, geometry: Geometry) -> PairMoments:
    """Of ``source_cache`` and ``random_target``; shared, so only to be read."""
    return moments_of(recipe, geometry, source_cache(geometry), random_target(geometry))


def reads(recipe: Recipe, geometry: Geometry, sources: tuple[int, ...] = SOURCES) -> Reads:
    return reads_of_layers(recipe.structure, geometry, sources)


def width(recipe: Recipe, geometry: Geometry) -> int:
    """The number of layers, or of heads a target head, that reading ``SOURCES`` is."""
    wanted = reads(recipe, geometry)
    return len(wanted.keys[0]) if isinstance(wanted, HeadReads) else len(SOURCES)


def applied(
    recipe: Recipe,
    affine: AffineMap,
    geometry: Geometry,
    contents: list[Tensor],
    chunk: int = TOKENS,
) -> Tensor:
    """The recipe's output ``[T, H_t, D_t]``, with an output tensor that starts as NaN.

    ``contents`` are those of ``SOURCES``, of the kind that the map is for.
    """
    tokens = contents[0].shape[0]
    prepared = recipe.prepare(affine, SOURCES, geometry, device=CPU, dtype=torch.float32)
    if recipe.structure == "joint":  # keys before values; the other kind is not read here
        contents = [*contents, *contents]
    out = torch.full((tokens, geometry.target_heads, geometry.target_dim), float("nan"))
    for start in range(0, tokens, chunk):
        rows = slice(start, start + chunk)
        recipe.apply(prepared, [content[rows] for content in contents], out[rows])
    return out


def read_heads(recipe: Recipe, geometry: Geometry, target_head: int) -> slice:
    """What the papers say a target head reads, derived apart from ``head_groups``."""
    return {
        "full_head": slice(0, geometry.source_heads),
        "head_local": matched_heads(geometry, target_head),
        "top_heads": matched_heads(geometry, target_head),
    }[recipe.name]


def independent_fit(x: Tensor, y: Tensor, ridge: float, block: int) -> tuple[Tensor, Tensor]:
    """Ridge by least squares on stacked rows: centred rows above ``sqrt(lambda)`` on a diagonal,
    a lambda for each block of so many inputs."""
    centred = x - x.mean(0)
    shrinkage = ridge * centred.square().sum(0).view(-1, block).mean(1)
    padding = shrinkage.sqrt().repeat_interleave(block).diag()
    rows = torch.cat([centred, padding])
    wanted = torch.cat([y - y.mean(0), torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64)])
    weight = torch.linalg.lstsq(rows, wanted).solution
    return weight, y.mean(0) - x.mean(0) @ weight


@every_recipe
@every_geometry
def test_a_linear_family_is_recovered_exactly(recipe: Recipe, geometry: Geometry) -> None:
    source = source_cache(geometry)
    target = linear_target(source, geometry, SOURCES, seed=7)
    moments = moments_of(recipe, geometry, source, target)
    unseen = source_cache(geometry, seed=99, tokens=50)
    truth = linear_target(unseen, geometry, SOURCES, seed=7)
    for layer in range(geometry.target_layers):
        fitted = fit_layer(recipe, moments, layer, reads(recipe, geometry), ridge=0.0)
        for affine, rows, wanted in (
            (fitted.keys, unseen.keys, truth.keys),
            (fitted.values, unseen.values, truth.values),
        ):
            given = applied(recipe, affine, geometry, [rows[j] for j in SOURCES])
            torch.testing.assert_close(given, wanted[layer], rtol=1e-4, atol=1e-4)


@every_recipe
@every_geometry
@pytest.mark.parametrize("ridge", [0.0, 0.01, 1.0])
def test_the_fit_equals_least_squares_on_the_rows_themselves(
    recipe: Recipe, geometry: Geometry, ridge: float
) -> None:
    source, target = source_cache(geometry), random_target(geometry)
    fitted = fit_layer(recipe, random_moments(recipe, geometry), 1, reads(recipe, geometry), ridge)
    dim = geometry.target_dim
    for affine, inputs, outputs in (
        (fitted.keys, source.keys, target.keys),
        (fitted.values, source.values, target.values),
    ):
        for head in range(geometry.target_heads):
            x = stacked([inputs[j] for j in SOURCES], read_heads(recipe, geometry, head))
            y = outputs[1][:, head].double()
            block = recipe.weight_shape(geometry, 1)[0]
            weight, bias = independent_fit(x, y, ridge, block)
            columns = slice(head * dim, (head + 1) * dim)
            torch.testing.assert_close(affine.weight[:, columns].double(), weight, **TIGHT)
            torch.testing.assert_close(affine.bias[columns].double(), bias, **TIGHT)


TIGHT = {"rtol": 1e-5, "atol": 1e-6}


@every_recipe
@every_geometry
def test_a_sub_block_solve_equals_a_fit_that_saw_only_these_layers(
    recipe: Recipe, geometry: Geometry
) -> None:
    source, target = source_cache(geometry), random_target(geometry)
    chosen = fit_layer(recipe, random_moments(recipe, geometry), 2, reads(recipe, geometry), 0.1)
    only = KVCache(
        tuple(source.keys[j] for j in SOURCES),
        tuple(source.values[j] for j in SOURCES),
        source.positions,
    )
    smaller = dataclasses.replace(geometry, source_layers=len(SOURCES))
    read = reads(recipe, smaller, (0, 1, 2))
    direct = fit_layer(recipe, moments_of(recipe, smaller, only, target), 2, read, 0.1)
    for first, second in ((chosen.keys, direct.keys), (chosen.values, direct.values)):
        torch.testing.assert_close(first.weight, second.weight, **TIGHT)
        torch.testing.assert_close(first.bias, second.bias, **TIGHT)


@every_recipe
@every_geometry
def test_shapes_dtypes_and_costs_are_as_declared(recipe: Recipe, geometry: Geometry) -> None:
    moments = random_moments(recipe, geometry)
    read = read_heads(recipe, geometry, 0)
    inputs = len(SOURCES) * (read.stop - read.start) * geometry.source_dim
    outputs = geometry.target_heads * geometry.target_dim
    assert recipe.weight_shape(geometry, width(recipe, geometry)) == (inputs, outputs)
    for dtype in (torch.float32, torch.bfloat16):
        fitted = fit_layer(recipe, moments, 0, reads(recipe, geometry), 0.01, dtype=dtype)
        assert fitted.sources == SOURCES
        for affine in (fitted.keys, fitted.values):
            assert (affine.weight.shape, affine.weight.dtype) == ((inputs, outputs), dtype)
            assert (affine.bias.shape, affine.bias.dtype) == ((outputs,), torch.float32)
            assert affine.nbytes == inputs * outputs * dtype.itemsize + 4 * outputs


@every_recipe
@every_geometry
def test_the_mean_maps_to_the_mean_even_through_rounded_weights(
    recipe: Recipe, geometry: Geometry
) -> None:
    source, target = source_cache(geometry), random_target(geometry)
    moments = moments_of(recipe, geometry, source, target)
    fitted = fit_layer(recipe, moments, 0, reads(recipe, geometry), 1.0, dtype=torch.bfloat16)
    means = [source.keys[j].double().mean(0, keepdim=True).float() for j in SOURCES]
    given = applied(recipe, fitted.keys, geometry, means)
    torch.testing.assert_close(given[0], target.keys[0].mean(0), rtol=1e-4, atol=1e-4)


@every_recipe
@every_geometry
def test_fitting_and_applying_are_deterministic(recipe: Recipe, geometry: Geometry) -> None:
    source, target = source_cache(geometry), random_target(geometry)
    outputs = []
    for _ in range(2):
        moments = moments_of(recipe, geometry, source, target)
        fitted = fit_layer(recipe, moments, 0, reads(recipe, geometry), 0.01)
        contents = [source.keys[j] for j in SOURCES]
        outputs.append(applied(recipe, fitted.keys, geometry, contents))
    assert torch.equal(*outputs)


@every_recipe
@every_geometry
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_applying_by_chunks_equals_applying_at_once(
    recipe: Recipe, geometry: Geometry, chunk: int
) -> None:
    source = source_cache(geometry)
    fitted = fit_layer(recipe, random_moments(recipe, geometry), 0, reads(recipe, geometry), 0.01)
    contents = [source.values[j] for j in SOURCES]
    whole = applied(recipe, fitted.values, geometry, contents)
    chunked = applied(recipe, fitted.values, geometry, contents, chunk)
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)


@every_recipe
@every_geometry
def test_applying_equals_a_loop_over_tokens_and_heads(recipe: Recipe, geometry: Geometry) -> None:
    source = source_cache(geometry)
    fitted = fit_layer(recipe, random_moments(recipe, geometry), 0, reads(recipe, geometry), 0.01)
    contents = [source.keys[j][:5] for j in SOURCES]
    given = applied(recipe, fitted.keys, geometry, contents)
    weight, bias = fitted.keys.weight.double().numpy(), fitted.keys.bias.double().numpy()
    for token in range(5):
        for head in range(geometry.target_heads):
            read = read_heads(recipe, geometry, head)
            x = np.concatenate([c[token, read].numpy().ravel() for c in contents]).astype(float)
            for dim in range(geometry.target_dim):
                column = head * geometry.target_dim + dim
                expected = x @ weight[:, column] + bias[column]
                assert float(given[token, head, dim]) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@every_recipe
def test_too_few_rows_are_counted_in_the_error(recipe: Recipe) -> None:
    geometry = GEOMETRIES[0]
    inputs = recipe.weight_shape(geometry, width(recipe, geometry))[0]
    source, target = source_cache(geometry), random_target(geometry)
    moments = PairMoments(geometry, recipe.structure)
    moments.add_window(source.slice(0, inputs), target.slice(0, inputs))
    expected = f"{inputs} rows for {inputs} inputs: at least {inputs + 1}"
    with pytest.raises(TooFewData, match=expected):
        fit_layer(recipe, moments, 0, reads(recipe, geometry), ridge=0.01)
    moments.add_window(source.slice(inputs, inputs + 1), target.slice(inputs, inputs + 1))
    assert fit_layer(recipe, moments, 0, reads(recipe, geometry), ridge=0.01).sources == SOURCES


@every_recipe
def test_inputs_that_determine_nothing_are_an_error_without_a_ridge(recipe: Recipe) -> None:
    geometry = GEOMETRIES[0]
    source, target = source_cache(geometry), random_target(geometry)
    twice = dataclasses.replace(source, keys=(source.keys[0],) * 4)
    moments = moments_of(recipe, geometry, twice, target)
    with pytest.raises(SingularSystem, match="do not determine a map at ridge 0"):
        fit_layer(recipe, moments, 0, reads(recipe, geometry), ridge=0.0)
    assert (
        fit_layer(recipe, moments, 0, reads(recipe, geometry), ridge=1e-6)
        .keys.weight.isfinite()
        .all()
    )
    still = dataclasses.replace(source, values=tuple(torch.ones_like(v) for v in source.values))
    moments = moments_of(recipe, geometry, still, target)
    with pytest.raises(SingularSystem, match="constant"):
        fit_layer(recipe, moments, 0, reads(recipe, geometry), ridge=0.1)


@every_recipe
@pytest.mark.parametrize("ridge", [-0.01, float("nan"), float("inf")])
def test_a_ridge_that_is_no_ridge_is_refused(recipe: Recipe, ridge: float) -> None:
    geometry = GEOMETRIES[0]
    moments = random_moments(recipe, geometry)
    with pytest.raises(ValueError, match="ridge must be"):
        fit_layer(recipe, moments, 0, reads(recipe, geometry), ridge)


@every_recipe
@pytest.mark.parametrize(
    ("layer", "sources"), [(3, (0,)), (-1, (0,)), (0, ()), (0, (4,)), (0, (1, 0)), (0, (1, 1))]
)
def test_layers_that_are_not_there_are_refused(
    recipe: Recipe, layer: int, sources: tuple[int, ...]
) -> None:
    geometry = GEOMETRIES[0]
    moments = random_moments(recipe, geometry)
    with pytest.raises(LayoutError, match="target layer"):
        fit_layer(recipe, moments, layer, reads(recipe, geometry, sources), ridge=0.01)


@every_recipe
def test_layers_are_not_taken_for_heads_nor_heads_for_layers(recipe: Recipe) -> None:
    geometry = GEOMETRIES[0]
    other = "all_heads" if recipe.structure == "joint" else "joint"
    with pytest.raises(LayoutError, match="reads (heads|whole layers), not"):
        fit_layer(
            recipe,
            random_moments(recipe, geometry),
            0,
            reads_of_layers(other, geometry, SOURCES),
            0.01,
        )


@every_recipe
def test_moments_of_another_structure_are_refused(recipe: Recipe) -> None:
    geometry = GEOMETRIES[0]
    other = next(r.structure for r in RECIPES.values() if r.structure != recipe.structure)
    with pytest.raises(LayoutError, match=f"needs {recipe.structure} moments, not {other}"):
        fit_layer(recipe, PairMoments(geometry, other), 0, reads(recipe, geometry), ridge=0.01)


@every_recipe
def test_the_ridge_has_no_unit_and_does_not_depend_on_the_number_of_rows(recipe: Recipe) -> None:
    """Rows repeated ten times, or inputs a thousand times larger: the same predictions."""
    geometry = GEOMETRIES[0]
    source, target = source_cache(geometry), random_target(geometry)
    once = fit_layer(recipe, random_moments(recipe, geometry), 0, reads(recipe, geometry), 0.5)
    repeated = PairMoments(geometry, recipe.structure)
    for _ in range(10):
        repeated.add_window(source, target)
    ten_times = fit_layer(recipe, repeated, 0, reads(recipe, geometry), 0.5)
    torch.testing.assert_close(ten_times.keys.weight, once.keys.weight, **TIGHT)
    larger = dataclasses.replace(source, keys=tuple(1000 * layer for layer in source.keys))
    scaled = fit_layer(
        recipe, moments_of(recipe, geometry, larger, target), 0, reads(recipe, geometry), 0.5
    )
    torch.testing.assert_close(1000 * scaled.keys.weight, once.keys.weight, **TIGHT)


def test_a_dependence_down_to_rounding_is_seen_though_cholesky_goes_through() -> None:
    """The second input differs from the first by one unit in the last place of its square."""
    gram = torch.ones(2, 2, dtype=torch.float64)
    gram[1, 1] += torch.finfo(torch.float64).eps
    assert torch.linalg.cholesky_ex(gram).info == 0
    with pytest.raises(SingularSystem, match="depend linearly"):
        solve(gram, torch.ones(2, 1, dtype=torch.float64), rows=9, ridge=0.0)


def test_inputs_of_very_different_scales_are_not_taken_for_dependent() -> None:
    gram = torch.diag(torch.tensor([1e-12, 1.0, 1e12], dtype=torch.float64))
    weight = solve(gram, gram.diagonal()[:, None].clone(), rows=9, ridge=0.0)
    torch.testing.assert_close(weight, torch.ones(3, 1, dtype=torch.float64))


def test_residuals_from_moments_are_those_of_the_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=generator, dtype=torch.float64) + 10
    y = torch.randn(200, 3, generator=generator, dtype=torch.float64) + x[:, :3]
    moments = Moments(1, 5, 3)
    moments.add(x[None], y[None])
    system = {"rows": 200, "ridge": 0.3}
    weight = solve(moments.gram[0], moments.cross[0], **system)
    residuals = (y - y.mean(0)) - (x - x.mean(0)) @ weight
    given = residual_squares(moments.gram[0], moments.cross[0], moments.squares_y[0], **system)
    torch.testing.assert_close(given, residuals.square().sum(0))


def random_mapper(recipe: Recipe, geometry: Geometry) -> Mapper:
    source = identity(geometry.source_layers, geometry.source_heads, geometry.source_dim)
    target = identity(geometry.target_layers, geometry.target_heads, geometry.target_dim)
    read = reads(recipe, geometry, (1, 3))
    kinds = read if isinstance(read, HeadReads) else (None, None)
    inputs, outputs = recipe.weight_shape(geometry, 2)
    maps = [AffineMap(torch.randn(inputs, outputs), torch.randn(outputs), heads) for heads in kinds]
    layers = (LayerMap((1, 3), *maps),) * geometry.target_layers
    return Mapper(source, target, recipe.name, layers, ExactPrefixes(), skipped_positions=1)


@every_recipe
def test_a_mapper_is_checked_against_its_recipe(recipe: Recipe) -> None:
    geometry = GEOMETRIES[1]
    mapper = random_mapper(recipe, geometry)
    check_shapes(mapper)
    inputs, outputs = recipe.weight_shape(geometry, 2)
    assert recipe_of(mapper) is recipe
    assert flops_per_token(mapper) == geometry.target_layers * 4 * inputs * outputs
    assert mapper.nbytes == geometry.target_layers * 2 * 4 * (inputs + 1) * outputs
    names = [name for name, _ in mapper.affine_maps()]
    assert names[:3] == ["target.0.k", "target.0.v", "target.1.k"]
    narrow = dataclasses.replace(
        mapper.layers[2],
        values=dataclasses.replace(mapper.layers[2].values, weight=torch.ones(3, 4)),
    )
    with pytest.raises(LayoutError, match="target layer 2"):
        check_shapes(dataclasses.replace(mapper, layers=(*mapper.layers[:2], narrow)))


def test_an_unknown_recipe_and_a_missing_layer_are_refused() -> None:
    mapper = random_mapper(RECIPES["full_head"], GEOMETRIES[0])
    with pytest.raises(LayoutError, match=r"one of \['full_head', 'head_local', 'top_heads'\]"):
        check_shapes(dataclasses.replace(mapper, recipe="tail_local"))
    with pytest.raises(LayoutError, match="the target has 3 layers, the mapper 2"):
        dataclasses.replace(mapper, layers=mapper.layers[:2])
    with pytest.raises(LayoutError, match="target layer 0"):
        dataclasses.replace(
            mapper, layers=(dataclasses.replace(mapper.layers[0], sources=(4,)), *mapper.layers[1:])
        )
