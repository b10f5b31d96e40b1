"""The best map that a number of operations buys: candidates are fitted and judged, one is taken.

The measure is what the paper's recipe costs, ``full_head`` with k source layers (arXiv 2608.03893):
a budget is all of its operations a token, a half, a quarter or an eighth. Candidates spend it on
single source heads, of a token and of those before it (``top_heads``): chosen by each target head
or by a whole target layer, as many for every layer or more where errors cost more
(``mappers.sensitivity``). R2 does not say which is better, so the target says it: what counts is
the KL on windows held out of the fit (``mappers.held_out``), at native tails of 1 and of 32 alike.
"""

from collections.abc import Iterator
from typing import NamedTuple, get_args

from torch import Tensor

from mappers.corpus import Corpus
from mappers.errors import LayoutError
from mappers.geometry import Geometry
from mappers.head_selection import HeadSearch, Share
from mappers.held_out import held_out_kl, hold_out
from mappers.manifest import Candidate, Choice
from mappers.mapper import HeadReads, Mapper, heads_of_a_token
from mappers.models import LoadedModel
from mappers.moments import PairMoments
from mappers.passes import empty_sums, first_pass, require_rows
from mappers.plan import Budget, FitPlan
from mappers.profile_fit import ProfileBuilder
from mappers.recipes import flops_per_token
from mappers.sensitivity import weigher
from mappers.solving import solved_mapper

SPREADS = (1, 2, 4)
DIVISORS: dict[Budget, int] = {"paper": 1, "half": 2, "quarter": 4, "eighth": 8}


class Chosen(NamedTuple):
    """The plan of the best candidate, what it reads, the sums of all windows, what was tried."""

    plan: FitPlan
    reads: tuple[HeadReads, ...]
    moments: PairMoments
    choice: Choice


class Tried(NamedTuple):
    """A candidate: its plan, what it reads, and what was measured of it."""

    plan: FitPlan
    reads: tuple[HeadReads, ...]
    row: Candidate


def allowed_flops(budget: Budget, geometry: Geometry, k: int) -> int:
    """What a token may cost: a part of ``full_head`` with k layers, a multiply-add counted as two.

    That has, for keys and for values of each target layer, weights ``[k * H_s * D_s, H_t * D_t]``.
    """
    weights = 2 * geometry.target_layers * k * geometry.source_width * geometry.target_width
    return 2 * weights // DIVISORS[budget]


def as_reads(plan: FitPlan, geometry: Geometry) -> FitPlan:
    """The plan with its budget spent on ``top_heads``: k is then the heads that it buys.

    A plan without a budget stays as it is. Raises LayoutError where the budget buys no head.
    """
    if plan.budget is None:
        return plan
    heads = plan.k * geometry.source_heads // DIVISORS[plan.budget]
    if not heads:
        raise LayoutError(
            f"a budget of {plan.budget} with k {plan.k} buys less than one of "
            f"{geometry.source_heads} source heads; give a larger budget or k"
        )
    most = (plan.lags + 1) * heads_of_a_token(geometry)
    return plan.model_copy(update={"recipe": "top_heads", "k": min(heads, most)})


def choose(
    plan: FitPlan,
    budget: Budget,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    profile: ProfileBuilder,
    *,
    progress: bool = True,
) -> Chosen:
    """Fit every candidate on most of the windows, judge them on the others, take the best.

    ``profile`` sees all windows. The sums that are returned are of all windows as well: those held
    out are added once the candidates are judged. What is read stays as it was judged. A stopped
    pass goes on where it was; candidates are judged again. Raises TooFewData, before any model
    runs, where too little is left to fit on.
    """
    geometry = Geometry.of(source.identity, target.identity)
    reading, (fitted, held_out) = as_reads(plan, geometry), hold_out(corpus)
    require_rows(reading, fitted, geometry)

    def add(sums: PairMoments, windows: Corpus, part: str) -> PairMoments:
        return first_pass(
            reading, source, target, windows, sums, profile, part=part, progress=progress
        )

    sums = add(empty_sums(reading, source, target), fitted, "fitted")
    tried = judged(reading, source, target, fitted, held_out, sums, progress=progress)
    choice = Choice(
        budget=budget,
        flops_per_token=allowed_flops(budget, geometry, plan.k),
        held_out_windows=len(held_out.windows),
        candidates=tuple(one.row for one in tried),
    )
    best = tried[0]
    return Chosen(best.plan, best.reads, add(sums, held_out, "all"), choice)


def judged(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    fitted: Corpus,
    held_out: Corpus,
    sums: PairMoments,
    *,
    progress: bool = True,
) -> list[Tried]:
    """Every candidate, the best first.

    ``plan`` is as ``as_reads`` gives it; ``sums`` are of the windows of ``fitted``.
    """
    ways = list(_ways(plan, source, target, fitted, sums, progress))
    mappers = [
        solved_mapper(plan, source, target, fitted, sums, reads, progress=False)
        for _, reads in ways
    ]
    kl = held_out_kl(mappers, source, target, held_out, progress=progress)
    tried = [
        Tried(own, reads, _row(own, mapper, *tails))
        for (own, reads), mapper, tails in zip(ways, mappers, kl.tolist(), strict=True)
    ]
    return [tried[index] for index in kl.log().mean(1).argsort(stable=True).tolist()]


def _ways(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    sums: PairMoments,
    progress: bool,
) -> Iterator[tuple[FitPlan, tuple[HeadReads, ...]]]:
    """Every way to read ``plan.k`` heads, as a plan of its own, and what it reads.

    What errors cost is a matter of the target: one choice of reads serves to weigh for all.
    """
    weigh = weigher(plan, source, target, corpus, sums, progress=progress)
    search = HeadSearch(sums, plan.k, plan.ridge)
    worth: Tensor | None = None
    for share in get_args(Share):
        shared = plan.model_copy(update={"budget": None, "share": share})
        paths = search.paths(share)
        even = paths.even(plan.k)
        if worth is None:
            worth = weigh(paths.reads(even), paths.explained(even))
        for spread in SPREADS:
            paths, counts = search.spread(paths, share, worth, times=spread)
            yield shared.model_copy(update={"spread": spread}), paths.reads(counts)


def _row(plan: FitPlan, mapper: Mapper, kl_tail_1: float, kl_tail_32: float) -> Candidate:
    return Candidate(
        recipe=plan.recipe,
        k=plan.k,
        lags=plan.lags,
        share=plan.share,
        spread=plan.spread,
        flops_per_token=flops_per_token(mapper),
        kl_tail_1=float(f"{kl_tail_1:.6g}"),
        kl_tail_32=float(f"{kl_tail_32:.6g}"),
    )
