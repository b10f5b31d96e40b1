"""How long the caller of a request waits, as the header KVT-Deadline-Ms says."""

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Self

from service.errors import Problem

HEADER = "KVT-Deadline-Ms"
MOST_SECONDS = 999_999
_MILLISECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,3})?")


class Deadline:
    """Counts from when it is made, which is when the head of the request has been read.

    ``seconds`` infinite: the caller has not said. By then the translation is to be computed; how
    long the answer is under way, the caller knows better.
    """

    def __init__(
        self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._ends_seconds = clock, clock() + seconds

    @classmethod
    def of_header(cls, values: Sequence[str]) -> Self:
        """From all headers of that name. Raises ``Problem`` 400."""
        if not values:
            return cls()
        if len(values) > 1 or not _MILLISECONDS.fullmatch(values[0]):
            raise Problem("bad_request", f"{HEADER} is one number of milliseconds")
        return cls(float(values[0]) / 1000)

    def left_seconds(self) -> float:
        """What is left of it; 0 or less when it is over."""
        return self._ends_seconds - self._clock()


def stated(seconds: float | None) -> dict[str, str]:
    """The header that says so, none for None. Raises ValueError for what is no time."""
    if seconds is None:
        return {}
    if not 0 <= seconds < MOST_SECONDS:
        raise ValueError(f"a deadline is from 0 to {MOST_SECONDS} seconds, not {seconds}")
    return {HEADER: f"{seconds * 1000:.3f}"}
