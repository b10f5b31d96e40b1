"""Leases of shared memory: whose they are, how long they last, and what they may cost in all.

A client never names memory of its own: it asks for a lease over HTTP, fetches the memory over our
Unix socket (``service/buffer_socket.py``), and from then on names the lease. Every lease has memory
of its own, zeros at first, that goes back to the kernel and never to another lease. It ends some
time after its last use, but not while a translation reads or writes it. All methods belong to the
event loop; none waits but ``fetch``.
"""

import asyncio
import contextlib
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from service.errors import Problem
from service.memfd import SharedMemory, allocate, file_bytes
from service.metrics import Metrics
from service.settings import Settings

LEASES_A_CLIENT = 64
FETCH_SECONDS = 10.0
"""Until a lease is fetched it holds no memory, only a part of the budget: not for long."""
LEASE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(slots=True, eq=False)
class Lease:
    """One lease; ``memory`` is None until it has been fetched, by a process of user ``uid``."""

    id: str
    client: str
    nbytes: int
    expires_seconds: float
    memory: SharedMemory | None = None
    uid: int | None = None
    readers: int = 0
    writing: bool = False
    fetching: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def in_use(self) -> bool:
        """Whether a translation reads or writes it, or its memory is being allocated."""
        return self.writing or self.readers > 0 or self.fetching.locked()

    def shared(self) -> SharedMemory:
        """Its memory. Raises ``Problem`` 422 before it was fetched."""
        if self.memory is None:
            raise Problem("bad_buffer", "the buffer's memory was never fetched over the socket")
        return self.memory


class Buffers:
    """The leases of one application. ``clock`` is in seconds."""

    def __init__(
        self, settings: Settings, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._metrics, self._clock = settings, metrics, clock
        self._leases: dict[str, Lease] = {}

    def open(self, client: str, nbytes: int) -> Lease:
        """A new lease. Raises ``Problem`` 413, 429 or 507 when there is no budget for it."""
        self.sweep()
        self._check_budgets(client, nbytes)
        until = self._clock() + min(FETCH_SECONDS, self._settings.buffer_seconds)
        lease = Lease(secrets.token_hex(16), client, nbytes, until)
        self._leases[lease.id] = lease
        self._count()
        return lease

    def find(self, lease_id: str, client: str) -> Lease:
        """The client's own lease, renewed if it has been fetched. Raises ``Problem`` 404."""
        self.sweep()
        lease = self._leases.get(lease_id)
        if lease is None or lease.client != client:
            raise _not_found()
        if lease.memory is not None:
            self._renew(lease)
        return lease

    def release(self, lease_id: str, client: str) -> None:
        """End a lease. Raises ``Problem`` 404, or 409 while it is in use."""
        lease = self.find(lease_id, client)
        if lease.in_use:
            raise _in_use()
        self._end(lease)

    def left_seconds(self, lease: Lease) -> float:
        """Until it ends, if nobody uses it again."""
        return round(max(0.0, lease.expires_seconds - self._clock()), 3)

    async def fetch(self, lease_id: str, uid: int) -> SharedMemory:
        """The memory of a lease, for a process of this user: the first fetch decides whose it is.

        Raises ``Problem`` 404 or 507.
        """
        self.sweep()
        lease = self._leases.get(lease_id)
        if lease is None or lease.uid not in (None, uid):
            raise _not_found()
        lease.uid = uid
        async with lease.fetching:
            if lease.memory is None:
                lease.memory = await _allocated(lease.nbytes)
                if lease.id not in self._leases:  # closed meanwhile
                    lease.memory.close()
            # Also while this waited for its turn; the number of its descriptor may be another's.
            if lease.id not in self._leases:
                raise _not_found()
        self._renew(lease)
        return lease.memory

    @contextlib.contextmanager
    def reading(self, lease: Lease) -> Iterator[SharedMemory]:
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
    def writing(self, lease: Lease) -> Iterator[SharedMemory]:
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

    def sweep(self) -> None:
        """End what has expired and is not in use."""
        now = self._clock()
        for lease in [x for x in self._leases.values() if x.expires_seconds <= now]:
            if not lease.in_use:
                self._end(lease)

    async def keep_swept(self) -> None:
        """Sweep for ever, so that memory comes back also when nobody asks."""
        while True:
            await asyncio.sleep(min(1.0, self._settings.buffer_seconds))
            self.sweep()

    def close(self) -> None:
        """End all of them; no translation is left."""
        for lease in list(self._leases.values()):
            self._end(lease)

    def _check_budgets(self, client: str, nbytes: int) -> None:
        settings, size = self._settings, file_bytes(nbytes)
        mine = [lease for lease in self._leases.values() if lease.client == client]
        if size > min(settings.buffer_client_bytes, settings.buffer_bytes):
            raise Problem(
                "buffer_too_large",
                f"a client has {settings.buffer_client_bytes} bytes of all buffers, "
                f"{settings.buffer_bytes}; this one would take {size}",
            )
        if len(mine) >= LEASES_A_CLIENT:
            raise Problem(
                "buffer_budget",
                f"a client has at most {LEASES_A_CLIENT} buffers",
                retry_after_seconds=self._first_end(mine),
            )
        if _total(mine) + size > settings.buffer_client_bytes:
            raise Problem(
                "buffer_budget",
                f"a client has at most {settings.buffer_client_bytes} bytes of buffers",
                retry_after_seconds=self._first_end(mine),
            )
        everyone = list(self._leases.values())
        if _total(everyone) + size > settings.buffer_bytes:
            raise Problem(
                "out_of_memory",
                f"the memory for buffers, {settings.buffer_bytes} bytes, is taken",
                retry_after_seconds=self._first_end(everyone),
            )

    def _first_end(self, leases: list[Lease]) -> int:
        """Seconds until one of them may be free, if nobody uses it again."""
        first = min(lease.expires_seconds for lease in leases)
        return max(1, math.ceil(first - self._clock()))

    def _renew(self, lease: Lease) -> None:
        lease.expires_seconds = self._clock() + self._settings.buffer_seconds

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.id]
        if lease.memory is not None:
            lease.memory.close()
        self._count()

    def _count(self) -> None:
        self._metrics.buffer_leases.set(len(self._leases))
        self._metrics.buffer_bytes.set(_total(list(self._leases.values())))


async def _allocated(nbytes: int) -> SharedMemory:
    try:
        return await asyncio.to_thread(allocate, nbytes)
    except OSError as error:
        raise Problem("out_of_memory", "there is no memory for this buffer now") from error


def _total(leases: list[Lease]) -> int:
    return sum(file_bytes(lease.nbytes) for lease in leases)


def _not_found() -> Problem:
    return Problem("buffer_not_found", "this client has no such buffer, or no longer")


def _in_use() -> Problem:
    return Problem("buffer_in_use", "a translation uses this buffer")
