"""evidence.json: the measured record of how good a mapper's translations are, and its rule.

====================== ============================================================================
schema_version         2; version 1 had ``rows`` alone, without the measures that may be None
continuation_tokens    N: over how many positions each row is a mean (32)
corpora                digest of the token ids that were measured, by domain
rows                   ``EvidenceRow``: one document, length, native tail, hop count and arm each
layers                 ``LayerRow``: R2, attention-output cosine and error concentration, by head
curve                  ``CurveRow``: translated layers in a native cache, one by one and cumulated
drift                  ``DriftRow``: conversations that are translated at every turn
====================== ============================================================================

Each table is ``{"columns": [...], "values": [[...], ...]}``; ``evidence_rows.py`` defines columns.

Nothing here knows a threshold: rows are kept raw, so that the rule for any threshold can be
computed when the mapper is loaded. The rule is Learn-then-Test (Angelopoulos et al., arXiv
2110.01052) with the exact binomial tail: documents, not tokens, are the independent draws.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FieldSerializationInfo,
    ValidationInfo,
    field_serializer,
    field_validator,
)

from mappers.evidence_rows import (
    TABLES,
    Arm,
    CurveRow,
    DriftRow,
    EvidenceRow,
    LayerRow,
    Row,
    from_table,
    to_table,
)

__all__ = [
    "Arm",
    "Bucket",
    "Evidence",
    "EvidenceRow",
    "Verdict",
    "decide",
    "documents_needed",
    "kl_bound",
]


class Bucket(NamedTuple):
    """What one certificate is about: requests of one kind share it."""

    domain: str
    prefix_known: bool
    hops: int
    probe_tokens: int = 0


class Evidence(BaseModel):
    """All tables of one mapper, with the digests of the texts that they were measured on."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="strings")

    schema_version: Literal[1, 2] = 2
    continuation_tokens: int = Field(ge=1)
    corpora: dict[str, str]
    rows: tuple[EvidenceRow, ...]
    layers: tuple[LayerRow, ...] = ()
    curve: tuple[CurveRow, ...] = ()
    drift: tuple[DriftRow, ...] = ()

    @field_validator(*TABLES, mode="before")
    @classmethod
    def _from_table(cls, value: object, info: ValidationInfo) -> object:
        return from_table(value, TABLES[info.field_name or ""])

    @field_serializer(*TABLES, when_used="json")
    def _to_table(
        self, rows: tuple[Row, ...], info: FieldSerializationInfo
    ) -> dict[str, list[object]]:
        return to_table(rows, TABLES[info.field_name])

    @cached_property
    def translated(self) -> Mapping[Bucket, Mapping[int, Mapping[int, tuple[float, ...]]]]:
        """KLs of the ``translated`` arm by bucket, then length, then native tail."""
        found: dict[Bucket, dict[int, dict[int, list[float]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        for row in self.rows:
            if row.arm is Arm.TRANSLATED:
                bucket = Bucket(row.domain, row.prefix_known, row.hops, row.probe_tokens)
                found[bucket][row.length][row.native_tail].append(row.kl)
        return {
            bucket: {n: {w: tuple(kls) for w, kls in tails.items()} for n, tails in lengths.items()}
            for bucket, lengths in found.items()
        }

    @cached_property
    def idle(self) -> frozenset[tuple[Bucket, int, int]]:
        """Buckets, lengths and tails at which nothing is seen to be translated.

        Those where the KL is not clearly lower, on the same documents, than that of reading the
        same tail over nothing, and over another document's translation. A small KL there is the
        merit of the tail, or of the exact first tokens: such a mapper is idle.
        """
        bare: dict[tuple[str, int, int], dict[str, float]] = defaultdict(dict)
        wrong: dict[tuple[str, int, int], dict[str, float]] = defaultdict(dict)
        own: dict[tuple[Bucket, int, int], dict[str, float]] = defaultdict(dict)
        for row in self.rows:
            if row.arm in (Arm.LAST_TOKENS, Arm.NO_CONTEXT):
                bare[row.domain, row.length, row.native_tail][row.document] = row.kl
            elif row.arm is Arm.WRONG_DOCUMENT:
                wrong[row.domain, row.length, row.native_tail][row.document] = row.kl
            elif row.arm is Arm.TRANSLATED:
                bucket = Bucket(row.domain, row.prefix_known, row.hops, row.probe_tokens)
                own[bucket, row.length, row.native_tail][row.document] = row.kl
        return frozenset(
            (bucket, length, tail)
            for (bucket, length, tail), kls in own.items()
            for other in (bare, wrong)
            if not _beats(kls, other[bucket.domain, length, tail])
        )


class Verdict(NamedTuple):
    """``translate`` with the smallest tail that passed, or ``reprefill`` with a reason."""

    decision: Literal["translate", "reprefill"]
    reason: str | None
    native_tail: int
    kl_bound: float | None
    rows: int


def kl_bound(kls: Iterable[float | EvidenceRow], alpha: float, delta: float) -> float | None:
    """The smallest order statistic x with P(KL > x) <= alpha at confidence 1 - delta.

    Exact and distribution-free: x is the r-th of n sorted values, r the smallest with
    P(Binomial(n, alpha) <= n - r) <= delta. None when n < ln(delta) / ln(1 - alpha), where not even
    the largest value is certain enough. A value that is not finite counts as infinite.
    """
    if not (0 < alpha < 1 and 0 < delta < 1):
        raise ValueError(f"alpha and delta lie between 0 and 1, not {alpha} and {delta}")
    values = sorted(_closed(k.kl if isinstance(k, EvidenceRow) else k) for k in kls)
    exceedances = _allowed_exceedances(len(values), alpha, delta)
    return None if exceedances is None else values[len(values) - 1 - exceedances]


def documents_needed(alpha: float, delta: float) -> int:
    """The fewest documents with which ``kl_bound`` is a number at all."""
    return math.ceil(math.log(delta) / math.log1p(-alpha))


def decide(
    evidence: Evidence,
    *,
    tokens: int,
    domain: str | None,
    hops: int = 0,
    prefix_known: bool,
    max_kl: float,
    max_native_tail: int | None = None,
    native_tails: Collection[int] | None = None,
    alpha: float,
    delta: float,
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
    return _smallest_tail(cells, idle, limit, max_kl, alpha, delta)


def _smallest_tail(
    cells: Sequence[Mapping[int, tuple[float, ...]]],
    idle: Collection[int],
    limit: int,
    max_kl: float,
    alpha: float,
    delta: float,
) -> Verdict:
    common = set.intersection(*(set(cell) for cell in cells))
    best = _refusal("no_evidence")
    for tail in sorted((w for w in common if w <= limit), reverse=True):
        bounds = [kl_bound(cell[tail], alpha, delta) for cell in cells]
        rows = min(len(cell[tail]) for cell in cells)
        known = [b for b in bounds if b is not None]
        if len(known) < len(bounds):
            return best if best.decision == "translate" else Verdict(*best[:4], rows)
        worst = max(known)
        if not worst <= max_kl:
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


def _beats(own: Mapping[str, float], bare: Mapping[str, float]) -> bool:
    """Whether KLs are lower by 3 standard errors on the documents that have both, if any has."""
    shared = own.keys() & bare.keys()
    if not shared:
        return True
    gains = [_closed(bare[name]) - _closed(own[name]) for name in shared]
    mean = sum(gains) / len(gains)
    variance = sum((gain - mean) ** 2 for gain in gains) / max(1, len(gains) - 1)
    return mean > 3 * math.sqrt(variance / len(gains)) and mean > 0


def _refusal(reason: str) -> Verdict:
    return Verdict("reprefill", reason, 0, None, 0)


def _closed(kl: float) -> float:
    return kl if math.isfinite(kl) else math.inf


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
