"""What shares memory with clients: the leases, and the socket that hands them out."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from service.allocators import HostAllocator
from service.buffer_socket import BufferSocket
from service.buffers import Buffers
from service.device import device_of
from service.metrics import Metrics
from service.settings import Settings


class Sharing:
    """Both for one application; ``path`` is the socket's. Raises SocketError."""

    def __init__(self, path: Path, settings: Settings, metrics: Metrics) -> None:
        self.path = path
        host = HostAllocator(settings.buffer_bytes, device_of(settings.device))
        self.buffers = Buffers(settings, metrics, {"host": host})
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


def sharing_of(settings: Settings, metrics: Metrics) -> Sharing | None:
    """None where the settings name no socket."""
    return None if settings.buffers is None else Sharing(settings.buffers, settings, metrics)
