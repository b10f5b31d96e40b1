"""What shares memory with clients: the leases, and the socket that hands them out."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from service.allocators import Allocator, HostAllocator, Kind
from service.buffer_socket import BufferSocket
from service.buffers import Buffers
from service.cuda_ipc import CudaPool
from service.device import device_of
from service.device_pool import PoolAllocator
from service.metrics import Metrics
from service.settings import Settings


class Sharing:
    """Both for one application; ``path`` is the socket's. Raises SocketError, CudaError."""

    def __init__(self, path: Path, settings: Settings, metrics: Metrics) -> None:
        self.path = path
        self.buffers = Buffers(settings, metrics, allocators_of(settings))
        self._socket = BufferSocket(path, self.buffers, settings.buffer_uids)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hand over and sweep; at the end no lease, no socket and no file is left."""
        tasks = [
            asyncio.create_task(work) for work in (self._socket.serve(), self.buffers.keep_swept())
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._socket.close()
            self.buffers.close()


def allocators_of(settings: Settings) -> dict[Kind, Allocator]:
    """Of the kinds that the settings ask for. Raises CudaError when the GPU has no memory."""
    found: dict[Kind, Allocator] = {
        "host": HostAllocator(settings.buffer_bytes, device_of(settings.device))
    }
    if settings.buffer_device_bytes is not None:
        found["cuda"] = PoolAllocator(CudaPool(settings.device, settings.buffer_device_bytes))
    return found


def sharing_of(settings: Settings, metrics: Metrics) -> Sharing | None:
    """None where the settings name no socket."""
    return None if settings.buffers is None else Sharing(settings.buffers, settings, metrics)
