"""What is compared: our recipes and the two published ones, each a way to make a mapper from sums.

- the paper's recipe (arXiv 2608.03893): every kv head of the k source layers, chosen by the R2 of
  one layer's matched heads without ridge; one lambda for all, 0.01, once added to X'X as printed
  and once to X'X / N, which its sweeps suggest; the first token fitted and mapped like the rest.
- CacheBridge (arXiv 2609.00891): matched heads alone, the same choice of layers, rows weighted by
  attention; the first token likewise.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from mappers.corpus import Corpus
from mappers.fit import make_mapper
from mappers.geometry import Geometry
from mappers.mapper import AffineMap, HeadReads, LayerMap, Mapper
from mappers.models import ModelSpec
from mappers.moments import Moments, PairMoments
from mappers.plan import FitPlan
from mappers.prefixes import ExactPrefixes
from mappers.recipes import RECIPES
from mappers.recipes.full_head import FULL_HEAD
from mappers.recipes.head_local import HEAD_LOCAL
from mappers.recipes.systems import cut, solved
from mappers.second_pass import WeightedSums, collect_weighted
from mappers.selection import select
from mappers.sensitivity import weigher
from tests.bench.recipe_bench.fitted import Fitted, Models, of_mapper
from tests.bench.recipe_bench.measure import FEW, OURS, PUBLISHED, Reading
from tests.bench.recipe_bench.sums import PairSums, Part, with_heads, with_sink

RIDGE = 1e-4
OLS = 1e-10
"""No ridge, but for what rounding needs."""
PAPER_LAMBDA = 0.01
LAGS = 1


class Group(StrEnum):
    """Why a candidate is there."""

    DEFAULT = "default"
    """What ``kvt fit --budget`` gives."""
    OURS = "ours"
    """At the costs of the published recipes."""
    PUBLISHED = "published"
    CURVE = "curve"
    """Over k."""
    OPTION = "option"
    """One option of a fit changed."""
    CONTROL = "control"
    REJECTED = "rejected"
    """Ideas that are not in the product because they won nowhere."""
    GROWTH = "growth"
    """Over the number of calibration documents."""


READINGS: dict[Group, tuple[Reading, ...]] = dict.fromkeys(Group, FEW)
READINGS |= {Group.DEFAULT: OURS, Group.OURS: OURS, Group.PUBLISHED: PUBLISHED}

Fit = Callable[[Models, PairSums], Fitted]


@dataclass(frozen=True)
class Candidate:
    """``needs`` are the sums that ``fit`` reads."""

    name: str
    group: Group
    fit: Fit
    needs: frozenset[Part] = frozenset()


def candidates(geometry: Geometry) -> Iterator[Candidate]:
    """All but controls and rejected ones; those that need the same sums follow one another."""
    layers = geometry.source_layers
    ks = [k for k in (4, 8) if k <= layers]
    sweep = sorted({k for k in (1, 2, 4, 8, 12, 16) if k <= layers} | {layers})
    for recipe in ("full_head", "head_local"):
        for k in sweep:
            yield ours(recipe, k, group=Group.OURS if k in ks else Group.CURVE)
        for k in ks:
            yield from _optional(recipe, k)
    for m in _head_counts(geometry, ks):
        for lags in range(LAGS + 1):
            yield ours("top_heads", m, lags=lags, share="head")
            yield ours("top_heads", m, lags=lags, share="layer")
    for m in (1, 2, 4 * layers * geometry.source_heads):
        yield ours("top_heads", m, lags=1, share="layer", group=Group.CURVE)
    for k in ks:
        yield from _optional("top_heads", k * geometry.source_heads)
    for k in ks:
        for per_row in (False, True):
            name = f"paper k={k}, X'X{'/N' if per_row else ''} + 0.01"
            needs = with_sink("all_heads") | with_sink("per_head")
            fit = partial(_paper, k=k, per_row=per_row)
            yield Candidate(name, Group.PUBLISHED, fit, needs)
    for k in ks:
        fit = partial(_cache_bridge, k=k)
        yield Candidate(f"CacheBridge k={k}", Group.PUBLISHED, fit, with_sink("per_head"))


def _head_counts(geometry: Geometry, ks: Sequence[int]) -> list[int]:
    """As many heads as cost what ``head_local`` and ``full_head`` cost at these k."""
    return sorted({*ks, *(k * geometry.source_heads for k in ks)})


def ours(recipe: str, k: int, *, group: Group = Group.OURS, **options: object) -> Candidate:
    """A fit of the product, named by what its plan says of it."""
    plan = our_plan(recipe=recipe, k=k, **options)
    return Candidate(name_of(plan), group, partial(_fit_ours, plan=plan), needs_of(plan))


def name_of(plan: FitPlan) -> str:
    """The recipe, k and whatever else is not as in every plan."""
    return ", ".join([f"{plan.recipe} k={plan.k}", *_said(plan)])


def _said(plan: FitPlan) -> Iterator[str]:
    if plan.recipe == "top_heads":
        yield f"lag {plan.lags}"
        yield f"choice a {plan.share}"
    texts = {
        "greedy": plan.selection == "greedy",
        "weighted": plan.row_weights == "attention",
        "no key norm": not plan.key_norm,
    }
    yield from (text for text, applies in texts.items() if applies)


def _optional(recipe: str, k: int) -> Iterator[Candidate]:
    """The options of a fit, each alone, as far as they change anything for this recipe."""
    options: list[dict[str, object]] = [{"key_norm": False}]
    if recipe != "top_heads":  # whose selection is greedy anyway
        options.append({"selection": "greedy"})
    if recipe != "full_head":  # whose weighted sums are as large as there are heads
        options.append({"row_weights": "attention"})
    return (ours(recipe, k, group=Group.OPTION, **option) for option in options)


def our_plan(**options: object) -> FitPlan:
    """The defaults of ``kvt fit`` but for these; what it reads from disk is not read here."""
    unread = {"source": ModelSpec(path=""), "target": ModelSpec(path=""), "root": Path()}
    rows = {"stride": 1, "first_tokens": 0, "calibration": (Path(),)}
    return FitPlan.model_validate({**unread, **rows, **options})


def needs_of(plan: FitPlan) -> frozenset[Part]:
    """One set of sums, with lags, serves all that choose heads."""
    structure = RECIPES[plan.recipe].structure
    return with_heads(LAGS) if structure == "joint" else frozenset({Part(structure)})


def _fit_ours(models: Models, sums: PairSums, *, plan: FitPlan) -> Fitted:
    moments = sums.moments(needs_of(plan))
    began = time.process_time()
    mapper = fit_plan(models, sums.corpus, moments, plan)
    spent = time.process_time() - began
    return of_mapper(mapper, spent + sums.collecting_seconds(needs_of(plan)))


def fit_plan(models: Models, corpus: Corpus, moments: PairMoments, plan: FitPlan) -> Mapper:
    """What ``kvt fit`` makes of the sums."""
    weigh = weigher(plan, models.source, models.target, corpus, moments)
    selection = select(
        moments,
        plan.k,
        plan.ridge,
        method=plan.selection,
        share=plan.share,
        lags=plan.lags if moments.structure == "joint" else None,
        spread=plan.spread,
        weigh=weigh,
    )
    return make_mapper(plan, models.source, models.target, corpus, moments, selection)


def bare_mapper(models: Models, recipe: str, layers: Sequence[LayerMap], *, skipped: int) -> Mapper:
    """Without a table of prefixes: the benchmark puts first tokens in place itself."""
    sides = (models.source.identity, models.target.identity)
    return Mapper(*sides, recipe, tuple(layers), ExactPrefixes(), skipped)


def _paper(models: Models, sums: PairSums, *, k: int, per_row: bool) -> Fitted:
    chosen, seconds = _matched_layers(sums, k)
    moments = sums.moments(with_sink("all_heads"))
    shrinkage = PAPER_LAMBDA * (moments.count if per_row else 1)
    began = time.process_time()
    layers = []
    for layer, reads in enumerate(chosen):
        own = cut(moments, layer, FULL_HEAD.columns(reads, moments.geometry))
        keys, values = (_one_lambda(part, shrinkage) for part in own)
        layers.append(LayerMap(reads, keys, values))
    seconds += time.process_time() - began + sums.collecting_seconds(with_sink("all_heads"))
    return of_mapper(bare_mapper(models, "full_head", layers, skipped=0), seconds)


def _cache_bridge(models: Models, sums: PairSums, *, k: int) -> Fitted:
    """Its lambda is not published: ours, but one for all layers that are read."""
    chosen, seconds = _matched_layers(sums, k)
    moments = sums.moments(with_sink("per_head"))
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
    seconds += time.process_time() - began + sums.collecting_seconds(with_sink("per_head"))
    return of_mapper(bare_mapper(models, "head_local", layers, skipped=0), seconds)


def _matched_layers(sums: PairSums, k: int) -> tuple[list[tuple[int, ...]], float]:
    """The published choice of layers, and the CPU seconds that it took."""
    matched = sums.moments(with_sink("per_head"))
    began = time.process_time()
    found = [reads for reads in select(matched, k, OLS).reads if not isinstance(reads, HeadReads)]
    return found, time.process_time() - began


def _one_lambda(sums: Moments, shrinkage: float) -> AffineMap:
    """Ours is relative to the mean of the diagonal."""
    diagonal = sums.gram[0].diagonal()
    return solved(sums, shrinkage / float(diagonal.mean()), block=len(diagonal))
