"""Suffix probe: whether the native tail, read over a translation, surprises the target too much.

The target reads the tail over the translated cache in any case, and so knows how likely it found
those tokens, for nothing. How likely they are at all differs from text to text by far more than a
bad translation changes it; what the source model made of the same tokens shows that. So, from the
evidence rows of one kind (bucket and native tail):

1. half of the documents: least squares for  tail NLL = a + b * source's tail NLL
2. the other half: the split conformal limit (Vovk et al. 2005) of what is left, of which a good
   document exceeds with probability ``FALSE_ALARMS`` at most; and that of the tail NLL by itself,
   for callers that do not know the source's

It is no KL and certifies nothing: it is a last look at one answer that was certified as one of its
kind. methods.md 4.1 c calls for it; no source in the literature was found for caches that are
translated. NLLs are in nats a token, as ``EvidenceRow.tail_nll`` defines them.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from mappers.conformal import conformal
from mappers.evidence import Arm, Bucket, EvidenceRow

SHORTEST_TAIL = 32
"""Fewer tokens say nothing: their mean likelihood is mostly chance."""

FALSE_ALARMS = 0.05
"""The share of good documents that each limit may send back."""

_FIT_AT_LEAST = 3
_LIMIT_AT_LEAST = math.ceil(1 / FALSE_ALARMS - 1)


class Judgement(NamedTuple):
    """``keep`` where the tail's NLL is at most ``limit``; ``expected_nll`` needs the source's."""

    expected_nll: float | None
    limit: float
    decision: Literal["keep", "reprefill"]


class SuffixCheck(NamedTuple):
    """Expected is ``intercept + slope * source_tail_nll``, and at most ``residual_limit`` more.

    ``nll_limit`` is for the tail's NLL by itself.
    """

    intercept: float
    slope: float
    residual_limit: float
    nll_limit: float

    def judge(self, tail_nll: float, source_tail_nll: float | None = None) -> Judgement:
        """NaN and infinity never pass."""
        if source_tail_nll is None:
            return Judgement(None, self.nll_limit, _decision(tail_nll, self.nll_limit))
        expected = self.intercept + self.slope * source_tail_nll
        limit = expected + self.residual_limit
        return Judgement(expected, limit, _decision(tail_nll, limit))


Kind = tuple[Bucket, int]


def fit_suffix(rows: Iterable[EvidenceRow]) -> dict[Kind, SuffixCheck]:
    """A check for each bucket and native tail that was measured on enough documents.

    Lengths go together; a document counts with the worst of its own.
    """
    kinds: dict[Kind, dict[str, list[EvidenceRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        measured = row.tail_nll is not None and row.source_tail_nll is not None
        if row.arm is Arm.TRANSLATED and row.native_tail >= SHORTEST_TAIL and measured:
            bucket = Bucket(row.domain, row.prefix_known, row.hops, row.probe_tokens)
            kinds[bucket, row.native_tail][row.document].append(row)
    fitted = {kind: _fit(documents) for kind, documents in kinds.items()}
    return {kind: check for kind, check in fitted.items() if check is not None}


def _fit(documents: Mapping[str, Sequence[EvidenceRow]]) -> SuffixCheck | None:
    names = sorted(documents)
    first, second = ([_points(documents[name]) for name in names[half::2]] for half in (0, 1))
    if len(first) < _FIT_AT_LEAST or len(second) < _LIMIT_AT_LEAST:
        return None
    intercept, slope = _line([point for points in first for point in points])
    residuals = [max(y - intercept - slope * x for x, y in points) for points in second]
    nlls = [max(y for _, y in points) for points in second]
    limits = [conformal(values, FALSE_ALARMS) for values in (residuals, nlls)]
    check = SuffixCheck(intercept, slope, *limits)
    return check if all(math.isfinite(number) for number in check) else None


Point = tuple[float, float]


def _points(rows: Sequence[EvidenceRow]) -> list[Point]:
    """The source's NLL and the target's; one that is not a number counts as infinitely bad."""
    pairs = [(row.source_tail_nll or 0.0, row.tail_nll or 0.0) for row in rows]
    return [pair if all(map(math.isfinite, pair)) else (0.0, math.inf) for pair in pairs]


def _line(points: Sequence[Point]) -> Point:
    """Intercept and slope of least squares; the slope is 0 where all x are equal."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    count = len(finite)
    if not count:
        return math.nan, math.nan
    mean_x, mean_y = sum(x for x, _ in finite) / count, sum(y for _, y in finite) / count
    spread = sum((x - mean_x) ** 2 for x, _ in finite)
    together = sum((x - mean_x) * (y - mean_y) for x, y in finite)
    slope = together / spread if spread > 0 else 0.0
    return mean_y - slope * mean_x, slope


def _decision(tail_nll: float, limit: float) -> Literal["keep", "reprefill"]:
    return "keep" if tail_nll <= limit < math.inf else "reprefill"
