"""The recipes, by name; ``tests/mappers/test_recipes.py`` holds each of them to the contract."""

from mappers.errors import LayoutError
from mappers.mapper import Mapper
from mappers.recipes.contract import Recipe
from mappers.recipes.full_head import FULL_HEAD
from mappers.recipes.head_local import HEAD_LOCAL

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (FULL_HEAD, HEAD_LOCAL)}


def recipe_of(mapper: Mapper) -> Recipe:
    """The recipe that a mapper names. Raises LayoutError when there is none of that name."""
    recipe = RECIPES.get(mapper.recipe)
    if recipe is None:
        raise LayoutError(f"no recipe of that name: expected one of {sorted(RECIPES)}")
    return recipe


def check_shapes(mapper: Mapper) -> None:
    """LayoutError unless every weight and bias has the shape that the recipe gives it."""
    recipe = recipe_of(mapper)
    for index, layer in enumerate(mapper.layers):
        expected = recipe.weight_shape(mapper.geometry, len(layer.sources))
        for affine in (layer.keys, layer.values):
            weight, bias = tuple(affine.weight.shape), tuple(affine.bias.shape)
            if (weight, bias) != (expected, expected[1:]):
                raise LayoutError(
                    f"target layer {index}: {mapper.recipe} has weights {expected} and biases "
                    f"{expected[1:]}, not {weight} and {bias}"
                )


def flops_per_token(mapper: Mapper) -> int:
    """Multiply-adds counted as two, for all target layers, keys and values together."""
    recipe, geometry = recipe_of(mapper), mapper.geometry
    return sum(recipe.flops_per_token(geometry, len(layer.sources)) for layer in mapper.layers)
