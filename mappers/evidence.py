"""evidence.json: the measured record of how good a mapper's translations are.

====================== ============================================================================
schema_version         2; version 1 had ``rows`` alone, without the measures that may be None
continuation_tokens    N: over how many positions each row is a mean (32)
corpora                digest of the token ids that were measured, by domain
rows                   ``EvidenceRow``: one document, length, native tail, hop count and arm each
layers                 ``LayerRow``: R2, attention-output cosine and error concentration, by head
curve                  ``CurveRow``: translated layers in a native cache, one by one and cumulated
drift                  ``DriftRow``: conversations that are translated at every turn
tasks                  ``TaskRow``: right answers to multiple-choice questions, where any were asked
====================== ============================================================================

Each table is ``{"columns": [...], "values": [[...], ...]}``; ``evidence_rows.py`` defines columns.

Nothing here knows a threshold: rows are kept raw, so that ``accept.py`` can weigh them for any rule
when the mapper is loaded.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
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

from mappers.conformal import FALSE_REFUSALS, limits_by_domain
from mappers.evidence_rows import (
    TABLES,
    Arm,
    CurveRow,
    DriftRow,
    EvidenceRow,
    LayerRow,
    Row,
    TaskRow,
    from_table,
    to_table,
)

__all__ = [
    "Arm",
    "Bucket",
    "Evidence",
    "EvidenceRow",
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
    tasks: tuple[TaskRow, ...] = ()

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
    def translated(self) -> Mapping[Bucket, Mapping[int, Mapping[int, tuple[EvidenceRow, ...]]]]:
        """Rows of the ``translated`` arm by bucket, then length, then native tail."""
        found: dict[Bucket, dict[int, dict[int, list[EvidenceRow]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        for row in self.rows:
            if row.arm is Arm.TRANSLATED:
                bucket = Bucket(row.domain, row.prefix_known, row.hops, row.probe_tokens)
                found[bucket][row.length][row.native_tail].append(row)
        return {
            bucket: {n: {w: tuple(rows) for w, rows in tails.items()} for n, tails in by_n.items()}
            for bucket, by_n in found.items()
        }

    @cached_property
    def native_tails(self) -> frozenset[int]:
        """Every tail with which translations were measured."""
        return frozenset(row.native_tail for row in self.rows if row.arm is Arm.TRANSLATED)

    @cached_property
    def score_limits(self) -> Mapping[str | None, float]:
        """The largest score of requests that are accepted, by domain; None: of no named one."""
        return limits_by_domain(self.rows, FALSE_REFUSALS)

    def score_limit(self, domain: str | None) -> float:
        """That of requests that name this domain; infinite where no scores were measured."""
        return self.score_limits.get(domain, self.score_limits.get(None, math.inf))

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


def _beats(own: Mapping[str, float], bare: Mapping[str, float]) -> bool:
    """Whether KLs are lower by 3 standard errors on the documents that have both, if any has."""
    shared = own.keys() & bare.keys()
    if not shared:
        return True
    gains = [_closed(bare[name]) - _closed(own[name]) for name in shared]
    mean = sum(gains) / len(gains)
    variance = sum((gain - mean) ** 2 for gain in gains) / max(1, len(gains) - 1)
    return mean > 3 * math.sqrt(variance / len(gains)) and mean > 0


def _closed(kl: float) -> float:
    return kl if math.isfinite(kl) else math.inf
