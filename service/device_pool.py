"""Leases of a device's memory: slices of one long-lived pool, with a host page for each.

The page is a sealed memfd like that of host leases, without data: it carries the numbers that say
how far a translation is. Beside the descriptor a client gets a typed message: what to open, and
where in it the slice lies.

A slice is leased again only when nobody looks at it any more. A client holds the page for so long,
and keeps the connection open over which both came; the slice is free when both are gone. What has a
page mapped only some kernels say; a connection ends everywhere, also with its process.

A pool can only be exported as a whole, and nothing takes it away again: whoever holds one lease can
read and write all of them. Slices are zeroed when they are leased; they are not kept apart.
"""

import os
import select
import socket
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from service.allocators import Memory
from service.errors import Problem
from service.memfd import BadMemory, SharedMemory, allocate
from service.slices import Slices, aligned

HANDLE_HEX = 128
"""Digits of a CUDA IPC handle, which is 64 bytes that nobody looks into."""
HOLDERS = 4
"""Connections that a lease may keep: each takes a descriptor of the service."""


class Export(BaseModel):
    """What another process needs to map a slice."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    device_uuid: Annotated[str, Field(pattern=r"^[0-9a-f-]{1,64}$")]
    handle: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{HANDLE_HEX}}}$")]
    pool_bytes: int = Field(ge=1, le=1 << 48)
    offset: int = Field(ge=0, le=1 << 48)
    nbytes: int = Field(ge=1, le=1 << 40)


class Pool(Protocol):
    """One piece of a device's memory; ``data`` is all of it, uint8, and never moves."""

    data: Tensor

    def export(self, offset: int, nbytes: int) -> Export:
        """The message about a part of it."""

    def wait(self) -> None:
        """Until the device has done what was asked of it."""


class Opener(Protocol):
    """The client's side of a device."""

    def __call__(self, export: Export, keep: object) -> Tensor:
        """A slice, uint8 ``[nbytes]``; ``keep`` lives for as long as any view of it. Raises
        BadMemory."""


class Slice:
    """The memory of one lease, in either process (``service.allocators.Memory``)."""

    def __init__(self, data: Tensor, page: SharedMemory, export: Export) -> None:
        self.data, self._page, self.export = data, page, export
        self._holders: list[socket.socket] = []

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.export.nbytes

    @property
    def ready_layers(self) -> int | None:
        """On the page, as for host memory."""
        return self._page.ready_layers

    @ready_layers.setter
    def ready_layers(self, count: int | None) -> None:
        self._page.ready_layers = count

    @property
    def ready_tokens(self) -> int:
        """On the page, as for host memory."""
        return self._page.ready_tokens

    @ready_tokens.setter
    def ready_tokens(self, count: int) -> None:
        self._page.ready_tokens = count

    @property
    def held_elsewhere(self) -> bool:
        """Whether a client still keeps the connection, or maps the page."""
        self._let_go_of_the_gone()
        return bool(self._holders) or self._page.held_elsewhere

    def follow(self, holder: socket.socket) -> None:
        """It is held until this connection is closed at the other end."""
        self._let_go_of_the_gone()
        if len(self._holders) >= HOLDERS:
            raise Problem("buffer_budget", f"at most {HOLDERS} connections hold a buffer")
        try:
            self._holders.append(holder.dup())
        except OSError as error:  # no descriptor is free
            raise Problem("out_of_memory", "there is no descriptor for this lease now") from error

    def _let_go_of_the_gone(self) -> None:
        gone = [holder for holder in self._holders if _ended(holder)]
        for holder in gone:
            self._holders.remove(holder)
            holder.close()

    def handle(self) -> int:
        """A descriptor of the page."""
        return self._page.handle()

    def where(self) -> bytes:
        """The message about the data."""
        return self.export.model_dump_json().encode()

    def free(self) -> None:
        """Give the page back; the slice is its allocator's."""
        self._hang_up()
        self._page.free()

    def close(self) -> None:
        """Give the page's descriptor up, and the connections."""
        self._hang_up()
        self._page.close()

    def _hang_up(self) -> None:
        for holder in self._holders:
            holder.close()
        self._holders.clear()


class Line:
    """The client's end of a connection, open until this is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._descriptor = os.dup(connection.fileno())

    def __del__(self) -> None:
        os.close(self._descriptor)


class PoolAllocator:
    """Slices of one pool (``service.allocators.Allocator``)."""

    def __init__(self, pool: Pool) -> None:
        self.limit_bytes = pool.data.nbytes
        self._pool, self._slices = pool, Slices(pool.data.nbytes)

    def cost_bytes(self, nbytes: int) -> int:
        """The slice; the host page of each lease is not counted."""
        return aligned(nbytes)

    def allocate(self, nbytes: int) -> Memory:
        """A slice of zeros, whoever had it before. Raises OSError when none is long enough."""
        offset = self._slices.take(nbytes)
        try:
            data = self._pool.data[offset : offset + nbytes]
            data.zero_()
            self._pool.wait()
            return Slice(data, allocate(0), self._pool.export(offset, nbytes))
        except BaseException:
            self._slices.give(offset)
            raise

    def free(self, memory: Memory) -> None:
        """The slice may be another lease's now."""
        if not isinstance(memory, Slice):
            raise TypeError(f"a slice of the pool was expected, not {type(memory).__name__}")
        memory.free()
        self._slices.give(memory.export.offset)


def opened(
    message: bytes, page: SharedMemory, nbytes: int, opener: Opener, line: Line | None = None
) -> Slice:
    """The client's end: a slice of ``nbytes`` and its page; views of it keep both, and the ``line``
    over which they came. Raises BadMemory."""
    try:
        export = Export.model_validate_json(message)
    except ValidationError as error:
        raise BadMemory("what came with the lease does not say where its data lies") from error
    if export.nbytes != nbytes or export.offset + nbytes > export.pool_bytes:
        raise BadMemory(f"a lease of {nbytes} bytes does not lie where it is said to")
    return Slice(opener(export, (page, line)), page, export)


def _ended(connection: socket.socket) -> bool:
    """Whether the other end is closed; what was sent before does not matter."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
