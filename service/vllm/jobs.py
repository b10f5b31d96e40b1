"""What the engine's scheduler tells its workers to copy; plain data, since they are processes."""

import os
from dataclasses import dataclass, field

from service.memfd import SharedMemory, attach


@dataclass(frozen=True)
class Shared:
    """Memory of a lease that process ``pid`` keeps open as ``descriptor`` until the job is done.

    A worker opens it there, and not through the service: once a load is promised to the engine,
    it must not depend on anything else.
    """

    pid: int
    descriptor: int
    nbytes: int

    def open(self) -> SharedMemory:
        """Map it. Raises OSError or BadMemory."""
        path = f"/proc/{self.pid}/fd/{self.descriptor}"
        memory = attach(os.open(path, os.O_RDWR | os.O_CLOEXEC), self.nbytes)
        memory.close()
        return memory


@dataclass(frozen=True)
class Export:
    """Copy the first ``tokens`` tokens of ``blocks`` out, then mark this rank's heads as there."""

    request_id: str
    memory: Shared
    blocks: tuple[int, ...]
    tokens: int
    seal_offset: int


@dataclass(frozen=True)
class Load:
    """Copy tokens ``first_token`` and after of ``tokens`` translated ones in, all of ``blocks``."""

    request_id: str
    memory: Shared
    blocks: tuple[int, ...]
    first_token: int
    tokens: int


@dataclass
class Jobs:
    """Those of one engine step."""

    exports: list[Export] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
