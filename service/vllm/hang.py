"""Whether the service hangs, so that no request is held back for it.

It is judged by the age of what it was asked and has not answered, and not by how much that is: a
service that is well answers many requests at once one after another.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HangWatch:
    """The service hangs from when a question has been open for ``bound_seconds`` until another one
    has taken less. Questions are asked on threads; ``clock`` is monotonic, in seconds."""

    def __init__(self, bound_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bound, self._clock = bound_seconds, clock
        self._open: dict[object, float] = {}
        self._hung = False

    @contextmanager
    def question(self) -> Iterator[None]:
        """Around each: it is open until this ends, with an answer or an error."""
        question, began = object(), self._clock()
        self._open[question] = began
        try:
            yield
        finally:
            del self._open[question]
            self._hung = self._clock() - began >= self._bound

    def is_asked(self) -> bool:
        """Whether a question is open."""
        return bool(self._open)

    def hangs(self) -> bool:
        """Whether it does now."""
        began = self._open.copy().values()  # threads add and remove
        if self._clock() - min(began, default=math.inf) >= self._bound:
            self._hung = True
        return self._hung
