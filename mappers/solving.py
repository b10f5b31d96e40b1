"""From sums to maps: every target layer solved for what it reads, keys on the target's norm."""

from collections.abc import Sequence
from dataclasses import replace

from mappers.cache import DTYPES
from mappers.collect import cache_of_text, content
from mappers.corpus import Corpus
from mappers.key_norm import norm_weights
from mappers.mapper import LayerMap, Mapper, Reads
from mappers.models import LoadedModel
from mappers.moments import PairMoments
from mappers.plan import FitPlan
from mappers.prefixes import ExactPrefixes
from mappers.progress import steps
from mappers.recipes import RECIPES, sums_of
from mappers.second_pass import WeightedSums


def solved_mapper(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    moments: PairMoments,
    reads: Sequence[Reads],
    *,
    weighted: WeightedSums | None = None,
    progress: bool = True,
) -> Mapper:
    """A mapper without exact prefixes; ``reads`` are those of each target layer.

    Raises what ``Recipe.solve`` does.
    """
    layers = tuple(
        _solved(plan, moments, reads, weighted, layer)
        for layer in steps(range(target.identity.num_layers), "solving", show=progress)
    )
    return mapper_of(plan, source, target, corpus, layers)


def mapper_of(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    layers: tuple[LayerMap, ...],
) -> Mapper:
    """Solved layers as a mapper without exact prefixes, keys on the target's norm if asked for."""
    if plan.key_norm and target.identity.k_norm:
        layers = with_key_norms(layers, target, corpus)
    return Mapper(
        source=source.identity,
        target=target.identity,
        recipe=plan.recipe,
        layers=layers,
        prefixes=ExactPrefixes(),
        skipped_positions=plan.skip_positions,
    )


def with_key_norms(
    layers: tuple[LayerMap, ...], target: LoadedModel, corpus: Corpus
) -> tuple[LayerMap, ...]:
    """The same layers with the norms that the target's keys are found to pass, if all do."""
    longest = max(corpus.windows, key=len)
    keys = content(cache_of_text(target, longest), target.identity.rope, length=len(longest)).keys
    norms = [norm_weights(layer) for layer in keys]
    if any(norm is None for norm in norms):
        return layers
    return tuple(replace(layer, key_norm=norm) for layer, norm in zip(layers, norms, strict=True))


def _solved(
    plan: FitPlan,
    moments: PairMoments,
    reads: Sequence[Reads],
    weighted: WeightedSums | None,
    layer: int,
) -> LayerMap:
    recipe = RECIPES[plan.recipe]
    sums = sums_of(recipe, moments, layer, reads[layer])
    if weighted is not None:
        sums = weighted.with_plain(layer, sums)
    dtype = DTYPES[plan.weights_dtype]
    return recipe.solve(sums, reads[layer], moments.geometry, plan.ridge, dtype=dtype)
