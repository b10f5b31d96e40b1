"""A client of the buffers as anyone could write it: httpx, a Unix socket, and bytes."""

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
import numpy as np

from service.allocators import HostAllocator, Memory
from service.buffers import Buffers
from service.device import Cpu, Device
from service.memfd import SharedMemory, attach
from service.metrics import Metrics
from service.settings import Settings
from tests.service.pair import Request

ROOM_BYTES = 1 << 20


def books(
    settings: Settings, clock: Callable[[], float] = time.monotonic, device: Device | None = None
) -> Buffers:
    """The leases of a service of its own, of host memory."""
    host = HostAllocator(settings.buffer_bytes, device or Cpu())
    return Buffers(settings, Metrics(version="test"), {"host": host}, clock)


class Leased(NamedTuple):
    """A lease as the service described it, and its memory as this process maps it."""

    info: Mapping[str, Any]
    memory: Memory

    @property
    def id(self) -> str:
        """What requests name."""
        return str(self.info["id"])

    @property
    def content(self) -> bytes:
        """All of it now."""
        return self.memory.data.numpy().tobytes()


@dataclass
class Sharer:
    """Buffers of one service, through any httpx client of it."""

    http: httpx.Client

    def ask(self, nbytes: int = ROOM_BYTES) -> httpx.Response:
        """POST /buffers."""
        return self.http.post("/buffers", json={"nbytes": nbytes})

    def lease(self, nbytes: int = ROOM_BYTES) -> Leased:
        """A lease with its memory."""
        answer = self.ask(nbytes)
        assert answer.status_code == 201, answer.text
        return Leased(answer.json(), fetched(answer.json()))

    def translate(self, request: Request, source: Leased, target: Leased) -> httpx.Response:
        """Write the request's tensors, and have them translated."""
        write(source, request.data)
        return self.post(request, source.id, target.id)

    def post(self, request: Request, source: str, target: str) -> httpx.Response:
        """POST /translate about what lies there."""
        document = dict(request.document)
        for side, lease_id in (("source", source), ("target", target)):
            document[side] = {**document[side], "buffer": lease_id}
        return self.http.post("/translate", json=document)


def write(leased: Leased, data: bytes) -> None:
    """From byte 0."""
    leased.memory.data.numpy()[: len(data)] = np.frombuffer(data, np.uint8)


def exchange(path: str, message: bytes, *descriptors: int) -> tuple[bytes, list[int]]:
    """One message to the socket; what comes back, with its descriptors."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(20)
        connection.connect(path)
        socket.send_fds(connection, [message], list(descriptors))
        answer, received, flags, _ = socket.recv_fds(connection, 64, 4)
        assert not flags & socket.MSG_CTRUNC
        return answer, list(received)


def fetched(info: Mapping[str, Any]) -> SharedMemory:
    """The memory of a lease: one descriptor, of the size that was said."""
    answer, descriptors = exchange(info["socket"], info["id"].encode())
    assert (answer, len(descriptors)) == (b"ok", 1)
    assert os.fstat(descriptors[0]).st_size == info["file_bytes"]
    return attach(descriptors[0], info["nbytes"])
