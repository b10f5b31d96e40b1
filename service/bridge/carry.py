"""One prompt's KV from one model's store to another's: read, translate, write under a salt.

The salt names the mapper, so that what was translated never answers a request that did not ask for
it. Whatever goes wrong, the answer is to prefill.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field

from mappers.cache import KVCache
from mappers.errors import KVTranslatorError
from mappers.identity import IdentityClaim
from service.answer import Reprefill
from service.client import Client
from service.hf import request_of
from service.policy import Word
from service.vllm.params import hops_of, salt


class Kept(Protocol):
    """The KV of one model that a store keeps, in whole chunks of tokens, under salts."""

    @property
    def chunk_tokens(self) -> int:
        """Only multiples of it are kept."""
        ...

    def read(self, token_ids: Sequence[int], salt: str) -> KVCache | None:
        """What is kept of the first of these tokens. Raises KVTranslatorError."""
        ...

    def write(self, cache: KVCache, token_ids: Sequence[int], salt: str) -> None:
        """Keep the cache of these tokens, whole chunks. Raises KVTranslatorError."""
        ...


class UnknownHops(KVTranslatorError):
    """The salt is one of ours, but does not say how often its KV was translated."""

    code = "unknown_hops"


class Job(BaseModel):
    """One prompt. ``hops`` counts the translations that the source's own KV has been through, if
    they are more than its salt says."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    token_ids: tuple[Annotated[int, Field(ge=0, lt=1 << 32)], ...] = Field(
        min_length=1, max_length=1 << 24
    )
    source_salt: str = Field("", max_length=128, description="Under which the source's KV is.")
    session: str = Field("", pattern=r"^[A-Za-z0-9._-]{0,48}$", description="Ends the salt.")
    max_kl: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_native_tail: Annotated[int, Field(ge=0)] | None = None
    domain: Word | None = None
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    reprefill_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    hops: int = Field(0, ge=0, le=64)

    @property
    def limits(self) -> dict[str, Any]:
        """Those that go into the request as they are."""
        own = {"token_ids", "source_salt", "session", "hops"}
        return self.model_dump(exclude=own, exclude_none=True)

    @property
    def hops_so_far(self) -> int:
        """Raises UnknownHops."""
        named = hops_of(self.source_salt)
        if named is None:
            raise UnknownHops("source_salt does not say how often its KV was translated")
        return max(named, self.hops)


class Carried(BaseModel):
    """What became of it: ``translate`` says under which salt the target finds ``tokens`` tokens;
    ``reprefill`` why there are none."""

    decision: Literal["translate", "reprefill"]
    reason: str | None = None
    detail: str | None = None
    tokens: int = 0
    cache_salt: str | None = None
    hops: int | None = Field(None, description="Of a job that translates these once more.")
    mapper: str | None = None
    kl_bound: float | None = None


class Bridge(NamedTuple):
    """Of one pair."""

    client: Client
    claims: tuple[IdentityClaim, IdentityClaim]
    source: Kept
    target: Kept
    deadline_seconds: float | None = None

    def carry(self, job: Job) -> Carried:
        """Read, translate, write."""
        try:
            return self._carry(job)
        except KVTranslatorError as error:
            return not_carried(error.code, str(error))

    def _carry(self, job: Job) -> Carried:
        hops = job.hops_so_far
        cache = self.source.read(job.token_ids, job.source_salt)
        if cache is None:
            return not_carried("not_cached", "the source has no whole chunk of this prompt")
        source, target = self.claims
        ids = torch.tensor(job.token_ids)
        limits = {**job.limits, "hops": hops}
        request = request_of(cache, source=source, target=target, prompt_ids=ids, **limits)
        outcome = self.client.translate(cache, request, deadline_seconds=self.deadline_seconds)
        if isinstance(outcome, Reprefill):
            return not_carried(outcome.reason, outcome.detail)
        receipt = outcome.receipt
        whole = receipt.tokens - receipt.tokens % self.target.chunk_tokens
        if whole == 0:
            return not_carried("less_than_a_chunk", "what was translated is less than a chunk")
        under = salt(receipt.digest, hops + 1, job.session)
        self.target.write(outcome.cache.slice(0, whole), job.token_ids[:whole], under)
        return Carried(
            decision="translate",
            tokens=whole,
            cache_salt=under,
            hops=hops + 1,
            mapper=receipt.mapper,
            kl_bound=receipt.kl_bound,
        )


def not_carried(reason: str, detail: str) -> Carried:
    """The answer for anything but a translation."""
    return Carried(decision="reprefill", reason=reason, detail=detail)
