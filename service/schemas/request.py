"""The request document of ``/translate`` and of its plan."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mappers.identity import IdentityClaim
from mappers.layouts import Layout
from service.policy import Word


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
