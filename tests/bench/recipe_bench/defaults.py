"""What ``kvt fit`` gives by default: the best candidate of a budget, judged on held-out windows."""

import time
from collections.abc import Iterator
from functools import partial

from mappers.budget import as_reads, judged
from mappers.geometry import Geometry
from mappers.held_out import hold_out
from mappers.plan import Budget
from mappers.solving import solved_mapper
from tests.bench.recipe_bench.candidates import Candidate, Group, our_plan
from tests.bench.recipe_bench.fitted import Fitted, Models, of_mapper
from tests.bench.recipe_bench.sums import FITTED, PairSums, Part, with_heads

BUDGETS: tuple[tuple[Budget, int], ...] = (("paper", 1), ("half", 2), ("quarter", 4), ("eighth", 8))
"""With what each divides the cost of full_head by."""
K = 4


def defaults(geometry: Geometry) -> Iterator[Candidate]:
    """One for each budget that buys a head, and one of twice the paper's."""
    for k in (K, 2 * K):
        for budget, divisor in BUDGETS if k == K else BUDGETS[:1]:
            if k <= geometry.source_layers and k * geometry.source_heads >= divisor:
                fit = partial(_fit, budget=budget, k=k)
                needs = with_heads(our_plan().lags)
                yield Candidate(f"default k={k}, {budget}", Group.DEFAULT, fit, needs)


def _fit(models: Models, sums: PairSums, *, budget: Budget, k: int) -> Fitted:
    """The same steps as ``mappers.fit``, from sums that are there already."""
    plan = as_reads(our_plan(budget=budget, k=k), models.geometry)
    everything = with_heads(plan.lags)
    fitted, held_out = hold_out(sums.corpus)
    part = sums.moments({Part("joint", FITTED, plan.lags)})
    began = time.process_time()
    best = judged(plan, models.source, models.target, fitted, held_out, part)[0]
    spent = time.process_time() - began
    whole = sums.moments(everything)
    began = time.process_time()
    mapper = solved_mapper(best.plan, models.source, models.target, sums.corpus, whole, best.reads)
    spent += time.process_time() - began
    return of_mapper(mapper, spent + sums.collecting_seconds(everything))
