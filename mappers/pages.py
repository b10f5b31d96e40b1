"""Memory for a large file, unmapped by a thread of its own when nothing looks at it any more.

Unmapping takes about a tenth of a second a GiB, during which Python's own objects hold the
interpreter's lock, and it is whoever drops the last tensor that waits for it: an event loop, say.
"""

import contextlib
import mmap
import threading
from typing import Self

LARGE_BYTES = 64 << 20
"""What is smaller is unmapped in a few milliseconds."""


class Pages(mmap.mmap):
    """``nbytes`` of zeros that belong to this process alone."""

    def __new__(cls, nbytes: int) -> Self:
        """An anonymous mapping."""
        return super().__new__(cls, -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __del__(self) -> None:
        # When the interpreter ends there are no more threads, and it unmaps by itself.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self.close, name="kvt-unmap").start()


Bytes = bytearray | Pages


def room_for(nbytes: int) -> Bytes:
    """Memory to read a file of so many bytes into."""
    return Pages(nbytes) if nbytes >= LARGE_BYTES else bytearray(nbytes)
