"""Upper confidence bounds on the KL of requests like those that were measured.

Documents, not tokens, are the independent draws. No distribution is assumed. Two risks: how large a
KL is exceeded by a small share of requests (``kl_bound``), and how large the KL is on average
(``mean_bound``). A KL that is not finite counts as the worst that there is.
"""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

BET_AT_MOST = 0.9
"""Of the largest bet that cannot lose everything; close to 1, since most KLs are far below 1."""
BISECTIONS = 30


def kl_bound(kls: Iterable[float], alpha: float, delta: float) -> float | None:
    """The smallest order statistic x with P(KL > x) <= alpha at confidence 1 - delta.

    Exact and distribution-free: x is the r-th of n sorted values, r the smallest with
    P(Binomial(n, alpha) <= n - r) <= delta. None when n < ln(delta) / ln(1 - alpha), where not even
    the largest value is certain enough.
    """
    if not (0 < alpha < 1 and 0 < delta < 1):
        raise ValueError(f"alpha and delta lie between 0 and 1, not {alpha} and {delta}")
    values = sorted(kl if math.isfinite(kl) else math.inf for kl in kls)
    exceedances = _allowed_exceedances(len(values), alpha, delta)
    return None if exceedances is None else values[len(values) - 1 - exceedances]


def documents_needed(alpha: float, delta: float) -> int:
    """The fewest documents with which ``kl_bound`` is a number at all."""
    return math.ceil(math.log(delta) / math.log1p(-alpha))


def mean_bound(kls: Iterable[float], clip: float, delta: float) -> float:
    """An upper bound on E[min(KL, clip)] at confidence 1 - delta; ``clip`` when there are no KLs.

    By betting (Waudby-Smith & Ramdas, arXiv 2010.09686): if the mean were m, a gambler who stakes a
    share l_i on each KL to come, l_i known before it, would have K = prod(1 + l_i (m - y_i)), whose
    expectation never exceeds 1. So m is refuted once K reaches 1 / delta (Ville). The bets follow
    the variance seen so far (the paper's predictable plug-in). K grows with m, so bisection finds
    the smallest m that is refuted, to within 2^-30 of ``clip`` from above. Unlike Hoeffding's, the
    bound shrinks with the variance.

    The KLs are to be in an order that has nothing to do with their sizes; they are shuffled, always
    in the same way, in case documents that resemble each other are neighbours.
    """
    if not (0 < clip < math.inf and 0 < delta < 1):
        raise ValueError(f"clip is above 0 and delta between 0 and 1, not {clip} and {delta}")
    values = np.array([min(kl, clip) / clip if math.isfinite(kl) else 1.0 for kl in kls])
    if not values.size:
        return clip
    values = np.random.default_rng(0).permutation(values)
    bets = _plug_in_bets(values, delta)
    # A mean below that of the sample is never claimed, whatever the gambler won.
    low, high = float(values.mean()), 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        refuted = _largest_log_capital(values, bets, middle) >= -math.log(delta)
        low, high = (low, middle) if refuted else (middle, high)
    return clip * high


def _plug_in_bets(values: Vector, delta: float) -> Vector:
    """A bet for each value ``[n]`` from those before it: ``sqrt(2 ln(1/delta) / (n variance))``."""
    seen = np.arange(1, len(values) + 1)
    means = (0.5 + values.cumsum()) / (seen + 1)
    variances = (0.25 + ((values - means) ** 2).cumsum()) / (seen + 1)
    before = np.concatenate([[0.25], variances[:-1]])
    bets: Vector = np.sqrt(-2 * math.log(delta) / (len(values) * before))
    return bets


def _largest_log_capital(values: Vector, bets: Vector, mean: float) -> float:
    if mean >= 1:
        return math.inf
    stakes = np.minimum(bets, BET_AT_MOST / (1 - mean))
    return float(np.log1p(stakes * (mean - values)).cumsum().max())


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
