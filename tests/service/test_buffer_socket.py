"""The socket that hands memory out: who may ask, and that nothing else costs it anything."""

import asyncio
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from service import buffer_socket
from service.buffer_socket import BufferSocket, NotHandedOver, SocketError, fetch
from service.lease import Lease
from service.memfd import BadMemory, SharedMemory, allocate
from service.settings import Settings
from tests.service.live import wait_until
from tests.service.sharing import books, exchange

NBYTES = 5_000
CLIENT = "a"


class Running:
    """A socket and its books in an event loop of their own thread."""

    def __init__(
        self,
        path: Path,
        peer_uid: int | Callable[[socket.socket], int] | None = None,
        uids: tuple[int, ...] = (),
    ) -> None:
        self.buffers = books(Settings(buffers=path))
        self.path = str(path)
        told = peer_uid if callable(peer_uid) else lambda _: peer_uid
        told = buffer_socket.peer_uid if peer_uid is None else told
        self._socket = BufferSocket(path, self.buffers, uids, told)
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._socket.serve())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with_end = asyncio.wait([self._task])
        self._loop.run_until_complete(with_end)
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def lease(self, nbytes: int = NBYTES) -> Lease:
        async def opened() -> Lease:
            return await self.buffers.open(CLIENT, nbytes)

        return asyncio.run_coroutine_threadsafe(opened(), self._loop).result()

    def forget(self) -> None:
        """End all leases."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (self.buffers.close(), done.set()))
        done.wait()

    def stop(self) -> None:
        assert not self._task.done()
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        self._socket.close()
        self.buffers.close()


@contextmanager
def serving(path: Path, **more: object) -> Iterator[Running]:
    running = Running(path, **more)  # type: ignore[arg-type]
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path / "s") as found:
        yield found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def costing_nothing(running: Running) -> Iterator[None]:
    """Afterwards no descriptor is left, and a good message gets what it asks for."""
    fetch(running.path, running.lease().id, NBYTES).close()
    running.forget()
    before = descriptors()
    yield
    running.forget()
    wait_until(lambda: descriptors() <= before)
    fetch(running.path, running.lease().id, NBYTES).close()


def connected(path: str) -> socket.socket:
    """A connection that says nothing."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(20)
    connection.connect(path)
    return connection


def test_a_program_that_the_client_starts_does_not_inherit_it(running: Running) -> None:
    memory = fetch(running.path, running.lease().id, NBYTES)
    assert not os.get_inheritable(memory.descriptor)
    memory.close()


def test_the_memory_is_the_services(running: Running) -> None:
    lease = running.lease()
    memory = fetch(running.path, lease.id, NBYTES)
    memory.data[7] = 9
    assert int(lease.shared().data[7]) == 9
    again = fetch(running.path, lease.id, NBYTES)
    assert int(again.data[7]) == 9


