"""Whether a translation is good enough and worth it, decided before the cache is read."""

import math
from dataclasses import dataclass

from mappers.cache import KVCache
from mappers.evidence import Verdict, decide
from service.schemas import TranslateRequest
from service.settings import Settings
from service.store import Entry

UNPROVEN_TAIL = 1

DETAILS = {
    "below_break_even": "reading the prompt costs no more than translating it",
    "no_evidence": "the mapper was not measured on enough prompts of this kind",
    "certified_kl_exceeds_threshold": "no native tail that is allowed meets the KL threshold",
    "length_not_certified": "the mapper was not measured on prompts of this length",
    "drift_budget_exhausted": "the cache has been translated more often than was measured",
    "would_miss_deadline": "the queue is too long for the caller's reprefill_ms",
    "non_finite": "the cache, or its translation, holds values that are not finite",
}


@dataclass(frozen=True, slots=True)
class Ruling:
    """The gate's answer: ``reason`` None means translate the first ``tokens`` rows."""

    reason: str | None
    tokens: int
    native_tail: int
    prefix: KVCache | None
    kl_bound: float | None
    max_kl: float
    rows: int
    unproven: bool
    expected_seconds: float | None

    @property
    def detail(self) -> str | None:
        """One sentence for people."""
        return None if self.reason is None else DETAILS[self.reason]


def rule(
    entry: Entry, request: TranslateRequest, settings: Settings, *, pending_seconds: float
) -> Ruling:
    """Weigh the evidence, then the time. ``pending_seconds``: the expected wait for the device."""
    max_kl = min(settings.max_kl, request.max_kl or math.inf)
    known = _known_prefix(entry, request)
    verdict, unproven = _weigh(entry, request, settings, max_kl, prefix_known=known is not None)
    tokens = request.tokens - verdict.native_tail
    expected = entry.timing.seconds(tokens)
    reason = verdict.reason or _too_slow(request, verdict, expected, pending_seconds)
    return Ruling(
        reason=reason,
        tokens=0 if reason else tokens,
        native_tail=0 if reason else verdict.native_tail,
        prefix=known.slice(0, tokens) if known is not None and not reason else None,
        kl_bound=verdict.kl_bound,
        max_kl=max_kl,
        rows=verdict.rows,
        unproven=unproven,
        expected_seconds=None if expected is None else pending_seconds + expected,
    )


def _known_prefix(entry: Entry, request: TranslateRequest) -> KVCache | None:
    # The table holds keys that were rotated from position 0 on.
    if request.start_position:
        return None
    ids = request.prefix_token_ids[: request.tokens]
    match = entry.loaded.mapper.prefixes.longest_match(ids)
    return None if match is None else match[1]


def _weigh(
    entry: Entry,
    request: TranslateRequest,
    settings: Settings,
    max_kl: float,
    *,
    prefix_known: bool,
) -> tuple[Verdict, bool]:
    """The evidence's verdict, and whether it stands on no evidence at all."""
    most = request.tokens - 1
    tail = most if request.max_native_tail is None else min(request.max_native_tail, most)
    verdict = Verdict("reprefill", "no_evidence", 0, None, 0)
    if entry.evidence is not None:
        verdict = decide(
            entry.evidence,
            tokens=request.start_position + request.tokens,
            domain=request.domain or settings.default_domain,
            hops=request.hops,
            prefix_known=prefix_known,
            max_kl=max_kl,
            max_native_tail=tail,
            alpha=settings.alpha,
            delta=settings.delta,
        )
    if verdict.reason == "no_evidence" and settings.allow_unproven and tail >= UNPROVEN_TAIL:
        return Verdict("translate", None, UNPROVEN_TAIL, None, verdict.rows), True
    return _closed(verdict, max_kl), False


def _closed(verdict: Verdict, max_kl: float) -> Verdict:
    """A bound that is missing or not a number is no certificate, whatever the verdict says."""
    if verdict.reason is None and not (verdict.kl_bound or 0.0) <= max_kl:
        return verdict._replace(decision="reprefill", reason="certified_kl_exceeds_threshold")
    return verdict


def _too_slow(
    request: TranslateRequest, verdict: Verdict, expected: float | None, pending_seconds: float
) -> str | None:
    if request.reprefill_ms is None or expected is None:
        return None
    # The target reads the tail natively: that share of its prefill is paid in any case.
    share = 1 - verdict.native_tail / request.tokens
    saved = share * request.reprefill_ms / 1000
    if not expected < saved:
        return "below_break_even"
    return None if pending_seconds + expected < saved else "would_miss_deadline"
