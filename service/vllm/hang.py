"""Whether the service hangs, so that no request is held back for it.

It is judged by the age of what it was asked and has not answered, and not by how much that is: a
service that is well answers many requests at once one after another.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HangWatch:
    """The service hangs when a question has been open for ``bound_seconds``, or was until its end,
    and none that was asked after it has had an answer in less. Questions are asked on threads;
    ``clock`` is monotonic, in seconds."""

    def __init__(self, bound_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bound, self._clock = bound_seconds, clock
        self._open: dict[object, float] = {}
        # When the latest of each was asked.
        self._quick = self._overdue = -math.inf

    @contextmanager
    def question(self) -> Iterator[None]:
        """Around each: it is open until this ends, with an answer or an error."""
        question, began = object(), self._clock()
        self._open[question] = began
        try:
            yield
        finally:
            del self._open[question]
            if self._clock() - began < self._bound:
                self._quick = max(self._quick, began)
            else:
                self._overdue = max(self._overdue, began)

    def is_asked(self) -> bool:
        """Whether a question is open."""
        return bool(self._open)

    def hangs(self) -> bool:
        """Whether it does now."""
        latest = self._clock() - self._bound
        overdue = [began for began in self._open.copy().values() if began <= latest]
        return max(self._overdue, *overdue, -math.inf) > self._quick
