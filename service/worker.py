"""The one thread that owns the device, and the limits on what may wait for it.

Places, memory and a turn on the device are reserved before a cache is read. A translation writes
into the one buffer that its answer is sent from, so a client that reads slowly holds memory, never
the device.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import torch

from service.errors import Problem
from service.metrics import Metrics
from service.settings import Settings
from service.turns import Cancelled, Steps, Turn, Turns

Result = TypeVar("Result")

NEWS_SECONDS = 0.002


class Emission:
    """Bytes that the worker produces front to back and the event loop sends.

    ``ready_bytes`` counts from the front of the answer. Written by the worker through ``advance``,
    read by one coroutine, which waits in ``news``. It hears of the last advance at once, and of the
    others once in ``NEWS_SECONDS``: to be told of each layer of a short prompt costs both threads
    more than to compute it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._cancelled = threading.Event()
        self._final_bytes, self._telling = 0, False
        self._told_seconds = -math.inf
        self.ready_bytes = 0

    def advance(self, ready_bytes: int, *, last: bool = False) -> None:
        """From the worker: so many bytes are final, the ``last`` for now.

        Raises ``Cancelled`` when nobody wants them.
        """
        if self._cancelled.is_set():
            raise Cancelled
        self._final_bytes = ready_bytes
        if last:
            self._loop.call_soon_threadsafe(self._tell)
        elif ready_bytes and not self._telling:
            self._telling = True
            self._loop.call_soon_threadsafe(self._tell_in_time)

    def cancel(self) -> None:
        """From the event loop: the worker stops at its next ``advance``."""
        self._cancelled.set()

    async def news(self, *others: asyncio.Future[None]) -> None:
        """Wait until ``ready_bytes`` has grown, or one of the others is done."""
        news = asyncio.ensure_future(self._news.wait())
        pending: set[asyncio.Future[Any]] = {other for other in others if not other.done()}
        try:
            await asyncio.wait(pending | {news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        self._news.clear()

    def _tell_in_time(self) -> None:
        wait = self._told_seconds + NEWS_SECONDS - time.monotonic()
        if wait > 0:
            self._loop.call_later(wait, self._tell)
        else:
            self._tell()

    def _tell(self) -> None:
        # In this order: what is final after the look at it is told by another call.
        self._telling = False
        self.ready_bytes = self._final_bytes
        self._told_seconds = time.monotonic()
        self._news.set()


class Worker:
    """Admission, and the device thread."""

    def __init__(self, settings: Settings, metrics: Metrics, turns: Turns | None = None) -> None:
        self._settings, self._metrics = settings, metrics
        self.turns = turns or Turns()
        self.working_ahead = WorkingAhead()
        self._thread = threading.Thread(target=self._serve, name="kvt-device", daemon=True)
        self._starting = threading.Lock()
        self.in_flight = 0
        self.in_flight_bytes = 0
        metrics.queue_depth.set_function(lambda: self.turns.waiting)
        metrics.queue_seconds.set_function(self.turns.left_seconds)

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Hold one of the places for requests. Raises ``Problem`` 429 when all are taken."""
        if self.in_flight >= self._settings.queue_requests:
            taken = f"{self._settings.queue_requests} requests are in flight"
            raise self._refusal("requests", "overloaded", taken, self.turns.left_seconds())
        self.in_flight += 1
        self._metrics.in_flight.set(self.in_flight)
        try:
            yield
        finally:
            self.in_flight -= 1
            self._metrics.in_flight.set(self.in_flight)

    @contextlib.contextmanager
    def memory(self, nbytes: int) -> Iterator[None]:
        """Reserve memory of the budget. Raises ``Problem`` 413 or 507."""
        limit = self._settings.max_inflight_bytes
        if nbytes > limit:
            raise Problem("body_too_large", f"a request may need {limit} bytes, this one {nbytes}")
        if self.in_flight_bytes + nbytes > limit:
            taken = f"the memory for requests in flight, {limit} bytes, is taken"
            raise self._refusal("bytes", "out_of_memory", taken, self.turns.left_seconds())
        self._count(nbytes)
        try:
            yield
        finally:
            self._count(-nbytes)

    @contextlib.contextmanager
    def turn(self, expected_seconds: float) -> Iterator[Turn]:
        """A turn on the device. Raises ``Problem`` 429 when the wait for it would be too long."""
        wait, limit = self.turns.ahead_seconds(expected_seconds), self._settings.queue_seconds
        if not wait <= limit:
            long = f"the wait would be {wait:.1f} seconds, at most {limit:g} are allowed"
            raise self._refusal("seconds", "overloaded", long, wait - limit)
        turn = self.turns.promise(expected_seconds)
        try:
            yield turn
        finally:
            self.turns.withdraw(turn)

    @contextlib.asynccontextmanager
    async def running(
        self, turn: Turn, work: Steps, emission: Emission
    ) -> AsyncIterator[asyncio.Future[None]]:
        """Do ``work`` in its turn; on leaving the block it has ended or been cancelled.

        Nothing that the work uses may be freed before that, so leaving waits for it.
        """
        self._begin(turn, self._observed(work))
        future = asyncio.wrap_future(turn.ended)
        end = asyncio.wrap_future(turn.ended)  # who is cancelled while it awaits one cancels that
        try:
            yield future
        finally:
            emission.cancel()
            self._withdraw(turn)
            try:
                await ended(end)
            finally:
                # Looked at, whether or not the block did, so that no fault goes unnoticed twice.
                for one in (future, end):
                    one.cancelled() or one.exception()

    def on_device(self, work: Callable[[], Result]) -> Result:
        """Run something on the device thread and wait for it; never from the event loop."""
        results: list[Result] = []

        def whole() -> Steps:
            results.append(work())
            yield from ()

        turn = self.turns.promise(0.0)
        self._begin(turn, whole())
        turn.ended.result()
        return results[0]

    def stop(self) -> None:
        """End the thread after the step that it is making."""
        self.turns.close()
        if self._thread.is_alive():
            self._thread.join()

    def _begin(self, turn: Turn, steps: Steps) -> None:
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()
        self.turns.begin(turn, steps)

    def _withdraw(self, turn: Turn) -> None:
        """Of work that has begun on a thread: it lets go of memory, and much of that takes time."""
        if turn.begun and not turn.ended.done():
            asyncio.get_running_loop().run_in_executor(None, self.turns.withdraw, turn)
        else:
            self.turns.withdraw(turn)

    def _serve(self) -> None:
        if self._settings.threads is not None:
            torch.set_num_threads(self._settings.threads)
        self.turns.serve()

    def _observed(self, work: Steps) -> Steps:
        """The same, counting how long it has waited to begin."""
        submitted = time.perf_counter()

        def steps() -> Steps:
            self._metrics.stage_seconds.labels("queue").observe(time.perf_counter() - submitted)
            yield from _with_memory(work)

        return steps()

    def _refusal(self, bound: str, code: str, detail: str, wait_seconds: float) -> Problem:
        """Of what would go over a bound; by then there should be room."""
        self._metrics.queue_refusals.labels(bound).inc()
        return Problem(code, detail, retry_after_seconds=max(1, math.ceil(wait_seconds)))

    def _count(self, nbytes: int) -> None:
        self.in_flight_bytes += nbytes
        self._metrics.in_flight_bytes.set(self.in_flight_bytes)


async def ended(future: asyncio.Future[None]) -> None:
    """Wait for it, however often we are told not to: it still writes what is freed next."""
    interrupted: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as again:
            interrupted = again
    if interrupted is not None:
        raise interrupted


class WorkingAhead:
    """Lets one request at a time compute before all of its source has arrived: each holds a
    workspace meanwhile, which no budget counts. For the device thread, and for whoever cuts the
    request's work short."""

    def __init__(self) -> None:
        self._holder: object | None = None

    def take(self, who: object) -> bool:
        """Whether it may, from now until it gives the permission back."""
        if self._holder is None:
            self._holder = who
        return self._holder is who

    def give_back(self, who: object) -> None:
        """Whether or not it has it."""
        if self._holder is who:
            self._holder = None


def _with_memory(work: Steps) -> Steps:
    """The same; no memory becomes a ``Problem``, raised when the work's frames are gone."""
    try:
        yield from work
    except (MemoryError, torch.OutOfMemoryError):
        failed = True
    except RuntimeError as error:
        failed = "DefaultCPUAllocator" in str(error)
        if not failed:
            raise
    else:
        failed = False
    if failed:
        raise Problem("out_of_memory", "there is no memory for this request now")
