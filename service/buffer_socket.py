"""The Unix socket over which the memory of a lease changes hands, and both of its ends.

HTTP cannot carry a descriptor, so a client sends the id of its lease here, in one message of a
``SOCK_SEQPACKET`` connection, and gets back one message with one descriptor (SCM_RIGHTS), or the
code of a refusal. The kernel says who is asking (SO_PEERCRED): our own user, and those that the
settings name. A message that is anything but an id ends the connection; descriptors that come with
it are never received, because no room is offered for them. Connections are few for each user, and
few for all strangers together, so nobody can keep anyone else out.
"""

import asyncio
import contextlib
import os
import socket
import struct
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import structlog

from mappers.errors import KVTranslatorError
from service.buffers import Buffers
from service.device_pool import Line, Opener, Slice, opened
from service.errors import CODES, Problem
from service.lease import LEASE_ID
from service.logs import described
from service.memfd import SharedMemory, attach

log = structlog.get_logger("service.buffer_socket")

ID_BYTES = 32
OK = b"ok"
REPLY_BYTES = 512
MESSAGE_SECONDS = 2.0
CONNECTIONS_A_USER = 16
BACKLOG = 64
MAX_PATH_BYTES = 107
CLIENT_SECONDS = 30.0
"""A client waits while pages are allocated, which takes a second for several GiB."""

_NONBLOCKING = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK


class SocketError(KVTranslatorError):
    """The socket cannot be opened where the settings say."""

    code = "socket_error"


class NotHandedOver(KVTranslatorError):
    """A client did not get the memory of its lease: not this host, another user, or too late."""

    code = "not_handed_over"


def peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other end, as the kernel knows it."""
    size = struct.calcsize("iII")
    _, uid, _ = struct.unpack(
        "iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return int(uid)


class BufferSocket:
    """The service's end. Raises SocketError; ``uids`` may ask beside our own user."""

    def __init__(
        self,
        path: Path,
        buffers: Buffers,
        uids: tuple[int, ...] = (),
        peer_uid: Callable[[socket.socket], int] = peer_uid,
    ) -> None:
        self._path, self._buffers, self._peer_uid = path, buffers, peer_uid
        self._uids = {os.geteuid(), *uids}
        self._listener = _listen(path, shared=bool(uids))
        self._inode = os.stat(path).st_ino
        self._connections: Counter[int | None] = Counter()

    async def serve(self) -> None:
        """Hand over until cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError:
                    await asyncio.sleep(0.1)  # out of descriptors; others will close theirs
                    continue
                uid = self._peer_uid(connection)
                place = uid if uid in self._uids else None
                if self._connections[place] >= CONNECTIONS_A_USER:
                    connection.close()
                    continue
                self._connections[place] += 1
                tasks.create_task(self._serve_one(connection, place))

    def close(self) -> None:
        """Stop listening, and leave no file behind unless another service has replaced it."""
        self._listener.close()
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                self._path.unlink()

    async def _serve_one(self, connection: socket.socket, uid: int | None) -> None:
        """One exchange; whatever goes wrong in it, the next one is served all the same."""
        exchange = self._hand_over(connection, uid)
        try:
            with connection:
                (fault,) = await asyncio.gather(exchange, return_exceptions=True)
        finally:
            self._connections[uid] -= 1
        # A connection that ends early or is too slow is the other side's affair.
        if fault is not None and not isinstance(fault, OSError):
            log.error("a buffer was not handed over", **described(fault))

    async def _hand_over(self, connection: socket.socket, uid: int | None) -> None:
        """Answer one message; ``uid`` None: of a user who may not ask."""
        async with asyncio.timeout(MESSAGE_SECONDS):
            message = await asyncio.get_running_loop().sock_recv(connection, ID_BYTES + 1)
        lease_id = message.decode("ascii", "replace")
        if uid is None:
            connection.send(b"wrong_user")
            return
        if not LEASE_ID.fullmatch(lease_id):
            return
        try:
            memory = await self._buffers.fetch(lease_id, uid)
            memory.follow(connection)
        except Problem as problem:
            connection.send(problem.code.encode())
            return
        handle = memory.handle()
        try:
            socket.send_fds(connection, [OK + memory.where()], [handle])
        finally:
            os.close(handle)


def fetch(path: str, lease_id: str, nbytes: int) -> SharedMemory:
    """The client's end: the memory of its lease. Raises NotHandedOver, or BadMemory."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        descriptor, _ = _handed_over(connection, path, lease_id)
    return attach(descriptor, nbytes)


def fetch_slice(path: str, lease_id: str, nbytes: int, opener: Opener) -> Slice:
    """The same of a lease of a device's memory, which ``opener`` opens; the connection is kept for
    as long as any view of it lives."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        descriptor, where = _handed_over(connection, path, lease_id)
        line = Line(connection)
    page = attach(descriptor, 0)
    try:
        return opened(where, page, nbytes, opener, line)
    except BaseException:
        page.close()
        raise


def _handed_over(connection: socket.socket, path: str, lease_id: str) -> tuple[int, bytes]:
    """The one descriptor, and what was said with it. Raises NotHandedOver."""
    try:
        connection.settimeout(CLIENT_SECONDS)
        connection.connect(path)
        connection.send(lease_id.encode())
        message, descriptors, flags = _received(connection)
    except OSError as error:
        raise NotHandedOver(f"the socket of the buffers: {_why(error)}") from error
    if message.startswith(OK) and len(descriptors) == 1 and not flags & socket.MSG_CTRUNC:
        return descriptors[0], message.removeprefix(OK)
    for descriptor in descriptors:
        os.close(descriptor)
    refusal = message.decode("ascii", "replace")
    said = refusal if refusal in ("wrong_user", *CODES) else "no memory came"
    raise NotHandedOver(f"the socket of the buffers: {said}")


def _received(connection: socket.socket) -> tuple[bytes, list[int], int]:
    """A message with room for one descriptor, which programs started here do not inherit."""
    found = array("i")
    # Python 3.11's recv_fds takes flags, and drops them.
    message, ancillary, flags, _ = connection.recvmsg(
        REPLY_BYTES, socket.CMSG_LEN(found.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return message, list(found), flags


def _listen(path: Path, *, shared: bool) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, _NONBLOCKING)
    try:
        _clear(path)
        # Before bind, so that the file never has wider rights than it is to have (Linux).
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        if shared:
            path.chmod(0o666)  # who may ask is decided by the user id
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SocketError(f"buffers: the socket cannot be opened: {_why(error)}") from error
    return listener


def _why(error: OSError) -> str:
    """What is wrong, without the path; Python has no word of its own for one that is too long."""
    if isinstance(error, TimeoutError):
        return "too slow"
    return error.strerror or f"its path is longer than {MAX_PATH_BYTES} bytes"


def _clear(path: Path) -> None:
    """Remove what a service that was killed has left; never a file, nor a socket that is served."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
