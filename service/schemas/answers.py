"""What is answered to a request: a receipt, a re-prefill, a plan, or a problem."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from mappers.accept import Risk
from mappers.layouts import Layout
from mappers.quantize import ScaleScheme
from service.schemas.buffers import BufferId

Decision = Literal["translate", "reprefill"]

REASONS = (
    "below_break_even",
    "no_evidence",
    "certified_kl_exceeds_threshold",
    "length_not_certified",
    "drift_budget_exhausted",
    "breaker_open",
    "would_miss_deadline",
    "out_of_distribution",
    "probe_kl_exceeds_threshold",
    "non_finite",
    "implausible_values",
)


class ShadowRequest(BaseModel):
    """The caller is asked to measure the KL of this answer and to post it to ``/feedback``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    answer_id: str
    token: str = Field(description="Proves that the answer was given to whoever posts its KL.")
    expires_seconds: float = Field(description="Time to post it, from the answer on.")


class Certified(BaseModel):
    """What is certified of an answer, against which threshold, from how many documents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kl_bound: float | None
    max_kl: float
    risk: Risk
    alpha: float
    delta: float
    kl_clip: float
    rows: int
    unproven: bool


class Receipt(Certified):
    """What an answer with tensors says of itself, under ``kvt`` in their metadata.

    ``tokens`` rows are answered, from ``start_position``; the target reads the ``native_tail`` rows
    after them itself. ``guarantee`` says what is certified of such requests, from ``rows``
    measured documents; ``kl_bound`` was found to lie below ``max_kl``. ``unproven`` marks an
    answer of a service that was told to do without evidence. Equal requests have equal receipts,
    but for those that the service picks for ``shadow``: the id of any other answer is in the
    headers only.
    """

    decision: Literal["translate"] = "translate"
    mapper: str
    digest: str
    tokens: int
    start_position: int
    native_tail: int
    prefix_tokens: int = Field(description="First rows that are the target's own, exactly.")
    probe_error: float | None = Field(
        None, description="How far the translation was from the probe that took its place."
    )
    layout: Layout
    block_tokens: int | None
    dtype: str
    kv_scales: ScaleScheme = "none"
    kv_zero_points: bool = False
    expected_kl: float | None = Field(
        None, description="Mean KL of measured prompts as unfamiliar as this one; no bound."
    )
    guarantee: str
    token_ids_sha256: str | None
    shadow: ShadowRequest | None = None


class TensorPlace(BaseModel):
    """A tensor as a safetensors header describes it; offsets count from byte 0 of the buffer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class BufferReceipt(Receipt):
    """The answer when the target's cache lies in a buffer: the receipt, and what is where."""

    buffer: BufferId
    tensors: dict[str, TensorPlace]


class Reprefill(BaseModel):
    """The answer when no translation would be good or fast enough. It is not an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    decision: Literal["reprefill"] = "reprefill"
    reason: Literal[REASONS]  # type: ignore[valid-type]
    detail: str
    kl_bound: float | None
    max_kl: float
    mapper: str | None = Field(description="None: decided before the request was read.")
    digest: str
    request_id: str


class Plan(Certified):
    """The decision so far, from the request document alone."""

    decision: Decision
    reason: str | None
    detail: str | None
    mapper: str
    digest: str
    tokens: int = Field(description="Rows that the answer would hold.")
    native_tail: int
    expected_ms: float | None = Field(description="Queue and translation, from past requests.")
    bytes_in: int
    bytes_out: int


class ProblemBody(BaseModel):
    """RFC 9457, with the words that let a caller act without reading the text."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    decision: Literal["reprefill"] | None
    retryable: bool
    request_id: str
