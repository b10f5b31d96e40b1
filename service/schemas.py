"""The documents of the HTTP interface, as they are read and as they are answered."""

import json
from typing import Annotated, Literal, NoReturn, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from mappers.accept import Risk
from mappers.identity import IdentityClaim
from mappers.layouts import Layout
from mappers.quantize import ScaleScheme
from service.errors import Problem
from service.policy import Word

Decision = Literal["translate", "reprefill"]
MAX_DOCUMENT_CHARS = 16 * 1024
MAX_DEPTH = 16

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


class TokenSample(BaseModel):
    """The token ids at some rows of the cache, so that it can be checked to be of that text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rows: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1, max_length=256)
    ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1, max_length=256)

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if len(self.rows) != len(self.ids):
            raise ValueError("one id for each row")
        return self


class Probe(BaseModel):
    """The target's own KV of the prompt's first ``tokens`` tokens, which is in the body as well.

    Tensors ``probe.{i}.k`` and ``probe.{i}.v``, or as the layout has them, in the form of the
    answer, keys as the target caches them in a prompt of this length.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tokens: int = Field(ge=1, le=1 << 24, description="The size that was measured: 64.")


class TranslateRequest(BaseModel):
    """What the caller says of the KV cache that it sends and of the one that it wants.

    ``tokens`` counts the rows sent; ``start_position`` is the absolute position of the first.
    ``max_kl`` (nats a token) can only tighten the service's own threshold.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: IdentityClaim
    target: IdentityClaim
    tokens: int = Field(ge=1, le=1 << 24, description="Rows of the cache that is sent.")
    start_position: int = Field(0, ge=0, le=1 << 30, description="Absolute position of row 0.")
    layout: Layout = Field(description="Layout of both caches; declared, never guessed.")
    block_tokens: int | None = Field(None, ge=1, le=1 << 16, description="For paged layouts.")
    max_kl: float | None = Field(None, gt=0, allow_inf_nan=False, description="Only tightens.")
    max_native_tail: int | None = Field(
        None, ge=0, description="Most tokens that the target is ready to read natively."
    )
    domain: Word | None = Field(None, description="Kind of text, as named in the evidence.")
    hops: int = Field(0, ge=0, le=64, description="Translations that this cache has been through.")
    session_id: str | None = Field(
        None, min_length=1, max_length=256, description="Conversation whose drift is added up."
    )
    reprefill_ms: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="What the caller pays without a translation."
    )
    prefix_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), max_length=1024, description="First token ids of the prompt."
    )
    sample_token_ids: TokenSample | None = Field(
        None, description="Token ids at some rows, row 0 being the first that is sent."
    )
    heads: None = Field(None, description="Reserved: a range of kv heads.")
    probe: Probe | None = Field(
        None, description="The target's own KV of the first tokens, for a sharper bound."
    )
    token_ids_sha256: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="Returned in the receipt."
    )

    @model_validator(mode="after")
    def _sample_within(self) -> Self:
        if self.sample_token_ids is not None and max(self.sample_token_ids.rows) >= self.tokens:
            raise ValueError("sample_token_ids: a row that is not sent")
        return self

    @field_validator("layout", mode="before")
    @classmethod
    def _layout(cls, value: object) -> object:
        return next((layout for layout in Layout if layout == value), value)


BufferId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", description="Id of a lease.")]


class LeasedClaim(IdentityClaim):
    """One side of a pair whose cache lies in a buffer."""

    buffer: BufferId


class BufferRequest(TranslateRequest):
    """A request whose caches lie in two buffers of the caller, and not in a body.

    The source's tensors, and after them a probe's, lie end to end from byte 0: layer by layer, keys
    then values, after them the layer's scales and zero points (of keys, then of values, each). The
    target's are written likewise.
    """

    source: LeasedClaim
    target: LeasedClaim


class BufferAsk(BaseModel):
    """What to lease."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    nbytes: int = Field(ge=1, le=1 << 40, description="Bytes of data.")
    kind: Literal["host"] = "host"


class BufferInfo(BaseModel):
    """A lease. Its memory comes over the Unix socket ``socket``: connect (SOCK_SEQPACKET), send the
    ``id``, receive ``ok`` and one descriptor of ``file_bytes`` bytes, and map it."""

    model_config = ConfigDict(frozen=True)

    id: BufferId
    kind: Literal["host"] = "host"
    nbytes: int
    file_bytes: int = Field(description="Size of the file: the data and one page.")
    progress_offset: int = Field(
        description="Where a little-endian u64 says how many target layers are ready."
    )
    expires_seconds: float = Field(description="Until it ends, if nobody uses it.")
    ttl_seconds: float = Field(description="The same, after each use.")
    in_use: bool
    socket: str


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
    mapper: str
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


