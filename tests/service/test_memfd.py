"""Sealed memory: nobody can pull it away, and what is not sealed is not taken."""

import fcntl
import mmap
import os
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
    libc_punch_hole, keep_size = 2, 1
    import ctypes

    ours = allocate(ROOM)
    ours.data.fill_(1)
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    length = ctypes.c_long(file_bytes(ROOM))
    assert fallocate(ours.descriptor, libc_punch_hole | keep_size, ctypes.c_long(0), length) == 0
    assert not ours.data.any()


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
