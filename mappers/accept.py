"""The accept rule: whether what was measured certifies a request, and with which native tail.

Learn-then-Test (Angelopoulos et al., arXiv 2110.01052) over the rows of ``evidence.json``. What is
tested is the policy that serves, so that the confidence is the policy's:

-   Rows are those of the request's own kind: domain, first tokens known, hops, probe, and length
    (between two measured lengths both must pass). Their documents are to the rule as requests are:
    drawn alike, independently. No other assumption is made, and none can be spared.
-   Rows whose score is at the limit of their domain or beyond it do not count, because such
    requests are refused. The limit is made of scores alone; given it, the documents below are
    independent draws of those that are accepted, and the one that sets it is not. (A document sets
    it with the largest score of its lengths; at the others this is so up to one document.)
-   Tails are tested from the largest allowed down, and testing stops at the first that fails. A
    fixed sequence needs no correction: to choose a tail wrongly, the first that is truly too bad
    must pass its test, which happens with probability delta at most.
-   With a probe the rows are parted by its error (``mondrian.py``) and each group is tested at
    delta over the number of groups, so that all hold at once.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from math import inf, isfinite
from typing import Literal, NamedTuple

from mappers.bounds import documents_needed, kl_bound, mean_bound
from mappers.evidence import Bucket, Evidence, EvidenceRow
from mappers.mondrian import GROUPS_AT_MOST, edges_of, group_of, smallest_group

Risk = Literal["exceedance", "mean"]

ROOM = 4
"""How many times the documents that a rule needs at least are in each group of probe errors."""


class Rule(NamedTuple):
    """When a translation is good enough; as in the service's settings. KLs in nats a token.

    With confidence 1 - ``delta``, of the requests that are accepted: ``exceedance``: a share
    ``alpha`` at most has a KL above ``max_kl``; ``mean``: the mean of min(KL, ``kl_clip``) is
    ``max_kl`` at most.
    """

    max_kl: float
    alpha: float
    delta: float
    risk: Risk = "exceedance"
    kl_clip: float = 1.0

    def bound(self, kls: Sequence[float]) -> float | None:
        """What must not exceed ``max_kl``; None where there are fewer KLs than needed.

        Raises ValueError for a clip that would make any mean good enough.
        """
        if not self.enough(len(kls)):
            return None
        return _bound(tuple(kls), self.risk, self.alpha, self.delta, self.kl_clip)

    def enough(self, documents: int) -> bool:
        """Whether so many documents can certify anything, however good they are.

        Costs no more for a small ``max_kl``, which is a caller's; ``documents_needed`` does.
        """
        if self.risk == "exceedance":
            return documents >= documents_needed(self.alpha, self.delta)
        return _bound_of_zeros(documents, self.delta) <= self._share()

    def documents_needed(self) -> int:
        """The fewest documents that are enough; for what is said of a rule, not for requests."""
        if self.risk == "exceedance":
            return documents_needed(self.alpha, self.delta)
        return _zeros_needed(self._share(), self.delta)

    def _share(self) -> float:
        if not self.kl_clip > self.max_kl:
            raise ValueError(f"no mean of KLs clipped at {self.kl_clip} exceeds {self.max_kl}")
        return self.max_kl / self.kl_clip


class Verdict(NamedTuple):
    """``translate`` with the smallest tail that passed, or ``reprefill`` with a reason."""

    decision: Literal["translate", "reprefill"]
    reason: str | None
    native_tail: int
    kl_bound: float | None
    rows: int


class Sample(NamedTuple):
    """The KLs of one tail that a request is compared with, and what they are tested by."""

    kls: tuple[float, ...]
    rule: Rule


Place = tuple[Bucket, int]
Cell = Mapping[int, Sequence[EvidenceRow]]


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
    probe_tokens: int = 0,
    probe_error: float | None = None,
) -> Verdict:
    """Whether a prompt of ``tokens`` tokens, tail included, may be translated, and with which tail.

    ``domain`` None asks for every measured domain at once, so the worst decides; ``hops`` is the
    number of translations before this one. ``native_tails``: the only ones that may be chosen
    (None: all that were measured). A tail at which the mapper is ``idle`` is never chosen; if none
    else passes, there is no evidence that translating helps.

    ``probe_tokens`` first tokens are the target's own in the answer, because the caller sent them.
    Rows without a probe say nothing of such an answer, better though it should be: there must be
    rows with that many. ``probe_error`` None: not known yet; passes if it may still pass.

    Reasons: ``no_evidence``, ``drift_budget_exhausted``, ``length_not_certified``,
    ``certified_kl_exceeds_threshold``, and with a known error ``probe_kl_exceeds_threshold``.
    """
    places = places_of(
        evidence,
        tokens=tokens,
        domain=domain,
        hops=hops,
        prefix_known=prefix_known,
        probe_tokens=probe_tokens,
    )
    if isinstance(places, str):
        return _refusal(places)
    limit = inf if hops else evidence.score_limit(domain)
    cells = [_cell(evidence, place, native_tails, limit) for place in places]
    idle = {w for bucket, length, w in evidence.idle if (bucket, length) in places}
    most = tokens - 1 if max_native_tail is None else min(max_native_tail, tokens - 1)
    if probe_tokens:
        return _decide_by_probe(cells, rule, idle, most, probe_error)
    whole = [{w: Sample(_kls(rows), rule) for w, rows in cell.items()} for cell in cells]
    return _smallest_tail(whole, idle, most)


def places_of(
    evidence: Evidence,
    *,
    tokens: int,
    domain: str | None,
    hops: int,
    prefix_known: bool,
    probe_tokens: int,
) -> list[Place] | str:
    """Buckets and lengths that must all pass, or why there are none."""
    buckets = [
        bucket
        for bucket in evidence.translated
        if domain in (None, bucket.domain) and bucket.prefix_known is prefix_known
    ]
    domains = {b.domain for b in evidence.translated if domain in (None, b.domain)}
    if domains - {b.domain for b in buckets}:
        return "no_evidence"
    if any(hops > max(b.hops for b in buckets if b.domain == d) for d in domains):
        return "drift_budget_exhausted"
    own = [b for b in buckets if (b.hops, b.probe_tokens) == (hops, probe_tokens)]
    if not own or len(own) < len(domains):
        return "no_evidence"
    around = {bucket: _measured_around(tokens, evidence.translated[bucket]) for bucket in own}
    if not all(around.values()):
        return "length_not_certified"
    return [(bucket, length) for bucket, lengths in around.items() for length in lengths]


def _measured_around(tokens: int, lengths: Mapping[int, object]) -> list[int]:
    """The measured length that equals ``tokens``, or the two around it; empty when outside."""
    below = [n for n in lengths if n <= tokens]
    above = [n for n in lengths if n >= tokens]
    return sorted({max(below), min(above)}) if below and above else []


def _cell(
    evidence: Evidence, place: Place, native_tails: Collection[int] | None, limit: float
) -> Cell:
    """The rows that count at one place, by native tail."""
    bucket, length = place
    return {
        tail: [row for row in rows if row.score is None or row.score < limit]
        for tail, rows in evidence.translated[bucket][length].items()
        if native_tails is None or tail in native_tails
    }


def _decide_by_probe(
    cells: Sequence[Cell], rule: Rule, idle: Collection[int], most: int, error: float | None
) -> Verdict:
    """By the rows whose error is like this one; the best of all groups while it is not known."""
    if error is not None and not isfinite(error):
        return _refusal("probe_kl_exceeds_threshold")
    errors = _an_error_of_each_group(cells, rule) if error is None else [error]
    verdicts = [
        _smallest_tail(
            [{w: _near(rows, rule, e) for w, rows in cell.items()} for cell in cells], idle, most
        )
        for e in errors
    ]
    best = min(verdicts, key=lambda verdict: (verdict.decision != "translate", verdict.native_tail))
    if error is not None and best.reason == "certified_kl_exceeds_threshold":
        return best._replace(reason="probe_kl_exceeds_threshold")
    return best


def _near(rows: Sequence[EvidenceRow], rule: Rule, error: float) -> Sample:
    edges = probe_edges(rows, rule)
    low, high = group_of(error, edges)
    near = [row for row in rows if row.probe_error is not None and low < row.probe_error < high]
    return Sample(_kls(near), rule._replace(delta=rule.delta / (len(edges) + 1)))


def probe_edges(rows: Sequence[EvidenceRow], rule: Rule) -> tuple[float, ...]:
    """Probe errors that part rows into as many groups as leave enough documents in each.

    Where there are just as many as the rule needs, only flawless ones pass: on the embedded pairs
    two such groups were accepted with larger tails than one of both. So a group has several times
    as many.
    """
    errors = [row.probe_error for row in rows if row.probe_error is not None]
    for groups in range(GROUPS_AT_MOST, 1, -1):
        share = rule._replace(delta=rule.delta / groups)
        if share.enough(smallest_group(len(errors), groups) // ROOM):
            return edges_of(errors, groups)
    return ()


def _an_error_of_each_group(cells: Sequence[Cell], rule: Rule) -> list[float]:
    edges = {edge for cell in cells for rows in cell.values() for edge in probe_edges(rows, rule)}
    return [-inf, *sorted(edges)]


def _smallest_tail(
    cells: Sequence[Mapping[int, Sample]], idle: Collection[int], limit: int
) -> Verdict:
    common = set.intersection(*(set(cell) for cell in cells))
    best = _refusal("no_evidence")
    for tail in sorted((w for w in common if w <= limit), reverse=True):
        bounds = [cell[tail].rule.bound(cell[tail].kls) for cell in cells]
        rows = min(len(cell[tail].kls) for cell in cells)
        known = [b for b in bounds if b is not None]
        if len(known) < len(bounds):
            return best if best.decision == "translate" else best._replace(rows=rows)
        worst = max(known)
        if not worst <= cells[0][tail].rule.max_kl:
            failed = Verdict("reprefill", "certified_kl_exceeds_threshold", 0, worst, rows)
            return best if best.decision == "translate" else failed
        # An idle tail is tested like the others, or the sequence would not be a fixed one.
        if tail not in idle:
            best = Verdict("translate", None, tail, worst, rows)
        elif best.decision != "translate":
            best = Verdict("reprefill", "no_evidence", 0, worst, rows)
    return best


def _kls(rows: Iterable[EvidenceRow]) -> tuple[float, ...]:
    return tuple(row.kl for row in rows)


def _refusal(reason: str) -> Verdict:
    return Verdict("reprefill", reason, 0, None, 0)


@lru_cache(maxsize=4096)
def _bound(
    kls: tuple[float, ...], risk: Risk, alpha: float, delta: float, clip: float
) -> float | None:
    """Remembered, because requests differ far more than what they are compared with."""
    return mean_bound(kls, clip, delta) if risk == "mean" else kl_bound(kls, alpha, delta)


@lru_cache(maxsize=64)
def _zeros_needed(share: float, delta: float) -> int:
    """How many KLs of 0 prove a mean of at most this share of the clip."""
    enough = 1
    while _bound_of_zeros(enough, delta) > share:
        enough *= 2
    return bisect_left(range(enough), True, key=lambda n: _bound_of_zeros(n, delta) <= share)


@lru_cache(maxsize=256)
def _bound_of_zeros(count: int, delta: float) -> float:
    """What so many KLs of 0 prove of the mean, as a share of the clip."""
    return mean_bound([0.0] * count, 1.0, delta)
