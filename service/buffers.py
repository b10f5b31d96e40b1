"""Leases of shared memory: whose they are, how long they last, and what they may cost in all.

A client never names memory of its own: it asks for a lease over HTTP, fetches the memory over our
Unix socket (``service/buffer_socket.py``), and from then on names the lease. It ends some time
after its last use, but not while a translation reads or writes it. Nobody can take away what a
client has mapped, so the memory of a lease that has ended stays what it is, and counts, until the
client has let go of it too. All methods belong to the event loop; allocating and freeing wait for a
thread.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from service.allocators import Allocator, Kind, Memory
from service.buffer_budgets import Budgets
from service.errors import Problem
from service.lease import Lease
from service.metrics import Metrics
from service.settings import Settings

FETCH_SECONDS = 10.0
"""Until a lease is fetched it holds no memory, only a part of the budget: not for long."""


class Buffers:
    """The leases of one application, of memory from ``allocators``. ``clock`` is in seconds."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        allocators: Mapping[Kind, Allocator],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._metrics, self._clock = settings, metrics, clock
        self._allocators = allocators
        limits = {kind: allocator.limit_bytes for kind, allocator in allocators.items()}
        self._budgets = Budgets(limits, settings.buffer_client_bytes)
        self._leases: dict[str, Lease] = {}
        # Their clients have not let go of the memory yet, or it was not freed since.
        self._ended: dict[str, Lease] = {}
        self._freeing: set[asyncio.Task[None]] = set()

    async def open(self, client: str, nbytes: int, kind: Kind = "host") -> Lease:
        """A new lease. Raises ``Problem`` 403, 413, 429 or 507 when there is none to be had."""
        if kind not in self._allocators:
            raise Problem("buffers_off", f"this service was started without {kind} buffers")
        await self.sweep()
        now, cost = self._clock(), self._allocators[kind].cost_bytes(nbytes)
        until = now + min(FETCH_SECONDS, self._settings.buffer_seconds)
        lease = Lease(secrets.token_hex(16), client, kind, nbytes, cost, until)
        self._budgets.check(lease, [*self._leases.values(), *self._ended.values()], now)
        self._leases[lease.id] = lease
        self._count()
        return lease

    def find(self, lease_id: str, client: str) -> Lease:
        """The client's own lease, renewed if it has been fetched. Raises ``Problem`` 404."""
        self._expire()
        lease = self._leases.get(lease_id)
        if lease is None or lease.client != client:
            raise _not_found()
        if lease.memory is not None:
            self._renew(lease)
        return lease

    async def release(self, lease_id: str, client: str) -> None:
        """End a lease; its memory is free then if the client has let go of it before.

        Raises ``Problem`` 404, or 409 while it is in use.
        """
        lease = self.find(lease_id, client)
        if lease.in_use:
            raise _in_use()
        self._end(lease)
        await self._free_ended()

    def left_seconds(self, lease: Lease) -> float:
        """Until it ends, if nobody uses it again."""
        return round(max(0.0, lease.expires_seconds - self._clock()), 3)

    async def fetch(self, lease_id: str, uid: int) -> Memory:
        """The memory of a lease, for a process of this user: the first fetch decides whose it is.

        Raises ``Problem`` 404 or 507.
        """
        self._expire()
        lease = self._leases.get(lease_id)
        if lease is None or lease.uid not in (None, uid):
            raise _not_found()
        lease.uid = uid
        async with lease.fetching:
            if lease.memory is None:
                memory = await self._allocated(lease)
                if lease.id not in self._leases:  # closed meanwhile
                    memory.close()
                    raise _not_found()
                lease.memory = memory
            # Also while this waited for its turn; the number of its descriptor may be another's.
            if lease.id not in self._leases:
                raise _not_found()
        self._renew(lease)
        return lease.memory

    @contextlib.contextmanager
    def reading(self, lease: Lease) -> Iterator[Memory]:
        """Use it as a source. Raises ``Problem`` 409 while an answer is written into it."""
        memory = lease.shared()
        if lease.writing:
            raise _in_use()
        lease.readers += 1
        try:
            yield memory
        finally:
            lease.readers -= 1
            self._renew(lease)

    @contextlib.contextmanager
    def writing(self, lease: Lease) -> Iterator[Memory]:
        """Use it as a target. Raises ``Problem`` 409 while anyone else uses it."""
        memory = lease.shared()
        if lease.in_use:
            raise _in_use()
        lease.writing = True
        try:
            yield memory
        finally:
            lease.writing = False
            self._renew(lease)

    async def sweep(self) -> None:
        """End what has expired and is not in use, and free what nobody holds any more."""
        self._expire()
        await self._free_ended()

    async def keep_swept(self) -> None:
        """Sweep for ever, so that memory comes back also when nobody asks."""
        while True:
            await asyncio.sleep(min(1.0, self._settings.buffer_seconds))
            await self.sweep()

    def close(self) -> None:
        """End all of them; no translation is left, and the process is about to end."""
        for lease in (*self._leases.values(), *self._ended.values()):
            if lease.memory is not None:
                lease.memory.close()
        self._leases.clear()
        self._ended.clear()
        self._count()

    def _renew(self, lease: Lease) -> None:
        lease.expires_seconds = self._clock() + self._settings.buffer_seconds

    def _expire(self) -> None:
        now = self._clock()
        for lease in [x for x in self._leases.values() if x.expires_seconds <= now]:
            if not lease.in_use:
                self._end(lease)

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.id]
        lease.ended = True
        if lease.memory is not None:
            self._ended[lease.id] = lease
        self._count()

    async def _free_ended(self) -> None:
        """Free the memory of leases that have ended and that no client holds."""
        for lease in self._ended.values():
            if lease.memory is not None and not lease.memory.held_elsewhere:
                memory, lease.memory = lease.memory, None
                # A task, so that it is done once also when whoever waits for it goes away.
                task = asyncio.create_task(self._free(lease, memory))
                self._freeing.add(task)
                task.add_done_callback(self._freeing.discard)
        if self._freeing:
            await asyncio.wait(set(self._freeing))

    async def _free(self, lease: Lease, memory: Memory) -> None:
        await asyncio.to_thread(self._allocators[lease.kind].free, memory)
        self._ended.pop(lease.id, None)
        self._count()

    async def _allocated(self, lease: Lease) -> Memory:
        try:
            return await asyncio.to_thread(self._allocators[lease.kind].allocate, lease.nbytes)
        except OSError as error:
            raise Problem("out_of_memory", "there is no memory for this buffer now") from error

    def _count(self) -> None:
        self._metrics.buffer_leases.set(len(self._leases))
        self._metrics.buffer_bytes.set(_total(self._leases.values()))
        self._metrics.buffer_ended_bytes.set(_total(self._ended.values()))


def _total(leases: Iterable[Lease]) -> int:
    return sum(lease.cost_bytes for lease in leases)


def _not_found() -> Problem:
    return Problem("buffer_not_found", "this client has no such buffer, or no longer")


def _in_use() -> Problem:
    return Problem("buffer_in_use", "a translation uses this buffer")
