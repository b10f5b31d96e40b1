"""How unfamiliar a text is, from its source cache alone: the out-of-distribution score.

The mean, over kinds, layers and heads, of two of the profile's features in standard deviations:
how far the mean row is from that of the calibration texts, and the square of the rows outside of
their leading components. Both say how far the mapper has to extrapolate (Ren et al., arXiv
2209.15558, use Mahalanobis distances for selective generation). The distance within the leading
components is left out: on the embedded family it did not tell one kind of text from another. The
score is closed form: nothing is fitted to KLs.

It is no forecast for one document of a domain: which tokens come next decides most of that. Its job
is to find a text that is less familiar than what the certificate of its domain rests on. So its
limit is taken from the very documents that were measured, by split conformal prediction.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mappers.evidence_rows import EvidenceRow
from mappers.features import FEATURES

FAMILIARITY = ("shift", "residual")


def score_of(found: Mapping[str, Tensor], z: Tensor) -> float:
    """The score of features ``found``, whose values in standard deviations are ``z [F]``."""
    parts = torch.split(z, [found[name].numel() for name in FEATURES])
    named = dict(zip(FEATURES, parts, strict=True))
    return float(torch.cat([named[name] for name in FAMILIARITY]).mean())


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


def conformal(values: Iterable[float], alpha: float) -> float:
    """What a new value exceeds with probability ``alpha`` at most; the largest if n < 1 / alpha."""
    ordered = sorted(values)
    # Less a rounding error, which would make the next larger number of a whole one.
    rank = math.ceil((1 - alpha) * (len(ordered) + 1) - 1e-9)
    return ordered[min(rank, len(ordered)) - 1]
