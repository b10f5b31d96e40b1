"""Where the memory of leases comes from: what host memory and a device's pool have in common.

The books (``service/buffers.py``) and the socket (``service/buffer_socket.py``) know no more of
either kind than is said here. Allocating and freeing may take long and are done on a thread.
"""

import socket
from typing import Literal, Protocol

from torch import Tensor

from service.device import Device
from service.memfd import allocate, file_bytes

Kind = Literal["host", "cuda"]


class Memory(Protocol):
    """The memory of one lease, in either process: ``data`` is uint8 ``[nbytes]``, the numbers say
    how far a translation into it is (``service/memfd.py``)."""

    data: Tensor
    ready_layers: int | None
    ready_tokens: int

    @property
    def nbytes(self) -> int:
        """Bytes of data."""

    @property
    def held_elsewhere(self) -> bool:
        """Whether a client still has it open or mapped."""

    def follow(self, holder: socket.socket) -> None:
        """Told of the connection over which a handle is about to go, which the client may keep open
        for as long as it has the memory mapped. Raises ``Problem`` for one holder too many."""

    def handle(self) -> int:
        """A new descriptor that goes to the client; the caller closes it."""

    def where(self) -> bytes:
        """What the client needs beside the descriptor to find the data, a few hundred bytes."""

    def free(self) -> None:
        """Give it back, and our descriptor: what views of it are left read anything."""

    def close(self) -> None:
        """Give our descriptor up; views stay what they are."""


class Allocator(Protocol):
    """Memory of one kind, ``limit_bytes`` in all."""

    limit_bytes: int

    def cost_bytes(self, nbytes: int) -> int:
        """What a lease of so many bytes takes of the limit."""

    def allocate(self, nbytes: int) -> Memory:
        """Zeros. Raises OSError when there is no memory."""

    def free(self, memory: Memory) -> None:
        """Take back what ``allocate`` gave, whoever still looks at it."""


class HostAllocator:
    """Sealed memfds, registered with the device, so that its copies are DMA."""

    def __init__(self, limit_bytes: int, device: Device) -> None:
        self.limit_bytes, self._device = limit_bytes, device

    def cost_bytes(self, nbytes: int) -> int:
        """The file's size."""
        return file_bytes(nbytes)

    def allocate(self, nbytes: int) -> Memory:
        """A file of its own. Raises OSError when there is no memory, or none that can be pinned."""
        memory = allocate(nbytes)
        try:
            self._device.pin(memory.data.data_ptr(), nbytes)
        except BaseException:
            memory.free()
            raise
        return memory

    def free(self, memory: Memory) -> None:
        """Its pages go back to the kernel and never to another lease."""
        self._device.unpin(memory.data.data_ptr())
        memory.free()
