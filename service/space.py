"""The memory of one request, where a cache comes in and its translation goes out."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from service.wire import TensorSpec


def _keep(begin: int, end: int) -> None:
    """What is not ours alone stays."""


@dataclass(slots=True)
class Space:
    """Both uint8: ``received`` holds ``tensors``, ``answer`` the target's.

    ``arrived_bytes`` of ``received`` are there, from the front; the event loop says so, the device
    thread reads it. ``let_go(begin, end)`` gives back what nobody reads any more of ``received``.
    ``begun``: something was written into ``answer``.
    """

    received: Tensor
    answer: Tensor
    tensors: Mapping[str, TensorSpec]
    arrived_bytes: int = 0
    let_go: Callable[[int, int], None] = _keep
    begun: bool = False
    complete_seconds: float = math.inf

    def arrive(self, nbytes: int) -> None:
        """So many bytes are there now."""
        self.arrived_bytes = nbytes
        if self.complete:
            self.complete_seconds = time.perf_counter()

    @property
    def complete(self) -> bool:
        """Whether all of it has arrived."""
        return self.arrived_bytes == self.received.numel()

    def complete_for_seconds(self) -> float:
        """For how long that has been so; 0 before it is."""
        return max(0.0, time.perf_counter() - self.complete_seconds)
