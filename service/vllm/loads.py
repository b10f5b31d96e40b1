"""The target's side: what a handle leads to is translated while the engine does other things.

The engine asks again and again how many tokens of a request it may load. Until the translation is
there it hears "ask again", bounded by a deadline; then a number of whole blocks, or none for every
other outcome. That falls before it gives the request any blocks, so a refusal is a plain prefill.
What is promised after that, a worker copies from memory that this process holds.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from mappers.errors import KVTranslatorError
from service.vllm.counters import Counters
from service.vllm.errors import NotLoaded
from service.vllm.jobs import Load
from service.vllm.link import Leased
from service.vllm.params import Loaded, Params, Refused, allows
from service.vllm.translating import Ready

log = logging.getLogger("vllm.kvt.loads")

Translate = Callable[[Params, list[int], float], Ready]
"""Params, the prompt's token ids, and until when (monotonic seconds); on a thread."""


@dataclass
class _Request:
    """One that may load: what it waits for, or else what it was told.

    A translation is memory, so it is kept here until it is promised or refused and no longer.
    """

    translation: Future[Ready] | None
    until_seconds: float
    prompt_tokens: int
    said: Loaded | Refused | None = None


class Loads:
    """Those of one engine. Nothing here waits; ``clock`` is monotonic, in seconds."""

    def __init__(
        self,
        translate: Translate,
        release: Callable[[Leased], None],
        threads: Executor,
        counters: Counters,
        *,
        block_tokens: int,
        deadline_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._translate, self._release, self._threads = translate, release, threads
        self._counters, self._block, self._deadline = counters, block_tokens, deadline_seconds
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._copied: dict[str, Leased] = {}
        self._jobs: list[Load] = []

    def begin(self, request_id: str, params: Params, prompt: list[int], salt: str | None) -> None:
        """Have the translation made that the request names, unless its salt forbids to load it."""
        hops = params.handle.hops + 1 if params.handle else 0
        until = self._clock() + min(self._deadline, params.deadline_seconds or self._deadline)
        if allows(salt, params.mapper, hops):
            translation = self._threads.submit(self._translate, params, prompt, until)
        else:
            log.warning("kvt: a cache_salt that names mapper and hops is needed to load KV")
            translation = Future()
            translation.set_exception(NotLoaded("no_salt"))
        self._requests[request_id] = _Request(translation, until, len(prompt))

    def matched(self, request_id: str, computed: int) -> int | None:
        """Tokens to load after ``computed`` ones; None: ask again; 0: prefill."""
        request = self._requests.get(request_id)
        if request is None or request.translation is None:
            return 0
        if not request.translation.done():
            if self._clock() < request.until_seconds:
                return None
            self._refuse(request, "deadline")
            return 0
        error = request.translation.exception()
        if error is not None:
            self._refuse(request, _reason(error))
            return 0
        whole = self._whole_blocks(request.translation.result(), request)
        if whole <= computed:
            self._refuse(request, "nothing_to_load")
            return 0
        return whole - computed

    def allocated(self, request_id: str, blocks: list[int], tokens: int) -> None:
        """The engine takes ``tokens`` more; ``blocks`` are all of the request's, in token order."""
        request = self._requests.get(request_id)
        if request is None or request.translation is None or tokens == 0:
            return
        ready = request.translation.result()
        whole = self._whole_blocks(ready, request)
        first = whole - tokens
        chosen = tuple(blocks[first // self._block : whole // self._block])
        memory, covered = ready.leased.shared, ready.receipt.tokens
        self._jobs.append(Load(request_id, memory, chosen, first, covered))
        self._copied[request_id] = ready.leased
        request.translation, request.said = None, Loaded(tokens=tokens, receipt=ready.receipt)

    def jobs(self) -> list[Load]:
        """New ones, for the workers."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def done(self, loaded: set[str], failed: set[str]) -> None:
        """The workers have ended these; ``failed`` are among them and will be prefilled."""
        for request_id in loaded:
            leased = self._copied.pop(request_id, None)
            if leased is not None:
                self._threads.submit(self._release, leased)
                self._ended(request_id, request_id in failed)

    def forget(self, request_id: str) -> Loaded | Refused | None:
        """The request is over, or was aborted: what it was told."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self._drop(request)
        return request.said

    def close(self) -> None:
        """The engine ends; what is under way ends by its own deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, request_id: str, failed: bool) -> None:
        request = self._requests.get(request_id)
        if request is None:
            self._counters.add("load", "aborted")
        elif failed:
            self._refuse(request, "load_failed")
        elif isinstance(request.said, Loaded):
            self._counters.add("load", "loaded", request.said.tokens)

    def _whole_blocks(self, ready: Ready, request: _Request) -> int:
        """Tokens that can be used: the end of the prompt, also of one that is shorter than the
        cache, the engine reads itself, as much of it as the evidence says and at least one."""
        before_tail = request.prompt_tokens - max(1, ready.receipt.native_tail)
        usable = min(ready.receipt.tokens, ready.common_tokens, before_tail)
        return max(0, usable) // self._block * self._block

    def _refuse(self, request: _Request, reason: str) -> None:
        request.said = Refused(reason=reason)
        self._counters.add("load", reason)
        self._drop(request)

    def _drop(self, request: _Request) -> None:
        """Give back what was not promised; what was, is given back when its copy has ended."""
        translation, request.translation = request.translation, None
        if translation is not None:
            translation.add_done_callback(self._give_back)

    def _give_back(self, translation: Future[Ready]) -> None:
        if not translation.cancelled() and translation.exception() is None:
            self._threads.submit(self._release, translation.result().leased)


def _reason(error: BaseException) -> str:
    if isinstance(error, NotLoaded):
        log.info("kvt: prefilled instead: %s: %s", error.reason, error)
        return error.reason
    log.error("kvt: a translation failed: %s", type(error).__name__, exc_info=error)
    return error.code if isinstance(error, KVTranslatorError) else "internal"
