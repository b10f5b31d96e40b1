"""Whether a translation is good enough and worth it, decided before the cache is read.

Cheap questions first: could it be worth it at all (at the smallest tail), what does the evidence
say, is it worth it with the tail that this asks for, what became of earlier answers, and is there
time. The first that is answered with no is the reason.
"""

import math
from dataclasses import dataclass

from mappers import forecast
from mappers.accept import Verdict, decide, places_of
from mappers.cache import KVCache
from service.entry import Entry
from service.guards import Standing
from service.policy import Policy
from service.schemas import TranslateRequest

UNPROVEN_TAIL = 1

DETAILS = {
    "below_break_even": "reading the prompt costs no more than translating it",
    "no_evidence": "the mapper was not measured on enough prompts of this kind",
    "certified_kl_exceeds_threshold": "no native tail that is allowed meets the KL threshold",
    "length_not_certified": "the mapper was not measured on prompts of this length",
    "drift_budget_exhausted": "the conversation has been translated too often, or its KLs add up",
    "breaker_open": "the KLs that callers measured for such requests are too large",
    "would_miss_deadline": "queue and translation would take longer than the caller waits",
    "non_finite": "the cache, or its translation, holds values that are not finite",
    "implausible_values": "the cache is not what this model makes of a text, or not of that text",
    "probe_kl_exceeds_threshold": "so far from the probe, no native tail meets the KL threshold",
    "out_of_distribution": "the cache is less like the calibration text than what was measured",
}


@dataclass(frozen=True, slots=True)
class Ruling:
    """The gate's answer: ``reason`` None means translate the first ``tokens`` rows.

    ``provisional``: there is a probe whose error is not known yet, so the gate will rule again.
    ``too_slow``: the predicted time of the translation itself, if ``trust`` in it were whole, would
    be what speaks against it. Where it is let through all the same, that is to measure it.
    """

    reason: str | None
    tokens: int
    native_tail: int
    prefix: KVCache | None
    kl_bound: float | None
    max_kl: float
    rows: int
    unproven: bool
    expected_seconds: float | None
    trust: float = 1.0
    too_slow: bool = False
    provisional: bool = False
    probe_error: float | None = None
    expected_kl: float | None = None

    @property
    def detail(self) -> str | None:
        """One sentence for people."""
        return None if self.reason is None else DETAILS[self.reason]

    @property
    def doubtful(self) -> bool:
        """Whether the prediction alone has refused it."""
        return self.too_slow and self.reason in ("below_break_even", "would_miss_deadline")

    @property
    def drift(self) -> float:
        """What the answer adds to its session at most, nats a token."""
        return self.max_kl if self.kl_bound is None or self.provisional else self.kl_bound


def rule(
    entry: Entry,
    request: TranslateRequest,
    standing: Standing,
    *,
    allow_unproven: bool,
    pending_seconds: float,
    left_seconds: float = math.inf,
    trust: float = 1.0,
    probe_error: float | None = None,
) -> Ruling:
    """Weigh the time, the evidence, and what became of earlier answers.

    ``pending_seconds``: the expected wait for the device. ``left_seconds``: how long the caller
    waits. ``trust``: the share of what is predicted for the translation itself that counts
    (``service/estimate.py``). ``probe_error`` None, where the request has a probe: not known yet,
    so what may pass passes.
    """
    policy = standing.policy
    max_kl = min(policy.max_kl, request.max_kl or math.inf)
    known = _known_prefix(entry, request)
    verdict, unproven = Verdict("reprefill", "below_break_even", 0, None, 0), False
    time = _Time(entry, request, policy, pending_seconds, left_seconds)
    smallest = _smallest_tail(entry, policy)
    if time.worth_it(smallest, trust):
        verdict, unproven = _weigh(
            entry,
            request,
            policy,
            max_kl,
            prefix_known=known is not None,
            probe_error=probe_error,
            unproven=allow_unproven,
        )
    tail = verdict.native_tail
    tokens = request.tokens - tail
    expected = entry.timing.seconds(tokens)
    reason = (
        verdict.reason
        or (None if time.worth_it(tail, trust) else "below_break_even")
        or _worn(request, standing, max_kl if verdict.kl_bound is None else verdict.kl_bound)
        or ("would_miss_deadline" if time.late(tail, trust) else None)
    )
    return Ruling(
        reason=reason,
        tokens=0 if reason else tokens,
        native_tail=0 if reason else tail,
        prefix=known.slice(0, tokens) if known is not None and not reason else None,
        kl_bound=verdict.kl_bound,
        max_kl=max_kl,
        rows=verdict.rows,
        unproven=unproven,
        expected_seconds=None if expected is None else pending_seconds + expected,
        trust=trust,
        too_slow=time.is_predicted_away(smallest, tail),
        provisional=request.probe is not None and probe_error is None,
        probe_error=probe_error,
    )


