"""A fit whose sums do not fit in memory: source layers are ranked first, then part after part.

The ranking is by matched heads alone (``head_local``'s sums), which relate far fewer numbers. The
target layers are then cut into runs of neighbours. Each run gets the source layers that rank best
for its layers as its pool, and a pass of its own over the text; within the pool it is fitted as a
whole pair would be. Where the pool is all source layers, the maps are those of a fit in one pass.
A part that is done is kept, so that a stopped fit goes on with the next.
"""

import hashlib
import json
import shutil
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mappers.cache import DTYPES
from mappers.collect import PROFILE_SCHEMA, Checkpoints, collect
from mappers.corpus import Corpus
from mappers.errors import LayoutError, TooLittleMemory
from mappers.geometry import Geometry
from mappers.mapper import LayerMap, heads_of_a_token
from mappers.models import LoadedModel
from mappers.moments import PairMoments
from mappers.part_maps import SCHEMA, load_layers, save_layers
from mappers.parts import Part
from mappers.passes import sums_lags, work_folder
from mappers.plan import FitPlan
from mappers.profile_fit import ProfileBuilder
from mappers.progress import steps
from mappers.recipes import RECIPES, fit_layer
from mappers.selection import Selection, select
from mappers.sums_memory import Shares, all_layers, shares_of_a_pass, sums_bytes

DECISIVE = {"recipe", "k", "selection", "lags", "share", "ridge", "weights_dtype"}
"""What of a plan a part's maps follow from, beside what its sums do."""


class InParts(NamedTuple):
    """The ranking as a selection with what is read in the end, the maps, and how many rows."""

    selection: Selection
    layers: tuple[LayerMap, ...]
    rows: int


def shares_needed(plan: FitPlan, geometry: Geometry) -> Shares | None:
    """What each pass holds where the sums of the pair do not fit; None where they do.

    Raises TooLittleMemory where not even one target layer's fit, LayoutError for a plan that needs
    the sums of all layers together.
    """
    structure, lags, memory = (
        RECIPES[plan.recipe].structure,
        sums_lags(plan),
        plan.sums_memory,
    )
    needed = sums_bytes(geometry, structure, lags, all_layers(geometry))
    if needed <= memory:
        return None
    if plan.spread > 1 or plan.row_weights != "none":
        raise LayoutError(
            f"the sums of this pair take {needed:,} bytes, of {memory:,} that may be used: it is "
            "fitted in parts, whose layers cannot share reads unevenly nor have row weights"
        )
    ranking = sums_bytes(geometry, "per_head", 0, all_layers(geometry))
    if ranking > memory:
        raise TooLittleMemory("the sums that rank source layers", ranking, memory)
    least = _least_layers(plan, geometry)
    return shares_of_a_pass(geometry, structure, lags, least=least, memory_bytes=memory)


def parts_of(r2: Tensor, shares: Shares) -> list[Part]:
    """Runs of target layers, each with the source layers that are best for them.

    r2: float ``[L_s, L_t]``. A pool is filled with the best of every target layer of the run, then
    with every one's second best, and so on.
    """
    layers = r2.shape[1]
    passes = -(-layers // shares.target_layers)
    ranked = r2.argsort(dim=0, descending=True, stable=True)
    parts = []
    for targets in torch.arange(layers).tensor_split(passes):
        in_turn = dict.fromkeys(ranked[:, targets].flatten().tolist())
        pool = sorted(list(in_turn)[: shares.source_layers])
        parts.append(Part(tuple(pool), tuple(targets.tolist())))
    return parts


def fit_in_parts(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    profile: ProfileBuilder,
    shares: Shares,
    *,
    progress: bool = True,
) -> InParts:
    """Every target layer's maps, in as many passes as ``shares`` makes of them, and one before.

    Raises what ``collect``, ``select`` and ``Recipe.solve`` do.
    """
    whole = Geometry.of(source.identity, target.identity)
    sums = PairMoments(whole, "per_head")
    sums = _pass(plan, source, target, corpus, sums, profile=profile, progress=progress)
    ranking, rows = select(sums, 1, plan.ridge), sums.count
    del sums  # before a part's are held
    layers: list[LayerMap] = []
    for part in parts_of((ranking.r2_keys + ranking.r2_values) / 2, shares):
        layers += _fitted(plan, source, target, corpus, part, progress)
    reads = tuple(layer.heads or layer.sources for layer in layers)
    return InParts(replace(ranking, reads=reads), tuple(layers), rows)


def _fitted(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    part: Part,
    progress: bool,
) -> list[LayerMap]:
    """The maps of one part, in the numbers of the pair; those of an earlier run if it has them."""
    asked = plan.model_dump(mode="json", include=DECISIVE)
    digest = _digest(plan, source, target, corpus, part, asked)
    done = work_folder(plan, source, target) / f"maps-{digest[:16]}.safetensors"
    if done.exists():
        return load_layers(done)
    whole = Geometry.of(source.identity, target.identity)
    structure = RECIPES[plan.recipe].structure
    sums = PairMoments(part.geometry(whole), structure, sums_lags(plan))
    sums = _pass(plan, source, target, corpus, sums, part=part, progress=progress)
    layers = [part.whole_numbers(layer, whole) for layer in _solved(plan, sums, progress)]
    save_layers(done, layers)
    # As large as the memory that they were allowed, once for every part.
    shutil.rmtree(_checkpoints(plan, source, target, corpus, part).folder)
    return layers


def _solved(plan: FitPlan, sums: PairMoments, progress: bool) -> list[LayerMap]:
    recipe, dtype = RECIPES[plan.recipe], DTYPES[plan.weights_dtype]
    chosen = select(sums, plan.k, plan.ridge, method=plan.selection, share=plan.share).reads
    return [
        fit_layer(recipe, sums, layer, chosen[layer], plan.ridge, dtype=dtype)
        for layer in steps(range(len(chosen)), "solving", show=progress)
    ]


def _pass(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    sums: PairMoments,
    *,
    part: Part | None = None,
    profile: ProfileBuilder | None = None,
    progress: bool,
) -> PairMoments:
    return collect(
        source,
        target,
        corpus,
        sums,
        stride=plan.stride,
        skip_positions=plan.skip_positions,
        profile=profile,
        part=part,
        checkpoints=_checkpoints(plan, source, target, corpus, part),
        progress=progress,
    )


def _checkpoints(
    plan: FitPlan, source: LoadedModel, target: LoadedModel, corpus: Corpus, part: Part | None
) -> Checkpoints:
    """Of the ranking's pass (no part) or of one part's, each in a folder of its own."""
    sums_of = [part, RECIPES[plan.recipe].structure, sums_lags(plan)] if part else [PROFILE_SCHEMA]
    digest = _digest(plan, source, target, corpus, *sums_of)
    return Checkpoints(work_folder(plan, source, target) / f"sums-{digest[:16]}", digest)


def _digest(
    plan: FitPlan, source: LoadedModel, target: LoadedModel, corpus: Corpus, *decisive: Any
) -> str:
    sides = [side.identity.model_dump(mode="json") for side in (source, target)]
    rows = [corpus.digest, plan.stride, plan.skip_positions]
    facts = json.dumps([SCHEMA, *sides, *rows, *decisive], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()


def _least_layers(plan: FitPlan, geometry: Geometry) -> int:
    """With fewer source layers there are not k things to read."""
    if RECIPES[plan.recipe].structure != "joint":
        return plan.k
    of_a_layer = (plan.lags + 1) * heads_of_a_token(geometry) // geometry.source_layers
    return -(-plan.k // of_a_layer)
