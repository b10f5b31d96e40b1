"""Memory that two processes share and neither can resize: a sealed memfd.

``nbytes`` of data from its beginning, and after them a page of its own with one number: how many
target layers are ready. Nothing else is ever read from it but the numbers of a cache: no size,
offset or name lies where the other process could change it after it was checked.

All pages are allocated before the seals are set, so that memory that is not there is an error here
and not a SIGBUS at the first touch; and a sealed file cannot be cut off under whoever maps it
(https://man7.org/linux/man-pages/man2/memfd_create.2.html). Linux only.
"""

import fcntl
import mmap
import os

import numpy as np
import torch

from mappers.errors import KVTranslatorError

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


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

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.data.shape[0]

    @property
    def ready_layers(self) -> int:
        """Target layers that are complete, in order; as fresh as the other process made it."""
        return int(self._progress[0])

    @ready_layers.setter
    def ready_layers(self, count: int) -> None:
        self._progress[0] = count

    def close(self) -> None:
        """Give the descriptor up; views stay what they are."""
        os.close(self.descriptor)


def progress_offset(nbytes: int) -> int:
    """Where the page with the number begins, after so many bytes of data."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def file_bytes(nbytes: int) -> int:
    """Size of the file that holds so many bytes of data."""
    return progress_offset(nbytes) + mmap.PAGESIZE


def allocate(nbytes: int) -> SharedMemory:
    """New memory, all zeros, sealed. Raises OSError when there is none."""
    descriptor = os.memfd_create("kvt-buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, file_bytes(nbytes))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        return SharedMemory(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise


def attach(descriptor: int, nbytes: int) -> SharedMemory:
    """Memory that the other process allocated. Raises BadMemory for anything that could shrink
    under us, or is of another size; the descriptor is closed then."""
    try:
        if os.fstat(descriptor).st_size != file_bytes(nbytes):
            raise BadMemory(f"a lease of {nbytes} bytes has {file_bytes(nbytes)}, this file not")
        if _seals(descriptor) & SEALS != SEALS:
            raise BadMemory("the memory of a lease is sealed, this is not")
        return SharedMemory(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise


def _seals(descriptor: int) -> int:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return 0  # a plain file has none
