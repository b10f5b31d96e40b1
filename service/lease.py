"""One lease of shared memory: whose it is, until when, and who uses it now."""

import asyncio
import re
from dataclasses import dataclass, field

from service.allocators import Kind, Memory
from service.errors import Problem

LEASE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(slots=True, eq=False)
class Lease:
    """``memory`` is None until it has been fetched, by a process of user ``uid``; ``cost_bytes`` is
    what it takes of the memory of its kind, fetched or not."""

    id: str
    client: str
    kind: Kind
    nbytes: int
    cost_bytes: int
    expires_seconds: float
    memory: Memory | None = None
    uid: int | None = None
    readers: int = 0
    writing: bool = False
    ended: bool = False
    fetching: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def in_use(self) -> bool:
        """Whether a translation reads or writes it, or its memory is being allocated."""
        return self.writing or self.readers > 0 or self.fetching.locked()

    def shared(self) -> Memory:
        """Its memory. Raises ``Problem`` 422 before it was fetched."""
        if self.memory is None:
            raise Problem("bad_buffer", "the buffer's memory was never fetched over the socket")
        return self.memory
