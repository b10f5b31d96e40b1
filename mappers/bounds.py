"""Upper confidence bounds on the KL of requests like those that were measured.

Documents, not tokens, are the independent draws. No distribution is assumed.
"""

import math
from collections.abc import Iterable


def kl_bound(kls: Iterable[float], alpha: float, delta: float) -> float | None:
    """The smallest order statistic x with P(KL > x) <= alpha at confidence 1 - delta.

    Exact and distribution-free: x is the r-th of n sorted values, r the smallest with
    P(Binomial(n, alpha) <= n - r) <= delta. None when n < ln(delta) / ln(1 - alpha), where not even
    the largest value is certain enough. A value that is not finite counts as infinite.
    """
    if not (0 < alpha < 1 and 0 < delta < 1):
        raise ValueError(f"alpha and delta lie between 0 and 1, not {alpha} and {delta}")
    values = sorted(kl if math.isfinite(kl) else math.inf for kl in kls)
    exceedances = _allowed_exceedances(len(values), alpha, delta)
    return None if exceedances is None else values[len(values) - 1 - exceedances]


def documents_needed(alpha: float, delta: float) -> int:
    """The fewest documents with which ``kl_bound`` is a number at all."""
    return math.ceil(math.log(delta) / math.log1p(-alpha))


def _allowed_exceedances(rows: int, alpha: float, delta: float) -> int | None:
    """The largest m with P(Binomial(rows, alpha) <= m) <= delta; None when even 0 is too many."""
    total, largest = 0.0, None
    for m in range(rows):
        total += math.exp(_log_binomial(rows, m, alpha))
        if total > delta:
            break
        largest = m
    return largest


def _log_binomial(n: int, m: int, p: float) -> float:
    choose = math.lgamma(n + 1) - math.lgamma(m + 1) - math.lgamma(n - m + 1)
    return choose + m * math.log(p) + (n - m) * math.log1p(-p)
