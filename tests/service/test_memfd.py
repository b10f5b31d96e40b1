"""Sealed memory: nobody can pull it away, and what is not sealed is not taken."""

import errno
import fcntl
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from service.memfd import BadMemory, allocate, attach, file_bytes

ROOM = 10_000


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def memfd(size: int, seals: int = 0) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_two_mappings_are_one_memory() -> None:
    ours = allocate(ROOM)
    theirs = attach(os.dup(ours.descriptor), ROOM)
    assert ours.data.shape == theirs.data.shape == (ROOM,)
    assert not theirs.data.any()
    theirs.data[-1] = 9
    ours.ready_layers = 3
    assert (int(ours.data[-1]), theirs.ready_layers) == (9, 3)
    ours.data.fill_(255)
    assert theirs.ready_layers == 3


@pytest.mark.parametrize("size", [0, 1, ROOM, 1 << 20])
def test_the_other_side_can_neither_cut_it_off_nor_let_it_grow(size: int) -> None:
    ours = allocate(ROOM)
    with pytest.raises(PermissionError):
        os.ftruncate(ours.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(ours.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(ours.descriptor).st_size == file_bytes(ROOM)
    ours.data.fill_(1)


def test_without_the_seal_the_same_cut_kills_the_process() -> None:
    """The test of the test: what the seal is there for does happen without it."""
    program = (
        "import mmap, os; fd = os.memfd_create('x'); os.ftruncate(fd, 8192);"
        "view = mmap.mmap(fd, 8192); os.ftruncate(fd, 0); view[0]"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -7


def test_holes_are_zeros_and_no_fault() -> None:
    """Whoever maps it may drop its pages; they come back as zeros."""
    ours = allocate(ROOM)
    theirs = attach(ours.handle(), ROOM)
    theirs.data.fill_(1)
    ours.free()
    assert not theirs.data.any()
    theirs.data.fill_(2)
    assert os.fstat(theirs.descriptor).st_size == file_bytes(ROOM)
    theirs.close()


def test_freed_pages_are_the_kernels_again() -> None:
    ours = allocate(ROOM)
    theirs = ours.handle()
    assert os.fstat(theirs).st_blocks * 512 == file_bytes(ROOM)
    ours.free()
    assert os.fstat(theirs).st_blocks == 0
    os.close(theirs)


class TestHeldElsewhere:
    def test_by_a_descriptor_and_by_a_mapping_alone(self) -> None:
        ours = allocate(ROOM)
        assert not ours.held_elsewhere
        theirs = attach(ours.handle(), ROOM)
        assert ours.held_elsewhere
        theirs.close()
        assert ours.held_elsewhere
        view = theirs.data[3:7]
        del theirs
        assert ours.held_elsewhere
        del view
        assert not ours.held_elsewhere
        ours.close()

    @pytest.mark.parametrize("knows", [True, False])
    def test_where_the_kernel_does_not_say_nothing_is_zeroed_under_a_reader(
        self, knows: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ours = allocate(ROOM)
        theirs = attach(ours.handle(), ROOM)
        theirs.data.fill_(7)

        def refused(*_: object) -> int:
            raise OSError(errno.EINVAL, "no leases here")

        if not knows:
            monkeypatch.setattr(fcntl, "fcntl", refused)
        assert ours.held_elsewhere is knows
        ours.free()
        assert bool(theirs.data.any()) is not knows

    def test_by_whoever_may_only_read(self) -> None:
        ours = allocate(ROOM)
        handle = ours.handle()
        reading = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY)
        os.close(handle)
        mapping = mmap.mmap(reading, ROOM, prot=mmap.PROT_READ)
        os.close(reading)
        assert ours.held_elsewhere
        mapping.close()
        assert not ours.held_elsewhere
        ours.close()

    def test_by_a_message_that_nobody_has_read(self) -> None:
        ours, (one, other) = allocate(ROOM), socket.socketpair()
        with one, other:
            handle = ours.handle()
            socket.send_fds(one, [b"x"], [handle])
            os.close(handle)
            assert ours.held_elsewhere
        assert not ours.held_elsewhere
        ours.close()

    def test_by_a_process_until_it_dies(self) -> None:
        ours = allocate(ROOM)
        handle = ours.handle()
        program = (
            "import mmap, os, sys; fd = int(sys.argv[1]); view = mmap.mmap(fd, 4096);"
            "os.close(fd); print('mapped', flush=True); sys.stdin.read()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program, str(handle)],
            pass_fds=[handle],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            os.close(handle)
            assert process.stdout is not None
            assert process.stdout.readline() == b"mapped\n"
            assert ours.held_elsewhere
            process.kill()
        assert not ours.held_elsewhere
        ours.close()

    def test_nobody_where_the_kernel_does_not_say(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def none_given(*_: object) -> int:
            raise OSError(errno.EINVAL, "leases are switched off")

        ours = allocate(ROOM)
        handle = ours.handle()
        with monkeypatch.context() as patch:
            patch.setattr("fcntl.fcntl", none_given)
            assert not ours.held_elsewhere
        assert ours.held_elsewhere
        os.close(handle)
        ours.close()


@pytest.mark.parametrize(
    "made",
    [
        lambda folder: memfd(file_bytes(ROOM)),
        lambda folder: memfd(file_bytes(ROOM), fcntl.F_SEAL_GROW),
        lambda folder: memfd(file_bytes(ROOM) - mmap.PAGESIZE, 7),
        lambda folder: memfd(0, 7),
        lambda folder: os.open("/dev/zero", os.O_RDWR),
        lambda folder: os.open(folder, os.O_RDONLY),
        lambda folder: os.open(plain_file(folder), os.O_RDWR),
        lambda folder: os.pipe()[0],
    ],
)
def test_what_could_shrink_under_us_is_not_mapped(
    tmp_path: Path, made: Callable[[Path], int]
) -> None:
    descriptor = made(tmp_path)
    before = descriptors()
    with pytest.raises(BadMemory):
        attach(descriptor, ROOM)
    assert descriptors() == before - 1


def plain_file(folder: Path) -> Path:
    path = folder / "plain"
    path.write_bytes(bytes(file_bytes(ROOM)))
    return path


def test_nothing_is_left_open() -> None:
    before = descriptors()
    for _ in range(50):
        ours = allocate(ROOM)
        attach(os.dup(ours.descriptor), ROOM).close()
        ours.close()
        del ours
    assert descriptors() <= before
