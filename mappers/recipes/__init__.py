"""The recipes, by name; ``tests/mappers/test_recipes.py`` holds each of them to the contract."""

import torch

from mappers.errors import LayoutError
from mappers.mapper import Heads, LayerMap, Mapper, Reads
from mappers.moments import PairMoments
from mappers.recipes.contract import Recipe
from mappers.recipes.full_head import FULL_HEAD
from mappers.recipes.head_local import HEAD_LOCAL
from mappers.recipes.systems import LayerSums, cut
from mappers.recipes.top_heads import TOP_HEADS

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (FULL_HEAD, HEAD_LOCAL, TOP_HEADS)}


def recipe_of(mapper: Mapper) -> Recipe:
    """The recipe that a mapper names. Raises LayoutError when there is none of that name."""
    recipe = RECIPES.get(mapper.recipe)
    if recipe is None:
        raise LayoutError(f"no recipe of that name: expected one of {sorted(RECIPES)}")
    return recipe


def sums_of(recipe: Recipe, moments: PairMoments, target_layer: int, reads: Reads) -> LayerSums:
    """What the maps of one target layer follow from.

    Raises LayoutError for moments of another structure, and for layers or reads that are not there.
    """
    if moments.structure != recipe.structure:
        raise LayoutError(
            f"{recipe.name} needs {recipe.structure} moments, not {moments.structure}"
        )
    return cut(moments, target_layer, recipe.columns(reads, moments.geometry))


def fit_layer(
    recipe: Recipe,
    moments: PairMoments,
    target_layer: int,
    reads: Reads,
    ridge: float,
    *,
    dtype: torch.dtype = torch.float32,
) -> LayerMap:
    """Fit one target layer on what it reads. Raises as ``sums_of`` and ``Recipe.solve`` do."""
    sums = sums_of(recipe, moments, target_layer, reads)
    return recipe.solve(sums, reads, moments.geometry, ridge, dtype=dtype)


def check_shapes(mapper: Mapper) -> None:
    """LayoutError unless every weight and bias has the shape that the recipe gives it."""
    recipe = recipe_of(mapper)
    for index, layer in enumerate(mapper.layers):
        if (layer.heads is None) != (recipe.structure != "joint"):
            raise LayoutError(f"target layer {index}: {mapper.recipe} and a choice of heads")
        norm = layer.key_norm
        if norm is not None and tuple(norm.shape) != (mapper.geometry.target_dim,):
            raise LayoutError(f"target layer {index}: a key norm of shape {tuple(norm.shape)}")
        for affine in (layer.keys, layer.values):
            expected = recipe.weight_shape(mapper.geometry, reads_of(layer.sources, affine.heads))
            weight, bias = tuple(affine.weight.shape), tuple(affine.bias.shape)
            if (weight, bias) != (expected, expected[1:]):
                raise LayoutError(
                    f"target layer {index}: {mapper.recipe} has weights {expected} and biases "
                    f"{expected[1:]}, not {weight} and {bias}"
                )


def flops_per_token(mapper: Mapper) -> int:
    """Multiply-adds counted as two, for all target layers, keys and values together."""
    return sum(2 * affine.weight.numel() for _, affine in mapper.affine_maps())


def reads_of(sources: tuple[int, ...], heads: Heads | None) -> int:
    """How many layers, or heads a target head, a map reads."""
    return len(sources) if heads is None else len(heads[0])
