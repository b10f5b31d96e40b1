"""What is compared: our recipes and the two published ones, each a way to make a mapper from sums.

- the paper's recipe (arXiv 2608.03893): every kv head of the k source layers, chosen by the R2 of
  one layer's matched heads without ridge; one lambda for all, 0.01, once added to X'X as printed
  and once to X'X / N, which its sweeps suggest; the first token fitted and mapped like the rest.
- CacheBridge (arXiv 2609.00891): matched heads alone, the same choice of layers, rows weighted by
  attention; the first token likewise.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mappers.corpus import Corpus
from mappers.fit import make_mapper
from mappers.geometry import Geometry, Structure
from mappers.mapper import AffineMap, HeadReads, LayerMap, Mapper
from mappers.models import LoadedModel, ModelSpec
from mappers.moments import Moments, PairMoments
from mappers.plan import FitPlan
from mappers.prefixes import ExactPrefixes
from mappers.recipes import RECIPES, flops_per_token
from mappers.recipes.full_head import FULL_HEAD
from mappers.recipes.head_local import HEAD_LOCAL
from mappers.recipes.systems import cut, solved
from mappers.second_pass import WeightedSums, collect_weighted
from mappers.selection import select
from recipe_bench.sums import PairSums

RIDGE = 1e-4
OLS = 1e-10
"""No ridge, but for what rounding needs."""
PAPER_LAMBDA = 0.01


@dataclass(frozen=True)
class Fitted:
    """A mapper with its costs; ``fit_seconds`` are CPU seconds from text to weights."""

    mapper: Mapper
    fit_seconds: float

    @property
    def flops_per_token(self) -> int:
        return flops_per_token(self.mapper)

    @property
    def nbytes(self) -> int:
        return self.mapper.nbytes


@dataclass(frozen=True)
class Models:
    source: LoadedModel
    target: LoadedModel

    def mapper(self, recipe: str, layers: Sequence[LayerMap], *, skipped: int) -> Mapper:
        """Without a table of prefixes: the benchmark puts first tokens in place itself."""
        sides = (self.source.identity, self.target.identity)
        return Mapper(*sides, recipe, tuple(layers), ExactPrefixes(), skipped)


Fit = Callable[[Models, PairSums], Fitted]


def candidates(geometry: Geometry) -> dict[str, Fit]:
    """By name, those of one structure side by side, since their sums are large."""
    source_layers = geometry.source_layers
    ks = [k for k in (4, 8) if k <= source_layers]
    sweep = sorted({k for k in (1, 2, 4, 8, 12, 16) if k <= source_layers} | {source_layers})
    found: dict[str, Fit] = {}
    for recipe in ("full_head", "head_local"):
        for k in sweep:
            found[f"{recipe} k={k}"] = partial(_ours, recipe=recipe, k=k)
        for k in ks:
            found |= _optional(recipe, k)
    for k in (2, 4, 8, 16, 32):
        if k <= 2 * source_layers * geometry.source_heads:
            found[f"top_heads k={k}"] = partial(_ours, recipe="top_heads", k=k)
        if k in ks:
            found |= _optional("top_heads", k)
    for k in ks:
        found[f"paper k={k}, X'X + 0.01"] = partial(_paper, k=k, per_row=False)
        found[f"paper k={k}, X'X/N + 0.01"] = partial(_paper, k=k, per_row=True)
    for k in ks:
        found[f"CacheBridge k={k}"] = partial(_cache_bridge, k=k)
    return found


def _optional(recipe: str, k: int) -> dict[str, Fit]:
    """The options of a fit, each alone, as far as they change anything for this recipe."""
    options: dict[str, dict[str, object]] = {
        "greedy": {"selection": "greedy"},
        "uneven": {"uneven": True},
        "weighted": {"row_weights": "attention"},
        "no key norm": {"key_norm": False},
    }
    if recipe == "top_heads":  # whose selection is greedy anyway
        del options["greedy"]
    if recipe == "full_head":  # whose weighted sums are as large as there are heads
        del options["weighted"]
    return {
        f"{recipe} k={k}, {label}": partial(_ours, recipe=recipe, k=k, **given)
        for label, given in options.items()
    }


def _ours(models: Models, sums: PairSums, **options: object) -> Fitted:
    plan = our_plan(**options)
    structure = RECIPES[plan.recipe].structure
    moments = _moments(sums, structure, skip_positions=plan.skip_positions)
    began = time.process_time()
    mapper = fit_plan(models, sums.corpus, moments, plan)
    return Fitted(mapper, time.process_time() - began + sums.collecting_seconds(structure))


def our_plan(**options: object) -> FitPlan:
    """The defaults of ``kvt fit`` but for these; what it reads from disk is not read here."""
    unread = {"source": ModelSpec(path=""), "target": ModelSpec(path=""), "root": Path()}
    rows = {"stride": 1, "first_tokens": 0, "calibration": (Path(),)}
    return FitPlan.model_validate({**unread, **rows, **options})


def fit_plan(models: Models, corpus: Corpus, moments: PairMoments, plan: FitPlan) -> Mapper:
    """What ``kvt fit`` makes of the sums."""
    selection = select(moments, plan.k, plan.ridge, method=plan.selection, uneven=plan.uneven)
    return make_mapper(plan, models.source, models.target, corpus, moments, selection)


def _paper(models: Models, sums: PairSums, *, k: int, per_row: bool) -> Fitted:
    chosen, seconds = _matched_layers(sums, k)
    moments = _moments(sums, "all_heads", skip_positions=0)
    shrinkage = PAPER_LAMBDA * (moments.count if per_row else 1)
    began = time.process_time()
    layers = []
    for layer, reads in enumerate(chosen):
        own = cut(moments, layer, FULL_HEAD.columns(reads, moments.geometry))
        keys, values = (_one_lambda(part, shrinkage) for part in own)
        layers.append(LayerMap(reads, keys, values))
    seconds += time.process_time() - began + sums.collecting_seconds("all_heads")
    return Fitted(models.mapper("full_head", layers, skipped=0), seconds)


def _cache_bridge(models: Models, sums: PairSums, *, k: int) -> Fitted:
    """Its lambda is not published: ours, but one for all layers that are read."""
    chosen, seconds = _matched_layers(sums, k)
    moments = _moments(sums, "per_head", skip_positions=0)
    began = time.process_time()
    weighted = collect_weighted(
        models.source,
        models.target,
        sums.corpus,
        WeightedSums(moments.geometry, HEAD_LOCAL, chosen),
        stride=1,
        skip_positions=0,
    )
    layers = []
    for layer, reads in enumerate(chosen):
        plain = cut(moments, layer, HEAD_LOCAL.columns(reads, moments.geometry))
        keys, values = (
            solved(part, RIDGE, block=part.gram.shape[1])
            for part in weighted.with_plain(layer, plain)
        )
        layers.append(LayerMap(reads, keys, values))
    seconds += time.process_time() - began + sums.collecting_seconds("per_head")
    return Fitted(models.mapper("head_local", layers, skipped=0), seconds)


def _matched_layers(sums: PairSums, k: int) -> tuple[list[tuple[int, ...]], float]:
    """The published choice of layers, and the CPU seconds that it took."""
    matched = _moments(sums, "per_head", skip_positions=0)
    began = time.process_time()
    found = [reads for reads in select(matched, k, OLS).reads if not isinstance(reads, HeadReads)]
    return found, time.process_time() - began


def _one_lambda(sums: Moments, shrinkage: float) -> AffineMap:
    """Ours is relative to the mean of the diagonal."""
    diagonal = sums.gram[0].diagonal()
    return solved(sums, shrinkage / float(diagonal.mean()), block=len(diagonal))


_held: dict[tuple[object, ...], PairMoments] = {}


def _moments(sums: PairSums, structure: Structure, *, skip_positions: int) -> PairMoments:
    """The sums last asked for are held: candidates come in the order of their structure."""
    key = (sums.folder, structure, skip_positions)
    if key not in _held:
        _held.clear()
        _held[key] = sums.moments(structure, skip_positions=skip_positions)
    return _held[key]
