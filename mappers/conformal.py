"""Limits taken from the measured documents themselves (split conformal prediction).

A new value that is exchangeable with n measured ones is beyond their limit with a probability that
is known beforehand (Vovk et al., "Algorithmic Learning in a Random World"), whatever they measure.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

from mappers.evidence_rows import EvidenceRow

FALSE_REFUSALS = 0.01
"""The share of good caches that each limit may refuse."""


def conformal(values: Iterable[float], alpha: float) -> float:
    """What a new value exceeds with probability ``alpha`` at most; the largest if n < 1 / alpha."""
    ordered = sorted(values)
    # Less a rounding error, which would make the next larger number of a whole one.
    rank = math.ceil((1 - alpha) * (len(ordered) + 1) - 1e-9)
    return ordered[min(rank, len(ordered)) - 1]


def limits_by_domain(rows: Iterable[EvidenceRow], alpha: float) -> dict[str | None, float]:
    """The largest score that a request of each domain may have; None: one that names no domain.

    Of exchangeable documents at most ``alpha`` are beyond it, or 1 / (n + 1) where n documents do
    not resolve that. A document counts with the largest score of its lengths. Empty when no scores
    were measured.
    """
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(lambda: -math.inf))
    for row in rows:
        if row.score is not None:
            of_domain = found[row.domain]
            of_domain[row.document] = max(of_domain[row.document], row.score)
    limits: dict[str | None, float] = {
        domain: conformal(list(scores.values()), alpha) for domain, scores in found.items()
    }
    return {**limits, None: max(limits.values())} if limits else {}
