"""Which parts of one long piece of memory are taken: first fit, neighbours joined when free."""

import threading

ALIGNED_BYTES = 512
"""Every slice begins at a multiple: more than any dtype or copy engine asks for."""


class Slices:
    """Of ``total_bytes``. Safe from any thread."""

    def __init__(self, total_bytes: int) -> None:
        self._lock = threading.Lock()
        self._free = [(0, total_bytes)]  # (offset, bytes), ascending, no two adjacent
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int:
        """Offset of so many bytes, rounded up. Raises OSError when no free part is as long."""
        needed = aligned(nbytes)
        with self._lock:
            for index, (offset, free) in enumerate(self._free):
                if free >= needed:
                    rest = [(offset + needed, free - needed)] if free > needed else []
                    self._free[index : index + 1] = rest
                    self._taken[offset] = needed
                    return offset
        raise OSError(f"no free part of the pool has {needed} bytes")

    def give(self, offset: int) -> None:
        """Back what begins there."""
        with self._lock:
            joined: list[tuple[int, int]] = []
            for start, free in sorted([*self._free, (offset, self._taken.pop(offset))]):
                if joined and sum(joined[-1]) == start:
                    joined[-1] = (joined[-1][0], joined[-1][1] + free)
                else:
                    joined.append((start, free))
            self._free = joined


def aligned(nbytes: int) -> int:
    """What a slice of so many bytes takes."""
    return -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