def test_a_fault_in_one_exchange_ends_no_other(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def faulty(lease_id: str, uid: int) -> SharedMemory:
        raise RuntimeError("can't start new thread")

    original = running.buffers.fetch
    monkeypatch.setattr(running.buffers, "fetch", faulty)
    with pytest.raises(NotHandedOver, match="no memory"):
        fetch(running.path, running.lease().id, NBYTES)
    monkeypatch.setattr(running.buffers, "fetch", original)
    fetch(running.path, running.lease().id, NBYTES).close()


class TestWho:
    def test_the_kernel_says_who_asks(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            assert buffer_socket.peer_uid(ours) == os.geteuid()

    def test_another_user_gets_nothing(self, tmp_path: Path) -> None:
        with serving(tmp_path / "s", peer_uid=os.geteuid() + 1) as running:
            lease = running.lease()
            assert exchange(running.path, lease.id.encode()) == (b"wrong_user", [])
            with pytest.raises(NotHandedOver, match="wrong_user"):
                fetch(running.path, lease.id, NBYTES)
            assert lease.memory is None

    def test_strangers_keep_nobody_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(buffer_socket, "MESSAGE_SECONDS", 60)
        stranger, user, asking = os.geteuid() + 1, os.geteuid() + 2, [0]
        most = buffer_socket.CONNECTIONS_A_USER
        with serving(tmp_path / "s", peer_uid=lambda _: asking[0], uids=(user,)) as running:
            silent = []
            for uid in (stranger, user):
                asking[0] = uid
                silent += [connected(running.path) for _ in range(most)]
                with connected(running.path) as one_more:
                    assert one_more.recv(64) == b""
            asking[0] = os.geteuid()
            fetch(running.path, running.lease().id, NBYTES)
            for connection in silent:
                connection.close()

    def test_a_user_who_is_named_may_ask(self, tmp_path: Path) -> None:
        other = os.geteuid() + 1
        with serving(tmp_path / "s", peer_uid=other, uids=(other,)) as running:
            lease = running.lease()
            fetch(running.path, lease.id, NBYTES)
            assert lease.uid == other

    def test_the_file_is_for_our_user_only_unless_others_are_named(self, tmp_path: Path) -> None:
        for uids, rights in (((), 0o600), ((os.geteuid() + 1,), 0o666)):
            path = tmp_path / f"{len(uids)}"
            with serving(path, uids=uids):
                assert stat.S_IMODE(path.stat().st_mode) == rights


class TestMessages:
    @pytest.mark.parametrize(
        "message",
        [
            b"0",
            b"0" * 31,
            b"0" * 33,
            b"0" * 4096,
            b"F" * 32,
            b"\x00" * 32,
            b"\xff" * 32,
            b"../../../../../../etc/passwd0000",
            b"0" * 31 + b"\n",
        ],
    )
    def test_what_is_no_id_ends_the_connection(self, running: Running, message: bytes) -> None:
        with costing_nothing(running):
            assert exchange(running.path, message) == (b"", [])

    def test_an_id_of_nobody(self, running: Running) -> None:
        with costing_nothing(running):
            assert exchange(running.path, b"0" * 32) == (b"buffer_not_found", [])

    def test_half_an_id_and_then_the_rest_is_two_messages(self, running: Running) -> None:
        lease = running.lease()
        with (
            costing_nothing(running),
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
        ):
            connection.connect(running.path)
            connection.send(lease.id[:16].encode())
            assert connection.recv(64) == b""
        assert lease.memory is None

    @pytest.mark.parametrize("count", [1, 2, 100])
    def test_descriptors_that_come_with_it_are_never_received(
        self, running: Running, count: int
    ) -> None:
        with costing_nothing(running):
            lease_id, given = running.lease().id, [os.dup(0) for _ in range(count)]
            try:
                answer, received = exchange(running.path, lease_id.encode(), *given)
            finally:
                for descriptor in given:
                    os.close(descriptor)
            assert (answer, len(received)) == (b"ok", 1)
            os.close(received[0])

    def test_other_ancillary_data_is_not_looked_at(self, running: Running) -> None:
        credentials = struct.pack("iii", os.getpid(), os.geteuid(), os.getegid())
        with (
            costing_nothing(running),
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
        ):
            connection.connect(running.path)
            connection.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, credentials)])
            assert connection.recv(64) == b""

    def test_a_stream_is_not_spoken_here(self, running: Running) -> None:
        with (
            costing_nothing(running),
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream,
            pytest.raises(OSError, match="wrong type"),
        ):
            stream.connect(running.path)

    def test_a_thousand_bad_ones(self, running: Running) -> None:
        with costing_nothing(running):
            for _ in range(1000):
                assert exchange(running.path, b"bad") == (b"", [])

    def test_whoever_leaves_before_the_answer(self, running: Running) -> None:
        with costing_nothing(running):
            for _ in range(20):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                    connection.connect(running.path)
                    connection.send(running.lease().id.encode())

    def test_the_silent_wait_for_nobody(
        self, running: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(buffer_socket, "MESSAGE_SECONDS", 0.3)
        silent = []
        with costing_nothing(running):
            for _ in range(buffer_socket.CONNECTIONS_A_USER):
                silent.append(connected(running.path))
            started = time.monotonic()
            assert [connection.recv(64) for connection in silent] == [b""] * len(silent)
            assert time.monotonic() - started < 10
            for connection in silent:
                connection.close()


class TestTheClientsEnd:
    """It takes one sealed descriptor of the right size from a service, and nothing else."""

    @contextmanager
    def answering(self, path: Path, message: bytes, *descriptors: int) -> Iterator[str]:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        listener.listen()

        def once() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(64)
                socket.send_fds(connection, [message], list(descriptors))

        thread = threading.Thread(target=once)
        thread.start()
        yield str(path)
        thread.join()
        listener.close()

    def test_two_descriptors_are_refused(self, tmp_path: Path) -> None:
        memory = allocate(NBYTES)
        before = descriptors()
        two = (memory.descriptor, memory.descriptor)
        with (
            self.answering(tmp_path / "s", b"ok", *two) as path,
            pytest.raises(NotHandedOver, match="no memory"),
        ):
            fetch(path, "0" * 32, NBYTES)
        assert descriptors() == before

    @pytest.mark.parametrize("message", [b"ok", b"", b"buffer_not_found", b"\xff" * 9, b"/etc/x"])
    def test_no_descriptor_is_none(self, tmp_path: Path, message: bytes) -> None:
        with (
            self.answering(tmp_path / "s", message) as path,
            pytest.raises(NotHandedOver, match="buffer_not_found|no memory") as caught,
        ):
            fetch(path, "0" * 32, NBYTES)
        assert "/etc" not in str(caught.value)

    def test_memory_of_another_size_is_refused(self, tmp_path: Path) -> None:
        memory = allocate(NBYTES)
        with (
            self.answering(tmp_path / "s", b"ok", memory.descriptor) as path,
            pytest.raises(BadMemory),
        ):
            fetch(path, "0" * 32, 3 * NBYTES)

    def test_nobody_is_there(self, tmp_path: Path) -> None:
        with pytest.raises(NotHandedOver) as caught:
            fetch(str(tmp_path / "nobody"), "0" * 32, NBYTES)
        assert str(tmp_path) not in str(caught.value)


class TestTheFile:
    def test_what_a_killed_service_left_is_replaced(self, tmp_path: Path) -> None:
        left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        left.bind(str(tmp_path / "s"))
        left.close()
        with serving(tmp_path / "s") as running:
            fetch(running.path, running.lease().id, NBYTES)
        assert list(tmp_path.iterdir()) == []

    def test_a_service_that_runs_is_not_replaced(self, running: Running, tmp_path: Path) -> None:
        with pytest.raises(SocketError) as caught:
            BufferSocket(tmp_path / "s", running.buffers)
        assert str(tmp_path) not in str(caught.value)
        fetch(running.path, running.lease().id, NBYTES)

    def test_a_file_of_someone_else_is_not_removed(self, tmp_path: Path) -> None:
        path = tmp_path / "s"
        path.write_text("mine")
        with pytest.raises(SocketError):
            BufferSocket(path, books(Settings(buffers=path)))
        assert path.read_text() == "mine"

    def test_a_place_that_is_not_there(self, tmp_path: Path) -> None:
        for path in (tmp_path / "no" / "s", tmp_path / ("s" * 200)):
            with pytest.raises(SocketError) as caught:
                BufferSocket(path, books(Settings(buffers=path)))
            assert str(tmp_path) not in str(caught.value)

    def test_a_path_that_no_socket_can_have(self, tmp_path: Path) -> None:
        path = tmp_path / ("s" * 200)
        with pytest.raises(SocketError, match="longer than 107 bytes"):
            BufferSocket(path, books(Settings(buffers=path)))
        with pytest.raises(NotHandedOver, match="longer than 107 bytes"):
            fetch(str(path), "0" * 32, NBYTES)