def expected_kl(
    entry: Entry, request: TranslateRequest, policy: Policy, ruling: Ruling, score: object
) -> float | None:
    """The mean KL of measured prompts with such a score; None where there is nothing to say."""
    if entry.evidence is None or not isinstance(score, float):
        return None
    places = places_of(
        entry.evidence,
        tokens=request.start_position + request.tokens,
        domain=policy.evidence_domain(request.domain),
        hops=request.hops,
        prefix_known=request.probe is not None or ruling.prefix is not None,
        probe_tokens=0 if request.probe is None else request.probe.tokens,
    )
    if isinstance(places, str):
        return None
    return forecast.expected_kl(entry.evidence, places, ruling.native_tail, score)


def _smallest_tail(entry: Entry, policy: Policy) -> int:
    """The best that can happen: every tail that is read natively is one that is not saved."""
    measured = entry.evidence.native_tails if entry.evidence else ()
    return min(policy.native_tails or measured, default=UNPROVEN_TAIL)


@dataclass(frozen=True, slots=True)
class _Time:
    """What a request takes and what its caller has; ``share`` is that of the prediction of the
    translation itself that is held against it."""

    entry: Entry
    request: TranslateRequest
    policy: Policy
    pending_seconds: float
    left_seconds: float

    def worth_it(self, native_tail: int, share: float = 1.0) -> bool:
        """Whether translating takes less time than reading what is translated; true if unknown."""
        reading = _reading_seconds(self.request, self.policy)
        tokens = max(0, self.request.tokens - native_tail)
        expected = self.entry.timing.seconds(tokens)
        if reading is None or expected is None:
            return True
        return share * expected < reading * tokens / self.request.tokens

    def late(self, native_tail: int, share: float = 1.0) -> bool:
        """Whether it comes too late."""
        expected = self.entry.timing.seconds(self.request.tokens - native_tail) or 0.0
        done_seconds = self.pending_seconds + share * expected
        return comes_too_late(self.request, native_tail, done_seconds, self.left_seconds)

    def is_predicted_away(self, smallest: int, native_tail: int) -> bool:
        """Whether it would be refused for the whole prediction, and would not without any."""

        def refused(share: float) -> bool:
            worth_it = self.worth_it(smallest, share) and self.worth_it(native_tail, share)
            return not worth_it or self.late(native_tail, share)

        return refused(1.0) and not refused(0.0)


def _reading_seconds(request: TranslateRequest, policy: Policy) -> float | None:
    """What the target's own prefill of the prompt takes, as far as anyone has said."""
    if request.reprefill_ms is not None:
        return request.reprefill_ms / 1000
    rate = policy.reprefill_tokens_per_second
    return None if rate is None else request.tokens / rate


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
    policy: Policy,
    max_kl: float,
    *,
    prefix_known: bool,
    probe_error: float | None,
    unproven: bool,
) -> tuple[Verdict, bool]:
    """The evidence's verdict, and whether it stands on no evidence at all."""
    probe_tokens = 0 if request.probe is None else request.probe.tokens
    most = request.tokens - 1 - probe_tokens
    tail = most if request.max_native_tail is None else min(request.max_native_tail, most)
    domain = policy.evidence_domain(request.domain)
    verdict = Verdict("reprefill", "no_evidence", 0, None, 0)
    if policy.domains and (request.domain or policy.default_domain) not in policy.domains:
        return verdict, False
    if entry.evidence is not None and entry.rows_an_input >= policy.min_rows_an_input:
        verdict = decide(
            entry.evidence,
            tokens=request.start_position + request.tokens,
            domain=domain,
            hops=request.hops,
            # A probe holds the first tokens, whether or not the mapper knows them.
            prefix_known=prefix_known or probe_tokens > 0,
            rule=policy.rule(max_kl),
            max_native_tail=tail,
            native_tails=policy.native_tails or None,
            probe_tokens=probe_tokens,
            probe_error=probe_error,
        )
    smallest = min(policy.native_tails, default=UNPROVEN_TAIL)
    if verdict.reason == "no_evidence" and unproven and tail >= smallest:
        return Verdict("translate", None, smallest, None, verdict.rows), True
    return _closed(verdict, max_kl), False


def _closed(verdict: Verdict, max_kl: float) -> Verdict:
    """A bound that is missing or not a number is no certificate, whatever the verdict says."""
    certified = verdict.kl_bound is not None and verdict.kl_bound <= max_kl
    if verdict.reason is None and not certified:
        return verdict._replace(decision="reprefill", reason="certified_kl_exceeds_threshold")
    return verdict


def _worn(request: TranslateRequest, standing: Standing, kl: float) -> str | None:
    """Whether earlier translations speak against one more, of this certified KL.

    What they cost is known for a session that we served; a caller that names none, or less than
    its hops, is taken to have paid as much for each of them.
    """
    spent = max(standing.spent, request.hops * kl)
    budget = standing.policy.drift_budget
    if budget is not None and not spent + kl <= budget:
        return "drift_budget_exhausted"
    return "breaker_open" if standing.breaker_open else None


def comes_too_late(
    request: TranslateRequest, native_tail: int, done_seconds: float, left_seconds: float
) -> bool:
    """Whether an answer in ``done_seconds`` is no use: the caller waits only ``left_seconds``, or
    would read the prompt in less; the target reads the tail natively in any case."""
    share = 1 - native_tail / request.tokens
    saved = math.inf if request.reprefill_ms is None else share * request.reprefill_ms / 1000
    return not done_seconds < min(saved, left_seconds)
