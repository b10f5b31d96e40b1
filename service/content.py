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

from mappers.cache import KVCache, Readable, consecutive
from mappers.conformal import FALSE_REFUSALS
from mappers.evidence import Evidence
from mappers.identity import ModelIdentity
from mappers.profile import CalibrationProfile, Finding
from mappers.sample import largest_of, sample_rows
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

    def begin(self, request: TranslateRequest) -> "Inspection":
        """Look at the source cache of a request, a layer at a time, as they arrive."""
        return Inspection(self, request)

    def judge(
        self, strangers: float | None, found: Finding | None, hops: int, domain: str | None
    ) -> tuple[str | None, Facts]:
        """What speaks against a finite cache, and what was measured of it."""
        if strangers is not None and not strangers <= STRANGERS_AT_MOST:
            return "implausible_values", {"strangers": strangers}
        if found is None:
            return None, {}
        facts: Facts = {
            "deviation": found.deviation,
            "deviation_at": found.at,
            "score": found.score,
        }
        if not found.deviation <= self.limit * (TRANSLATED_MARGIN if hops else 1):
            return "implausible_values", facts
        if hops:
            return None, facts
        known = self.score_limits.get(domain, self.score_limits.get(None, math.inf))
        return ("out_of_distribution" if not found.score <= known else None), facts


class Inspection:
    """One source cache under inspection: ``add`` each layer in order, then ask for the ``result``.

    Kept of a layer are its largest values and a few rows, so what it lies in may go.
    """

    def __init__(self, gate: ContentGate, request: TranslateRequest) -> None:
        self._gate, self._request = gate, request
        self._positions = consecutive(request.tokens, request.start_position)
        self._rows = sample_rows(
            request.tokens,
            start_position=request.start_position,
            skip_positions=gate.skip_positions,
        )
        self._strangers: float | None = None
        self._peaks: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    @property
    def layers(self) -> int:
        """How many it has seen."""
        return len(self._peaks)

    def add(self, keys: Tensor, values: Tensor) -> None:
        """The next layer, each ``[T, H, D]``, any float dtype."""
        profile = self._gate.profile
        if profile is not None:
            if not self._peaks and not self._request.hops:
                first = KVCache((keys,), (values,), self._positions)
                self._strangers = _strangers(profile, first, self._request)
            rows = self._rows.to(keys.device)
            self._keys.append(keys[rows])
            self._values.append(values[rows])
        self._peaks.append(largest_of(keys, values))

    def result(self, domain: str | None) -> Inspected:
        """What is to be said of all layers; ``domain`` is the one that the evidence is of."""
        peaks = torch.stack(self._peaks, dim=1)
        if not bool(peaks.isfinite().all()):
            return Inspected("non_finite", float("nan"), {})
        reason, facts = self._gate.judge(
            self._strangers, self._examined(peaks), self._request.hops, domain
        )
        return Inspected(reason, float(peaks.amax()), facts)

    def _examined(self, peaks: Tensor) -> Finding | None:
        profile = self._gate.profile
        if profile is None or len(self._rows) == 0:
            return None
        taken = KVCache(tuple(self._keys), tuple(self._values), self._positions[self._rows])
        length = int(self._positions[-1]) + 1
        return profile.examine_rows(taken, self._gate.source, length=length, peaks=peaks)


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
