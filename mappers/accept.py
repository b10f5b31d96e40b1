"""The accept rule: whether what was measured certifies a request, and with which native tail.

Learn-then-Test (Angelopoulos et al., arXiv 2110.01052) over the rows of ``evidence.json``.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from mappers.bounds import kl_bound
from mappers.evidence import Bucket, Evidence

Risk = Literal["exceedance", "mean"]


class Rule(NamedTuple):
    """When a translation is good enough; as in the service's settings. KLs in nats a token."""

    max_kl: float
    alpha: float
    delta: float
    risk: Risk = "exceedance"
    kl_clip: float = 1.0


class Verdict(NamedTuple):
    """``translate`` with the smallest tail that passed, or ``reprefill`` with a reason."""

    decision: Literal["translate", "reprefill"]
    reason: str | None
    native_tail: int
    kl_bound: float | None
    rows: int


def decide(
    evidence: Evidence,
    *,
    tokens: int,
    domain: str | None,
    hops: int = 0,
    prefix_known: bool,
    rule: Rule,
    max_native_tail: int | None = None,
    native_tails: Collection[int] | None = None,
) -> Verdict:
    """Whether a prompt of ``tokens`` tokens, tail included, may be translated, and with which tail.

    ``domain`` None asks for every measured domain at once, so the worst decides; ``hops`` is the
    number of translations before this one. Between two measured lengths both must pass. Tails are
    tested from the largest allowed down and testing stops at the first that fails (fixed sequence),
    so the level holds for the tail that is chosen without correction. ``native_tails``: the only
    ones that may be chosen (None: all that were measured). A tail at which the mapper is ``idle``
    is never chosen; if none else passes, there is no evidence that translating helps. Reasons:
    ``no_evidence``, ``drift_budget_exhausted``, ``length_not_certified``,
    ``certified_kl_exceeds_threshold``.
    """
    buckets = _buckets(evidence, domain, prefix_known)
    domains = {b.domain for b in buckets}
    if not buckets:
        return _refusal("no_evidence")
    if any(hops > max(b.hops for b in buckets if b.domain == d) for d in domains):
        return _refusal("drift_budget_exhausted")
    own = [b for b in buckets if b.hops == hops]
    tables = [evidence.translated[b] for b in own]
    if len(tables) < len(domains):
        return _refusal("no_evidence")
    around = [_measured_around(tokens, table) for table in tables]
    if not all(around):
        return _refusal("length_not_certified")
    cells = [table[n] for table, lengths in zip(tables, around, strict=True) for n in lengths]
    if native_tails is not None:
        cells = [{w: kls for w, kls in cell.items() if w in native_tails} for cell in cells]
    idle = {w for b, n in zip(own, around, strict=True) for m in n for w in _idle(evidence, b, m)}
    limit = tokens - 1 if max_native_tail is None else min(max_native_tail, tokens - 1)
    return _smallest_tail(cells, idle, limit, rule)


def _smallest_tail(
    cells: Sequence[Mapping[int, tuple[float, ...]]],
    idle: Collection[int],
    limit: int,
    rule: Rule,
) -> Verdict:
    common = set.intersection(*(set(cell) for cell in cells))
    best = _refusal("no_evidence")
    for tail in sorted((w for w in common if w <= limit), reverse=True):
        bounds = [kl_bound(cell[tail], rule.alpha, rule.delta) for cell in cells]
        rows = min(len(cell[tail]) for cell in cells)
        known = [b for b in bounds if b is not None]
        if len(known) < len(bounds):
            return best if best.decision == "translate" else Verdict(*best[:4], rows)
        worst = max(known)
        if not worst <= rule.max_kl:
            failed = Verdict("reprefill", "certified_kl_exceeds_threshold", 0, worst, rows)
            return best if best.decision == "translate" else failed
        # An idle tail is tested like the others, or the sequence would not be a fixed one.
        if tail not in idle:
            best = Verdict("translate", None, tail, worst, rows)
        elif best.decision != "translate":
            best = Verdict("reprefill", "no_evidence", 0, worst, rows)
    return best


def _buckets(evidence: Evidence, domain: str | None, prefix_known: bool) -> list[Bucket]:
    every = evidence.translated
    return [
        bucket
        for bucket in every
        if bucket.prefix_known is prefix_known
        and domain in (None, bucket.domain)
        and bucket.probe_tokens == 0
    ]


def _measured_around(tokens: int, lengths: Mapping[int, object]) -> list[int]:
    """The measured length that equals ``tokens``, or the two around it; empty when outside."""
    below = [n for n in lengths if n <= tokens]
    above = [n for n in lengths if n >= tokens]
    return sorted({max(below), min(above)}) if below and above else []


def _idle(evidence: Evidence, bucket: Bucket, length: int) -> set[int]:
    return {w for b, n, w in evidence.idle if (b, n) == (bucket, length)}


def _refusal(reason: str) -> Verdict:
    return Verdict("reprefill", reason, 0, None, 0)
