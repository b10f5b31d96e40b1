"""Memory of one request that goes back to the kernel part by part, before the request ends.

An answer grows while the source that it is computed from is needed less and less. With the pages of
what nobody reads any more given back, both together take little more than the larger of them.
"""

import contextlib
import mmap

import numpy as np
import torch

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Pages:
    """``data`` is uint8 ``[nbytes]``, zeros; it lives as long as any view of it.

    Raises MemoryError or OSError when there is none to be had.
    """

    def __init__(self, nbytes: int) -> None:
        self._mapping = mmap.mmap(-1, nbytes, flags=_PRIVATE)
        # As numpy does for what it allocates: fewer faults while it fills.
        with contextlib.suppress(OSError):  # a kernel without them
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.data = torch.from_numpy(np.frombuffer(self._mapping, np.uint8))

    def let_go(self, begin: int, end: int) -> None:
        """Nobody reads ``begin <= byte < end`` any more; pages that lie wholly in there are freed,
        and read as zeros from then on."""
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            with contextlib.suppress(OSError):  # pages that are locked: they stay, and are right
                self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)
