"""The experiment that the project began with, on data whose answer is known.

Six source layers of independent random content; every target layer is a linear read of source
layers 1, 3 and 4 plus a little noise; both sides cache their keys with a rotary embedding of their
own. Stripping, selecting and mapping recovers the target on text that was not fitted; mapping
cached keys from the layer at the same depth, without either idea, recovers next to nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mappers.cache import KVCache
from mappers.geometry import Geometry
from mappers.identity import ModelIdentity
from mappers.mapper import LayerMap, Mapper, Reads
from mappers.moments import PairMoments
from mappers.prefixes import ExactPrefixes
from mappers.recipes import RECIPES, fit_layer
from mappers.rope import RotaryTable
from mappers.selection import select
from mappers.translate import Translator
from tests.mappers.pairs import identity, linear_target, random_cache, reads_of_layers, rotate

READ = (1, 3, 4)
NOISE = 0.01
WINDOW = 100
GEOMETRY = Geometry(6, 2, 16, 6, 2, 16)
SOURCE, TARGET = identity(6, 2, 16, theta=1e4), identity(6, 2, 16, theta=5e5)
# Windows lie all over the context, those held out between those fitted.
FITTED, HELD_OUT = range(0, 4000, 500), range(250, 4000, 1250)

every_recipe = pytest.mark.parametrize("recipe", RECIPES)


@dataclass(frozen=True)
class Window:
    """What the two models cached for the same tokens."""

    source: KVCache
    target: KVCache


def window(start_position: int) -> Window:
    source = random_cache(6, WINDOW, 2, 16, seed=start_position, start_position=start_position)
    target = linear_target(source, GEOMETRY, READ, seed=-1)
    noise = random_cache(6, WINDOW, 2, 16, seed=10_000 + start_position)
    return Window(cached(source, SOURCE), cached(noisy(target, noise), TARGET))


def noisy(target: KVCache, noise: KVCache) -> KVCache:
    def add(layers: Sequence[Tensor], more: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(t + NOISE * t.std() * n for t, n in zip(layers, more, strict=True))

    return KVCache(add(target.keys, noise.keys), add(target.values, noise.values), target.positions)


def cached(content: KVCache, side: ModelIdentity) -> KVCache:
    """Content as the model would cache it, through the test's own rotary embedding."""
    keys = (rotate(layer, content.positions, side.rope.theta).float() for layer in content.keys)
    return KVCache(tuple(keys), content.values, content.positions)


def stripped(cache: KVCache, side: ModelIdentity) -> KVCache:
    table = RotaryTable.of(side.rope, cache.positions)
    return KVCache(tuple(table.strip(layer) for layer in cache.keys), cache.values, cache.positions)


@pytest.fixture(scope="module")
def fitted_windows() -> list[Window]:
    return [window(start) for start in FITTED]


@pytest.fixture(scope="module")
def held_out() -> list[Window]:
    return [window(start) for start in HELD_OUT]


def r2_by_layer(given: Iterator[Sequence[Tensor]], wanted: Iterator[Sequence[Tensor]]) -> Tensor:
    """Centred R2 of each target layer over all windows together, ``[L_t]``."""
    scores = []
    for ours, truth in zip(zip(*given, strict=True), zip(*wanted, strict=True), strict=True):
        predicted, expected = torch.cat(ours).double(), torch.cat(truth).double()
        left = (expected - predicted).square().sum()
        scores.append(1 - left / (expected - expected.mean(0)).square().sum())
    return torch.stack(scores)


@every_recipe
def test_stripped_and_selected_the_target_is_recovered_on_unseen_text(
    recipe: str, fitted_windows: list[Window], held_out: list[Window]
) -> None:
    moments = PairMoments(GEOMETRY, RECIPES[recipe].structure)
    for seen in fitted_windows:
        moments.add_window(stripped(seen.source, SOURCE), stripped(seen.target, TARGET))
    chosen = select(moments, k=3, ridge=1e-4, share="head")
    assert chosen.reads == (reads(recipe, READ),) * 6

    translator = Translator(fit_mapper(recipe, moments, chosen.reads))
    answers = [translator.translate(unseen.source, dtype=torch.float32) for unseen in held_out]
    keys = r2_by_layer((a.keys for a in answers), (unseen.target.keys for unseen in held_out))
    values = r2_by_layer((a.values for a in answers), (unseen.target.values for unseen in held_out))
    assert keys.min() >= 0.999
    assert values.min() >= 0.999


@every_recipe
def test_cached_keys_of_the_layer_at_the_same_depth_predict_next_to_nothing(
    recipe: str, fitted_windows: list[Window], held_out: list[Window]
) -> None:
    """Even in the three target layers whose depth happens to be one of those that they read."""
    same_depth = tuple(reads(recipe, (layer,)) for layer in range(6))
    assert held_out_r2(recipe, same_depth, fitted_windows, held_out).max() < 0.1


@every_recipe
def test_the_two_ideas_alone_make_that_difference(
    recipe: str, fitted_windows: list[Window], held_out: list[Window]
) -> None:
    """The same code as for the control above, now on stripped keys and the right layers."""
    fitted, unseen = (
        [Window(stripped(w.source, SOURCE), stripped(w.target, TARGET)) for w in windows]
        for windows in (fitted_windows, held_out)
    )
    assert held_out_r2(recipe, (reads(recipe, READ),) * 6, fitted, unseen).min() >= 0.999


def reads(recipe: str, sources: tuple[int, ...]) -> Reads:
    return reads_of_layers(RECIPES[recipe].structure, GEOMETRY, sources)


def held_out_r2(
    recipe: str,
    sources: tuple[Reads, ...],
    fitted_windows: list[Window],
    held_out: list[Window],
) -> Tensor:
    """R2 by layer of key maps between these keys as they are, with nothing stripped or put in."""
    moments = PairMoments(GEOMETRY, RECIPES[recipe].structure)
    for seen in fitted_windows:
        moments.add_window(seen.source, seen.target)
    mapper = fit_mapper(recipe, moments, sources)
    answers = [map_keys(mapper, unseen.source) for unseen in held_out]
    return r2_by_layer(iter(answers), (unseen.target.keys for unseen in held_out))


def fit_mapper(recipe: str, moments: PairMoments, sources: tuple[Reads, ...]) -> Mapper:
    layers: tuple[LayerMap, ...] = tuple(
        fit_layer(RECIPES[recipe], moments, layer, read, ridge=1e-4)
        for layer, read in enumerate(sources)
    )
    return Mapper(SOURCE, TARGET, recipe, layers, ExactPrefixes(), skipped_positions=0)


def map_keys(mapper: Mapper, source: KVCache) -> list[Tensor]:
    recipe = RECIPES[mapper.recipe]
    outputs = []
    for layer in mapper.layers:
        prepared = recipe.prepare(
            layer.keys, layer.sources, GEOMETRY, device=torch.device("cpu"), dtype=torch.float32
        )
        out = torch.empty(source.tokens, 2, 16)
        contents = [source.keys[j] for j in layer.sources]
        if recipe.structure == "joint":
            contents += [source.values[j] for j in layer.sources]
        recipe.apply(prepared, contents, out)
        outputs.append(out)
    return outputs
