"""The source's side: a finished request's KV goes into a lease, and its answer says into which.

The answer leaves as soon as the request has finished, and has to name the lease. So that is taken
when the request arrives, on a thread, and the request is held back for it, a moment at the most.
The engine keeps the request's blocks until its workers have copied them.
"""

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from mappers.identity import IdentityClaim
from service.vllm.counters import Counters
from service.vllm.engine import Geometry
from service.vllm.errors import NotLoaded
from service.vllm.hang import HangWatch
from service.vllm.jobs import Export
from service.vllm.link import Leased, Link
from service.vllm.params import Handle, Params
from service.vllm.seal import Sealed, seal_bytes, seal_offset, write_seal

log = logging.getLogger("vllm.kvt.exports")


@dataclass(frozen=True)
class _Room:
    """A lease under way, for a cache of so many tokens, and how long it is waited for."""

    lease: Future[Leased]
    until_seconds: float
    tokens: int
    hops: int


class Exports:
    """Those of one engine. Nothing here waits; ``clock`` is monotonic, in seconds.

    ``threads`` ask for leases and for nothing else, so that these never queue behind translations.
    A request is held back for ``lease_seconds`` at most, and for a service that hangs not at all.
    """

    def __init__(
        self,
        claim: IdentityClaim,
        geometry: Geometry,
        link: Link,
        threads: Executor,
        counters: Counters,
        *,
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._claim, self._geometry, self._clock = claim, geometry, clock
        self._link, self._threads, self._counters = link, threads, counters
        self._lease_seconds = lease_seconds
        self._service = HangWatch(lease_seconds, clock)
        self._rooms: dict[str, _Room] = {}
        self._copied: dict[str, Leased] = {}
        self._jobs: list[Export] = []

    def begin(self, request_id: str, params: Params, tokens: int, hops: int) -> None:
        """Take a lease for up to so many tokens, which have been through ``hops`` translations,
        and end the one that it replaces. A service that hangs is not asked for more."""
        if self._service.hangs() and self._service.is_asked():
            self._counters.add("export", "service_hangs")
            return
        tokens = min(tokens, self._geometry.max_tokens)
        nbytes = self._offset(tokens) + seal_bytes(tokens, self._geometry.ranks)
        lease = self._threads.submit(self._lease, nbytes, params.replaces)
        until = self._clock() + min(self._lease_seconds, params.deadline_seconds or math.inf)
        self._rooms[request_id] = _Room(lease, until, tokens, hops)

    def holds_back(self, request_id: str) -> bool:
        """Whether the request should wait for its lease before it is scheduled."""
        room = self._rooms.get(request_id)
        if room is None or room.lease.done() or self._service.hangs():
            return False
        return self._clock() < room.until_seconds

    def finish(
        self, request_id: str, ids: list[int], blocks: list[int], *, whole: bool
    ) -> Handle | None:
        """The handle of what is copied next; None: there is no room, and blocks may go at once.

        ``ids`` are the tokens whose KV is in ``blocks``; ``whole``: the request was not aborted.
        """
        room = self._rooms.pop(request_id, None)
        if room is None:
            return None
        leased = self._taken(room) if whole and ids else None
        if leased is None:
            if not room.lease.cancel():
                room.lease.add_done_callback(self._give_back)
            return None
        ids = ids[: room.tokens]
        offset = self._offset(len(ids))
        sealed = Sealed(self._claim, len(ids), self._geometry.ranks, room.hops)
        write_seal(leased.memory.data, offset, sealed, ids)
        needed = blocks[: -(-len(ids) // self._geometry.block_tokens)]
        self._jobs.append(Export(request_id, leased.shared, tuple(needed), len(ids), offset))
        self._copied[request_id] = leased
        self._counters.add("export", "exported", len(ids))
        return Handle(
            buffer=leased.id,
            nbytes=leased.memory.nbytes,
            tokens=len(ids),
            seal_offset=offset,
            ranks=self._geometry.ranks,
            hops=room.hops,
            source=self._claim,
        )

    def jobs(self) -> list[Export]:
        """New ones, for the workers."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def done(self, request_ids: set[str]) -> None:
        """The workers have copied these; their leases are the handles' now."""
        for request_id in request_ids:
            leased = self._copied.pop(request_id, None)
            if leased is not None:
                leased.close()

    def close(self) -> None:
        """The engine ends; what is under way ends by its own deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _lease(self, nbytes: int, replaces: str | None) -> Leased:
        with self._service.question():
            if replaces is not None:
                self._link.end(replaces)
            return self._link.lease(nbytes)

    def _release(self, leased: Leased) -> None:
        with self._service.question():
            self._link.release(leased)

    def _taken(self, room: _Room) -> Leased | None:
        if not room.lease.done():
            self._counters.add("export", "lease_too_late")
            return None
        try:
            return room.lease.result()
        except NotLoaded as error:
            log.warning("kvt: no lease for an export: %s", error.reason)
            self._counters.add("export", error.reason)
            return None

    def _give_back(self, lease: Future[Leased]) -> None:
        """Of a request that was aborted, or has no use for it."""
        if not lease.cancelled() and lease.exception() is None:
            self._threads.submit(self._release, lease.result())

    def _offset(self, tokens: int) -> int:
        return seal_offset(self._geometry.cache_bytes(tokens))
