"""The best map that a number of operations buys: candidates are fitted and judged, one is taken.

The measure is what the paper's recipe costs, ``full_head`` with k source layers (arXiv 2608.03893):
a budget is all of its operations a token, a half, a quarter or an eighth. Candidates spend it on
single source heads, of a token and of those before it (``top_heads``): chosen by each target head
or by a whole target layer, as many for every layer or more where errors cost more
(``mappers.sensitivity``). R2 does not say which is better, so the target says it: what counts is
the KL on windows held out of the fit (``mappers.held_out``), at native tails of 1 and of 32 alike.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

from mappers.corpus import Corpus
from mappers.errors import LayoutError
from mappers.geometry import Geometry
from mappers.head_selection import Share, head_paths
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
    """The plan of the best candidate, the sums of all windows, and what was tried."""

    plan: FitPlan
    moments: PairMoments
    choice: Choice


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
    out are added once the candidates are judged. A stopped pass goes on where it was; candidates
    are judged again. Raises TooFewData, before any model runs, where too little is left to fit on.
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
        candidates=tuple(row for _, row in tried),
    )
    return Chosen(tried[0][0], add(sums, held_out, "all"), choice)


def judged(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    fitted: Corpus,
    held_out: Corpus,
    sums: PairMoments,
    *,
    progress: bool = True,
) -> list[tuple[FitPlan, Candidate]]:
    """Every candidate's plan and what was measured of it, the best first.

    ``plan`` is as ``as_reads`` gives it; ``sums`` are of the windows of ``fitted``.
    """
    tried = list(_candidates(plan, source, target, fitted, sums, progress))
    kl = held_out_kl([mapper for _, mapper in tried], source, target, held_out, progress=progress)
    rows = [
        (own, _row(own, mapper, *tails))
        for (own, mapper), tails in zip(tried, kl.tolist(), strict=True)
    ]
    return [rows[index] for index in kl.log().mean(1).argsort(stable=True).tolist()]


def _candidates(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    sums: PairMoments,
    progress: bool,
) -> Iterator[tuple[FitPlan, Mapper]]:
    """Every way to read ``plan.k`` heads, as a plan of its own, and its mapper."""

    def solved(reads: Sequence[HeadReads]) -> Mapper:
        return solved_mapper(plan, source, target, corpus, sums, reads, progress=False)

    weigh = weigher(plan, source, target, corpus, sums, progress=progress)
    for share in get_args(Share):
        shared = plan.model_copy(update={"budget": None, "share": share})
        paths = head_paths(sums, max(SPREADS) * plan.k, plan.ridge, share)
        even = paths.even(plan.k)
        worth = weigh(paths.reads(even), paths.explained(even))
        for spread in SPREADS:
            counts = even if spread == 1 else paths.spread(plan.k, worth, times=spread)
            yield shared.model_copy(update={"spread": spread}), solved(paths.reads(counts))


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
