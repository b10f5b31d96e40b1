"""Whose turn it is on the device: short requests go first, and no long one is put off for ever.

The work of a request is a generator that stops wherever another may go first: between chunks of
tokens and between layers. Of all that can go on, the one that is due first does. A request is due
``PATIENCE`` times its predicted seconds after it came. So a short one overtakes long ones, also
those that have begun, and a long one is overtaken only by what comes within ``PATIENCE`` times its
own prediction, however much that is and whatever comes later. Requests are never computed together,
so the bits of an answer cannot depend on its neighbours.
"""

import bisect
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field

PATIENCE = 2.0

Ready = Callable[[], bool]
Steps = Generator[Ready | None, None, None]
"""Work for the device. It stops with None where others may go first, or with what has to become
true before it can go on (``Turns.nudge`` has that looked at again)."""


class Cancelled(Exception):
    """The request behind a piece of work is gone."""


def _promised() -> Future[None]:
    """The end of a turn. Nobody who waits for it can cancel it, so it always comes."""
    ended = Future[None]()
    ended.set_running_or_notify_cancel()
    return ended


@dataclass(eq=False, slots=True)
class Turn:
    """One request's claim on the device; ``spent_seconds`` are those that its steps have taken."""

    due_seconds: float
    expected_seconds: float
    spent_seconds: float = 0.0
    steps: Steps | None = None
    ready: Ready | None = None
    begun: bool = False
    withdrawn: bool = False
    ended: Future[None] = field(default_factory=_promised)

    @property
    def left_seconds(self) -> float:
        """What it is still expected to take."""
        return max(0.0, self.expected_seconds - self.spent_seconds)

    @property
    def can_go_on(self) -> bool:
        """Whether a step of it could be made now."""
        return self.steps is not None and (self.ready is None or self.ready())


class Turns:
    """All claims, in the order in which they are due. Safe from any thread; ``step`` and ``serve``
    are for the one that owns the device. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._turns: list[Turn] = []
        self._running: Turn | None = None
        self._open = True

    @property
    def waiting(self) -> int:
        """How many have work that has not begun."""
        with self._changed:
            return sum(turn.steps is not None and not turn.begun for turn in self._turns)

    def left_seconds(self) -> float:
        """What all of them together are still expected to take."""
        with self._changed:
            return sum(turn.left_seconds for turn in self._turns)

    def ahead_seconds(self, expected_seconds: float) -> float:
        """How long a request of this prediction would wait if it came now and nobody after it. What
        is still being sent does not count: a slow sender keeps no device busy."""
        due = self._due(expected_seconds)
        with self._changed:
            return sum(
                turn.left_seconds
                for turn in self._turns
                if turn.due_seconds <= due and (turn is self._running or turn.can_go_on)
            )

    def promise(self, expected_seconds: float) -> Turn:
        """A place in the order, from now on; its work may come later. ``withdraw`` ends it."""
        turn = Turn(self._due(expected_seconds), expected_seconds)
        with self._changed:
            bisect.insort(self._turns, turn, key=lambda other: other.due_seconds)
        return turn

    def begin(self, turn: Turn, steps: Steps) -> None:
        """Have this work done in its turn; ``turn.ended`` is its end, or its error."""
        with self._changed:
            turn.steps = steps
            over = not self._open and self._take_off(turn)
            self._changed.notify_all()
        if over:
            _finish(turn)

    def nudge(self) -> None:
        """What some work waits for may have happened."""
        with self._changed:
            self._changed.notify_all()

    def withdraw(self, turn: Turn) -> None:
        """End it: at once, or if a step of it is being made, after that."""
        with self._changed:
            over = self._withdraw(turn)
        if over:
            _finish(turn)

    def step(self) -> bool:
        """Let the first that can go on do so, up to where it stops next; False: none can."""
        with self._changed:
            turn = self._running = self._first()
        if turn is None or turn.steps is None:
            return False
        turn.begun, began = True, self._clock()
        end, turn.ready = _advance(turn.steps)
        with self._changed:
            self._running = None
            turn.spent_seconds += self._clock() - began
            over = (end is not None or turn.withdrawn) and self._take_off(turn)
        if over:
            _finish(turn, end)
        return True

    def serve(self) -> None:
        """Make steps until ``close``."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._open or self._first() is not None)
                if not self._open:
                    return
            self.step()

    def close(self) -> None:
        """Begin no further step; what is left ends with ``Cancelled``."""
        with self._changed:
            self._open = False
            over = [turn for turn in list(self._turns) if self._withdraw(turn)]
            self._changed.notify_all()
        for turn in over:
            _finish(turn)

    def _due(self, expected_seconds: float) -> float:
        return self._clock() + PATIENCE * expected_seconds

    def _first(self) -> Turn | None:
        return next((turn for turn in self._turns if turn.can_go_on), None)

    def _withdraw(self, turn: Turn) -> bool:
        """Whether the caller has to finish it; if not, that is done after the step that runs."""
        turn.withdrawn = True
        return turn is not self._running and self._take_off(turn)

    def _take_off(self, turn: Turn) -> bool:
        """Off the list; False: it was not there. Whoever takes it off finishes it, once, and when
        the lock is free: what it holds may be gigabytes, and may call us as it goes."""
        if turn not in self._turns:
            return False
        self._turns.remove(turn)
        return True


def _finish(turn: Turn, end: BaseException | None = None) -> None:
    """Let go of what it holds, then tell whoever waits for its end; None: it is cut short, or has
    never begun, which is no success either."""
    if end is None and turn.steps is not None:
        end = _closed(turn.steps)
    if isinstance(end, StopIteration):
        turn.ended.set_result(None)
    else:
        turn.ended.set_exception(end or Cancelled())


def _closed(steps: Steps) -> BaseException | None:
    """Cut the work short: the error that its cleaning up has ended with, if it has."""
    try:
        steps.close()
    except BaseException as end:  # whoever waits for the work learns of it
        return end
    return None


def _advance(steps: Steps) -> tuple[BaseException | None, Ready | None]:
    """Make one step: how the work has ended, if it has, and what it waits for.

    A function of its own, so that an error's traceback refers to no turn: the turn refers to the
    error, and what a request holds must not wait for the collector of such circles.
    """
    try:
        return None, next(steps)
    except BaseException as end:  # whoever waits for the work learns of it
        return end, None
