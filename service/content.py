"""The content gate: whether a source cache is what it should be, seen when it has arrived.

Everything is read for values that are not finite and for single outliers; 96 rows are compared with
the mapper's profile (``mappers/profile.py``). A mapper without one (an imported one) is served
without these checks. A cache that was translated itself is no cache of the model, only close to
one: it may deviate twice as far, and its text is not judged. What spoils a cache puts it farther
off than that.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mappers.cache import Readable
from mappers.conformal import FALSE_REFUSALS
from mappers.evidence import Evidence
from mappers.identity import ModelIdentity
from mappers.profile import CalibrationProfile
from mappers.sample import largest
from service.schemas import TranslateRequest

STRANGERS_AT_MOST = 0.05
TRANSLATED_MARGIN = 2.0
"""On the embedded pairs good caches that were translated before deviate up to 1.07 times the limit,
misread and exchanged ones 3 times and more."""


Facts = dict[str, float | str]


class Inspected(NamedTuple):
    """``reason`` None: nothing speaks against the cache; ``largest`` is its largest value."""

    reason: str | None
    largest: float
    facts: Facts


@dataclass(frozen=True, slots=True)
class ContentGate:
    """What one loaded mapper holds against caches."""

    profile: CalibrationProfile | None
    source: ModelIdentity
    skip_positions: int
    limit: float
    score_limits: Mapping[str | None, float]

    @classmethod
    def of(
        cls,
        profile: CalibrationProfile | None,
        evidence: Evidence | None,
        source: ModelIdentity,
        skip_positions: int,
    ) -> "ContentGate":
        """Limits are computed once, here."""
        if profile is None:
            return cls(None, source, skip_positions, 0.0, {})
        scores = evidence.score_limits if evidence else {}
        return cls(profile, source, skip_positions, profile.limit(FALSE_REFUSALS), scores)

    def inspect(self, cache: Readable, request: TranslateRequest, domain: str | None) -> Inspected:
        """Look at a source cache as received; ``domain`` is the one that its evidence is of."""
        peaks = largest(cache)
        if not bool(peaks.isfinite().all()):
            return Inspected("non_finite", float("nan"), {})
        peak = float(peaks.amax())
        if self.profile is None:
            return Inspected(None, peak, {})
        reason, facts = self._compare(self.profile, cache, peaks, request, domain)
        return Inspected(reason, peak, facts)

    def _compare(
        self,
        profile: CalibrationProfile,
        cache: Readable,
        peaks: Tensor,
        request: TranslateRequest,
        domain: str | None,
    ) -> tuple[str | None, Facts]:
        strangers = None if request.hops else _strangers(profile, cache, request)
        if strangers is not None and not strangers <= STRANGERS_AT_MOST:
            return "implausible_values", {"strangers": strangers}
        found = profile.examine(cache, self.source, skip_positions=self.skip_positions, peaks=peaks)
        if found is None:
            return None, {}
        facts: Facts = {
            "deviation": found.deviation,
            "deviation_at": found.at,
            "score": found.score,
        }
        if not found.deviation <= self.limit * (TRANSLATED_MARGIN if request.hops else 1):
            return "implausible_values", facts
        if request.hops:
            return None, facts
        known = self.score_limits.get(domain, self.score_limits.get(None, math.inf))
        return ("out_of_distribution" if not found.score <= known else None), facts


def _strangers(
    profile: CalibrationProfile, cache: Readable, request: TranslateRequest
) -> float | None:
    """The share of the rows whose token the request names that are not of that token."""
    first = () if request.start_position else request.prefix_token_ids[: request.tokens]
    ids = dict(enumerate(first))
    if request.sample_token_ids is not None:
        ids |= dict(zip(request.sample_token_ids.rows, request.sample_token_ids.ids, strict=True))
    rows, tokens = (torch.tensor(list(part), dtype=torch.int64) for part in (ids, ids.values()))
    return profile.tokens.strangers(cache, rows, tokens)
