"""The scheduler's side of the connector: what each request wants, and what it is told at its end.

``request`` is vLLM's ``Request``; only what is named here is read of it. Nothing raises: an error
in here would end the engine, and with it every other request.
"""

import logging
from typing import Any

from service.vllm.exports import Exports
from service.vllm.jobs import Jobs
from service.vllm.loads import Loads
from service.vllm.params import KEY, Answered, Loaded, Params, hops_of, read_params

log = logging.getLogger("vllm.kvt.scheduler")


class SchedulerSide:
    """``answer_tokens``: how long an answer may get and still be exported as a whole."""

    def __init__(self, exports: Exports | None, loads: Loads | None, *, answer_tokens: int) -> None:
        self._exports, self._loads, self._answer_tokens = exports, loads, answer_tokens

    def new(self, request: Any) -> None:
        """A request has arrived."""
        params = _params(request)
        prompt = request.prompt_token_ids
        if params is None or not prompt or request.lora_request or request.mm_features:
            return
        if self._exports and params.export and (hops := hops_of(request.cache_salt)) is not None:
            room = len(prompt) + min(request.max_tokens, self._answer_tokens)
            self._exports.begin(request.request_id, params, room, hops)
        if self._loads and params.handle is not None:
            self._loads.begin(request.request_id, params, list(prompt), request.cache_salt)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """vLLM's ``get_num_new_matched_tokens``; loads are asynchronous."""
        if self._exports is not None and self._exports.holds_back(request.request_id):
            return None, False
        if self._loads is None:
            return 0, False
        tokens = self._loads.matched(request.request_id, computed)
        return tokens, bool(tokens)

    def allocated(self, request: Any, blocks: list[int], tokens: int) -> None:
        """vLLM's ``update_state_after_alloc``."""
        if self._loads is not None:
            self._loads.allocated(request.request_id, blocks, tokens)

    def jobs(self) -> Jobs:
        """What the workers do next."""
        return Jobs(
            exports=self._exports.jobs() if self._exports else [],
            loads=self._loads.jobs() if self._loads else [],
        )

    def done(self, exported: set[str], loaded: set[str], failed: set[str]) -> None:
        """What all workers have ended."""
        if self._exports is not None:
            self._exports.done(exported)
        if self._loads is not None:
            self._loads.done(loaded, failed)

    def finished(
        self, request: Any, blocks: list[int], *, whole: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks are still needed, and what its answer says; ``whole``: it was not
        aborted. The last token was sampled and never read, so it has no KV."""
        handle = None
        if self._exports is not None:
            read = min(request.num_tokens - 1, request.num_computed_tokens)
            ids = list(request.all_token_ids)[:read]
            handle = self._exports.finish(request.request_id, ids, blocks, whole=whole)
        said = self._loads.forget(request.request_id) if self._loads else None
        if handle is None and said is None:
            return False, None
        answered = Answered(
            handle=handle,
            loaded=said if isinstance(said, Loaded) else None,
            refused=None if isinstance(said, Loaded) else said,
        )
        return handle is not None, {KEY: answered.model_dump(mode="json")}

    def close(self) -> None:
        """The engine ends."""
        for side in (self._exports, self._loads):
            if side is not None:
                side.close()


def _params(request: Any) -> Params | None:
    try:
        return read_params(request.kv_transfer_params)
    except ValueError:
        log.warning("kvt: kv_transfer_params that are not valid were ignored")
        return None