class SideInfo(BaseModel):
    """One side of a pair; the identity's fields that a request must or may repeat."""

    model: str
    version: str
    rope_theta: float
    rope_type: str
    dtype: str
    kv_dtype: str
    kv_scales: ScaleScheme = "none"
    kv_zero_points: bool = False
    num_layers: int
    num_kv_heads: int
    head_dim: int


class BreakerInfo(BaseModel):
    """The sequential test of one kind of request; only those with feedback are listed."""

    domain: str
    max_tokens: int = Field(description="The longest prompts of its length bucket.")
    state: Literal["closed", "open", "half_open"]
    e_value: float = Field(description="Evidence that it is too bad; opens at 1 / delta.")
    close_e_value: float = Field(description="Evidence that it is good again, when half-open.")
    samples: int = Field(description="KLs counted since it last opened or closed.")
    violations: int
    clients: int = Field(description="Clients that these came from, as far as remembered.")
    opened_seconds_ago: float | None


class MapperInfo(BaseModel):
    """A mapper that the service knows, and the state it is in."""

    id: str
    state: Literal["ready", "unloaded", "failed"]
    residency: Literal["disk", "host", "device"] = Field(
        description="Where the weights are; what is on the device is in host memory as well."
    )
    digest: str | None
    recipe: str | None
    source: SideInfo | None
    target: SideInfo | None
    resident_bytes: int = Field(description="Host memory of weights, prefixes and profile.")
    device_bytes: int = Field(description="Memory of the weights as they are applied.")
    load_seconds: float | None = Field(description="What the last load took.")
    evidence_rows: int
    certified_tokens: list[int] = Field(description="Prompt lengths that were measured.")
    probe_tokens: int = Field(0, description="Tokens of a probe; 0: it takes none.")
    error: str | None = Field(description="Why it could not be loaded.")
    why_not_servable: str | None = Field(
        None, description="Why every request is told to re-prefill; none: some are not."
    )
    breakers: list[BreakerInfo] = Field(default_factory=list)


class MapperList(BaseModel):
    """All mappers, in the order in which they were configured."""

    mappers: list[MapperInfo]


class Info(BaseModel):
    """What this process is and which limits it applies."""

    name: str
    version: str
    device: str
    torch: str
    mappers: list[str]
    max_kl: float
    alpha: float
    delta: float
    buffers: bool = Field(False, description="Whether shared memory can be leased.")
    queue_requests: int
    max_body_bytes: int
    max_header_bytes: int
    max_inflight_bytes: int
    layouts: list[str]
    dtypes: list[str]
    reasons: list[str]


class Health(BaseModel):
    """``ok`` or why not."""

    status: Literal["ok", "starting", "draining", "no_mapper"]
    mappers: dict[str, str] = Field(default_factory=dict)


Document = TypeVar("Document", bound=BaseModel)


def read_request(text: str) -> TranslateRequest:
    """Parse and check a request document. Raises ``Problem`` 400 or 422; quotes nothing of it."""
    return _read(TranslateRequest, text)


def read_document(kind: type[Document], raw: bytes) -> Document:
    """The same for a document that is a body of its own."""
    try:
        return _read(kind, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Problem("bad_document", "the request document is not UTF-8") from error


def _read(kind: type[Document], text: str) -> Document:
    if len(text) > MAX_DOCUMENT_CHARS:
        raise Problem("bad_document", f"at most {MAX_DOCUMENT_CHARS} characters are read")
    _check_depth(text)
    try:
        json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
    except ValueError as error:
        raise Problem("bad_json", "the request document is not JSON") from error
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise Problem("bad_document", _first_fault(error), errors=_faults(error)) from error


def _check_depth(text: str) -> None:
    # Brackets inside strings count as well: no field of a request has a use for many of them.
    depth = deepest = 0
    for char in text:
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    if deepest > MAX_DEPTH:
        raise Problem("bad_json", f"a document is nested at most {MAX_DEPTH} deep")


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Problem("bad_document", "a name appears twice in one object")
    return found


def _no_constants(name: str) -> NoReturn:
    raise Problem("bad_document", "NaN and Infinity are not JSON")


_OWN_NAMES = frozenset(
    name
    for model in (TranslateRequest, LeasedClaim, TokenSample, Probe, BufferAsk)
    for name in model.model_fields
)
# The text of these may hold what was sent, or comes from our own validators.
_OPAQUE_TYPES = ("value_error", "assertion_error")


def _faults(error: ValidationError) -> list[dict[str, str]]:
    """Where and what, with only names of our own: a surplus name is the caller's text."""
    faults = []
    for fault in error.errors(include_url=False, include_input=False, include_context=False)[:8]:
        place = [str(p) for p in fault["loc"] if p in _OWN_NAMES or isinstance(p, int)]
        what = "not valid" if fault["type"] in _OPAQUE_TYPES else fault["msg"]
        faults.append({"field": ".".join(place) or "document", "fault": what})
    return faults


def _first_fault(error: ValidationError) -> str:
    first = _faults(error)[0]
    return f"{first['field']}: {first['fault']}"
