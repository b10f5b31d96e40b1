"""One translation for a target engine: from a handle to a lease that holds the target's KV."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mappers.identity import IdentityClaim
from mappers.layouts import Layout
from mappers.sample import sample_rows
from service.schemas import Receipt, TokenSample, TranslateRequest
from service.vllm.engine import Geometry
from service.vllm.errors import NotLoaded
from service.vllm.link import Leased, Link
from service.vllm.params import Handle, Params
from service.vllm.seal import Sealed, common_tokens, complete, is_of, seal_bytes

PREFIX_TOKENS = 64
_POLL_SECONDS = 0.002


@dataclass(frozen=True, eq=False)
class Ready:
    """Translated: the first ``receipt.tokens`` tokens lie in ``leased``, of which the first
    ``common_tokens`` are the prompt's as well."""

    leased: Leased
    receipt: Receipt
    common_tokens: int


class Translating:
    """For one engine, whose model ``target`` is. Calls wait, so they belong on threads."""

    def __init__(
        self,
        link: Link,
        target: IdentityClaim,
        geometry: Geometry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link, self._target, self._geometry, self._clock = link, target, geometry, clock

    def __call__(self, params: Params, prompt: list[int], until_seconds: float) -> Ready:
        """Raises NotLoaded, with the reason, for everything but a translation that may be used."""
        handle = params.handle
        if handle is None:
            raise NotLoaded("no_handle")
        self._in_time(until_seconds)
        common = self._common(handle, prompt, until_seconds)
        target = self._link.lease(self._geometry.cache_bytes(handle.tokens))
        try:
            self._in_time(until_seconds)
            request = self._request(params, handle, prompt[:common])
            receipt = self._link.translate(request, handle.buffer, target).receipt
            if receipt.digest != params.mapper:
                raise NotLoaded("another_mapper", "the plan was for another mapper")
        except BaseException:
            self._link.release(target)
            raise
        if not params.keep:
            self._link.end(handle.buffer)
        return Ready(target, receipt, common)

    def _common(self, handle: Handle, prompt: list[int], until_seconds: float) -> int:
        """Tokens that cache and prompt begin with, when the whole cache is in its lease."""
        end = handle.seal_offset + seal_bytes(handle.tokens, handle.ranks)
        if end > handle.nbytes:
            raise NotLoaded("bad_handle", "the handle's sizes do not fit each other")
        source = self._link.find(handle.buffer, handle.nbytes)
        try:
            memory, offset = source.memory.data, handle.seal_offset
            said = Sealed(handle.source, handle.tokens, handle.ranks, handle.hops)
            if not is_of(memory, offset, said):
                raise NotLoaded("bad_handle", "the cache is another one than its handle says")
            self._await_ranks(memory, handle, until_seconds)
            common = common_tokens(memory, offset, handle.tokens, prompt)
        finally:
            source.close()
        if common < self._geometry.block_tokens:
            raise NotLoaded("another_prompt", "the cache and the prompt have no block in common")
        return common

    def _await_ranks(self, memory: Tensor, handle: Handle, until_seconds: float) -> None:
        while not complete(memory, handle.seal_offset, handle.tokens, handle.ranks):
            self._in_time(until_seconds)
            time.sleep(_POLL_SECONDS)

    def _in_time(self, until_seconds: float) -> None:
        """What nobody waits for any more is not begun."""
        if self._clock() >= until_seconds:
            raise NotLoaded("deadline")

    def _request(self, params: Params, handle: Handle, known: list[int]) -> TranslateRequest:
        rows = [row for row in sample_rows(handle.tokens).tolist() if row < len(known)]
        return TranslateRequest(
            source=handle.source,
            target=self._target,
            tokens=handle.tokens,
            layout=Layout.NHD,
            hops=handle.hops,
            prefix_token_ids=tuple(known[:PREFIX_TOKENS]),
            sample_token_ids=TokenSample(rows=tuple(rows), ids=tuple(known[row] for row in rows)),
            **params.limits,
        )
