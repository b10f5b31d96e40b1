"""Memory that two processes share and neither can resize: a sealed memfd.

``nbytes`` of data from its beginning, and after them a page of its own with two numbers for who
reads a translation: how many target layers are ready, and of how many tokens. The service reads
nothing from it but the numbers of a cache: no size, offset or name lies where the other process
could change it after it was checked.

All pages are allocated before the seals are set, so that memory that is not there is an error here
and not a SIGBUS at the first touch; and a sealed file cannot be cut off under whoever maps it
(https://man7.org/linux/man-pages/man2/memfd_create.2.html). Linux only.

Whether the other process has let go of it, the kernel knows: a write lease (F_SETLEASE) on a file
is granted only while nobody else has the file open, and a mapping keeps it open.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import socket
from functools import cache

import numpy as np
import torch

from mappers.errors import KVTranslatorError

NO_ANSWER = (1 << 64) - 1
"""In place of a number of layers: what lies here is no translation, nor will it be one."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
DESCRIPTORS = 2
"""Of a mapping: its own, and the one that Python's mmap keeps."""

# linux/falloc.h; the second must come with the first.
_PUNCH_HOLE, _KEEP_SIZE = 2, 1


class BadMemory(KVTranslatorError):
    """A descriptor that is not what a lease is: another size, or not sealed."""

    code = "bad_memory"


class SharedMemory:
    """A mapping of it. ``data`` is uint8 ``[nbytes]``; it stays mapped while any view of it lives.

    ``descriptor`` belongs to this object until ``close``, which unmaps nothing.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        mapping = mmap.mmap(descriptor, file_bytes(nbytes))
        # Never unmapped by hand: numpy holds the mapping for as long as a tensor looks at it.
        whole = np.frombuffer(mapping, np.uint8)
        self.data = torch.from_numpy(whole[:nbytes])
        self._progress = whole[-mmap.PAGESIZE :].view(np.uint64)
        self._address = whole.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.data.shape[0]

    @property
    def ready_layers(self) -> int | None:
        """Target layers that are complete, in order, as fresh as the other process made it; None
        when the translation was refused or has failed."""
        count = int(self._progress[0])
        return None if count == NO_ANSWER else count

    @ready_layers.setter
    def ready_layers(self, count: int | None) -> None:
        # One aligned store, after those of the layers: what it counts is there for who reads it.
        self._progress[0] = NO_ANSWER if count is None else count

    @property
    def ready_tokens(self) -> int:
        """Rows of each of these layers; it is written before the first of them is ready."""
        return int(self._progress[1])

    @ready_tokens.setter
    def ready_tokens(self, count: int) -> None:
        self._progress[1] = count

    def handle(self) -> int:
        """A new descriptor of it, for another process; the caller closes it."""
        return _reopened(self.descriptor)

    def follow(self, holder: socket.socket) -> None:
        """Nothing depends on it: the kernel knows who maps a file, and if it does not say, these
        pages are all the same never anyone else's."""

    def where(self) -> bytes:
        """The descriptor is all that another process needs."""
        return b""

    @property
    def held_elsewhere(self) -> bool:
        """Whether a ``handle`` of it is open, under way or mapped. False where nobody can know it,
        because the kernel gives no leases (fs.leases-enable = 0)."""
        return self._held() is True

    def _held(self) -> bool | None:
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            return True if error.errno == errno.EAGAIN else None
        fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def free(self) -> None:
        """Give the pages back to the kernel: what views of it are left read zeros.

        Takes a second for ten GiB, while other threads run, which Python's unmapping would not let
        them; that is quick afterwards. Where the kernel refuses, or does not say whether somebody
        still has it mapped and would find zeros there, the pages go with the last view.
        """
        if self._held() is None:
            self.close()
            return
        size = file_bytes(self.nbytes)
        _libc().madvise(self._address, size, mmap.MADV_DONTNEED)
        _libc().fallocate(self.descriptor, _PUNCH_HOLE | _KEEP_SIZE, 0, size)
        self.close()

    def close(self) -> None:
        """Give the descriptor up, if that was not done yet; views stay what they are."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def progress_offset(nbytes: int) -> int:
    """Where the page with the numbers begins, after so many bytes of data."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def file_bytes(nbytes: int) -> int:
    """Size of the file that holds so many bytes of data."""
    return progress_offset(nbytes) + mmap.PAGESIZE


def allocate(nbytes: int) -> SharedMemory:
    """New memory, all zeros, sealed. Raises OSError when there is none."""
    made = os.memfd_create("kvt-buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(made, 0, file_bytes(nbytes))
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, SEALS)
        # The kernel counts who has opened a file, not who has made it.
        descriptor = _reopened(made)
    finally:
        os.close(made)
    return _mapped(descriptor, nbytes)


def attach(descriptor: int, nbytes: int) -> SharedMemory:
    """Memory that the other process allocated. Raises BadMemory for anything that could shrink
    under us, or is of another size; the descriptor is closed then."""
    try:
        if os.fstat(descriptor).st_size != file_bytes(nbytes):
            raise BadMemory(f"a lease of {nbytes} bytes has {file_bytes(nbytes)}, this file not")
        if _seals(descriptor) & SEALS != SEALS:
            raise BadMemory("the memory of a lease is sealed, this is not")
    except BaseException:
        os.close(descriptor)
        raise
    return _mapped(descriptor, nbytes)


def _mapped(descriptor: int, nbytes: int) -> SharedMemory:
    try:
        return SharedMemory(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise


def _reopened(descriptor: int) -> int:
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


@cache
def _libc() -> ctypes.CDLL:
    """The C library; its functions run without Python's lock."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


def _seals(descriptor: int) -> int:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return 0  # a plain file has none
