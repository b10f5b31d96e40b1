"""The rows of ``evidence.json``: one class a table, and how a table is written.

A table is ``{"columns": [...], "values": [[...], ...]}``. A measure that is not finite is kept as
such (the strings "NaN" and "Infinity"); None is one that was not taken.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, field_validator, model_validator


class Arm(StrEnum):
    """What the target read instead of its own cache; ``arms.py`` says how each is made."""

    NATIVE = "native"
    TRANSLATED = "translated"
    WRONG_DOCUMENT = "wrong_document"
    RAW_SOURCE = "raw_source"
    ZERO_CACHE = "zero_cache"
    LAST_TOKENS = "last_tokens"
    NO_CONTEXT = "no_context"
    SOURCE_ALONE = "source_alone"
    QUANTIZED = "quantized"


Measure = Annotated[float, Strict(False)]  # "NaN" and "Infinity" are strings in JSON
Count = Annotated[int, Field(ge=0)]


class Row(BaseModel):
    """What all rows have in common: frozen, no surplus fields, nothing converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="strings")


class EvidenceRow(Row):
    """One measurement over the continuation of one prompt of ``length`` tokens.

    ``native_tail`` is how many of the prompt's last tokens the target read natively,
    ``prefix_known`` whether the first tokens were exact, ``hops`` how many translations the
    source's cache had been through before this one (0: it was the source's own).

    Over the N positions of the continuation: ``kl`` is the mean of KL(native || arm) in nats a
    token, ``kl_max`` its maximum, ``kl_p95`` and ``kl_p99`` its quantiles, ``worst_position`` where
    the maximum is (0: the prompt's last token). ``top1`` is the share of positions with the same
    most likely token, ``top5`` the mean share of the five most likely tokens in common, ``nll`` the
    mean negative log-likelihood of the text in nats a token. ``agreement`` is how many tokens a
    greedy continuation shares with the native one before they first differ, of N at most.
    ``score`` is how unfamiliar the source's cache of the prompt was (``score.py``).

    ``probe_tokens`` is how many of the first tokens were the target's own because a probe held
    them, ``probe_error`` how far the translation was from them (``probe.py``). ``tail_nll`` is the
    mean negative log-likelihood of the native tail's own tokens as the target read them, the first
    of them not counted, ``source_tail_nll`` that of the same tokens for the source model.
    """

    document: str
    domain: str
    length: int = Field(ge=1)
    native_tail: Count
    prefix_known: bool
    hops: Count = 0
    probe_tokens: Count = 0
    arm: Arm
    kl: Measure
    kl_max: Measure
    top1: Measure
    nll: Measure
    kl_p95: Measure | None = None
    kl_p99: Measure | None = None
    worst_position: Count | None = None
    top5: Measure | None = None
    agreement: Count | None = None
    score: Measure | None = None
    probe_error: Measure | None = None
    tail_nll: Measure | None = None
    source_tail_nll: Measure | None = None

    @field_validator("arm", mode="before")
    @classmethod
    def _arm(cls, value: object) -> object:
        return Arm(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _no_negative_kl(self) -> Self:
        if any(kl is not None and kl < 0 for kl in (self.kl, self.kl_max, self.kl_p95)):
            raise ValueError("a KL divergence is never negative")
        return self


LayerMeasure = Literal[
    "r2_keys",
    "r2_keys_cached",
    "r2_values",
    "attention_cosine",
    "key_concentration",
    "value_concentration",
]


class LayerRow(Row):
    """One measure of one kv head of one target layer, over the mapped tokens of all documents.

    ``r2_keys`` is taken in content space, ``r2_keys_cached`` with the rotary embedding in;
    ``layer_measures.py`` defines all of them. ``low`` and ``high`` are the 95 % interval, resampled
    over documents.
    """

    domain: str
    layer: Count
    head: Count
    measure: LayerMeasure
    value: Measure
    low: Measure
    high: Measure
    documents: Count


class CurveRow(Row):
    """The KL where some layers of the native cache are replaced by translated ones.

    ``mode`` ``one``: layer number ``layer`` alone; ``up_to``: all layers from 0 to ``layer``. The
    target reads the last ``native_tail`` tokens of the prompt natively; first tokens are exact.
    """

    document: str
    domain: str
    length: int = Field(ge=1)
    native_tail: Count
    mode: Literal["one", "up_to"]
    layer: Count
    kl: Measure
    top1: Measure


class DriftRow(Row):
    """One turn of a conversation that is handed from model to model.

    At turn n (from 1) the cache of all ``length`` tokens so far is translated into ``side``'s,
    which had been through ``hops`` translations before. ``kl`` and ``top1`` are of what ``side``
    predicts next, against its native cache; ``kl_fresh`` is that of a translation of the other
    model's own native cache of the same tokens. The drift is the difference of the two.
    """

    document: str
    domain: str
    turn: int = Field(ge=1)
    hops: Count
    length: int = Field(ge=1)
    side: Literal["target", "source"]
    kl: Measure
    top1: Measure
    nll: Measure
    kl_fresh: Measure


TaskMeasure = Literal[
    "native", "translated", "source", "chance", "retention", "floor_retention", "gap_recovered"
]


class TaskRow(Row):
    """One measure of one multiple-choice task, all but ``native_tail`` tokens of it translated.

    ``native``, ``translated`` and ``source`` are shares of right answers: of the target, of the
    target over the translation, of the source alone. ``chance`` is the mean of 1 / choices.
    ``retention`` is translated / native, ``floor_retention`` (translated - chance) / (native -
    chance): retention alone flatters, for guessing keeps some. ``gap_recovered`` is (translated -
    source) / (native - source): 0 is what the source gives by itself. NaN where undefined. ``low``
    and ``high`` are the 95 % interval, resampled over questions, paired; NaN where a resample is
    undefined.
    """

    task: str
    native_tail: Count
    questions: Count
    measure: TaskMeasure
    value: Measure
    low: Measure
    high: Measure


TABLES: Mapping[str, type[Row]] = {
    "rows": EvidenceRow,
    "layers": LayerRow,
    "curve": CurveRow,
    "drift": DriftRow,
    "tasks": TaskRow,
}


def to_table(rows: Sequence[Row], kind: type[Row]) -> dict[str, list[object]]:
    """Rows of one kind as a table for JSON."""
    values = [list(row.model_dump(mode="json").values()) for row in rows]
    return {"columns": [*kind.model_fields], "values": [*values]}


def from_table(value: object, kind: type[Row]) -> object:
    """The rows of a table; whatever is not a table is handed back as it is.

    Raises ValueError for rows that are not as wide as the columns are many.
    """
    if isinstance(value, dict) and value.keys() == {"columns", "values"}:
        columns, values = value["columns"], value["values"]
        return tuple(kind.model_validate(dict(zip(columns, row, strict=True))) for row in values)
    return value
