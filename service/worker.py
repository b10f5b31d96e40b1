"""The one thread that owns the device, and the limits on what may wait for it.

Places and memory are reserved before anything is allocated. A translation writes into the one
buffer that its answer is sent from, so a client that reads slowly holds memory, never the device.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from service.errors import Problem
from service.metrics import Metrics
from service.settings import Settings

Result = TypeVar("Result")


class Cancelled(Exception):
    """The request behind a translation is gone; stop at the next layer."""


class Emission:
    """Bytes that the worker produces front to back and the event loop sends.

    ``ready_bytes`` counts from the front of the answer. Written by the worker through ``advance``,
    read by one coroutine, which waits in ``news``.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._cancelled = threading.Event()
        self.ready_bytes = 0

    def advance(self, ready_bytes: int) -> None:
        """From the worker: so many bytes are final. Raises ``Cancelled`` when nobody wants them."""
        if self._cancelled.is_set():
            raise Cancelled
        self._loop.call_soon_threadsafe(self._publish, ready_bytes)

    def cancel(self) -> None:
        """From the event loop: the worker stops at its next ``advance``."""
        self._cancelled.set()

    async def news(self, *others: asyncio.Future[None]) -> None:
        """Wait until ``ready_bytes`` has grown, or one of the others is done."""
        news = asyncio.ensure_future(self._news.wait())
        pending: set[asyncio.Future[Any]] = {other for other in others if not other.done()}
        await asyncio.wait(pending | {news}, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        self._news.clear()

    def _publish(self, ready_bytes: int) -> None:
        self.ready_bytes = ready_bytes
        self._news.set()


class Worker:
    """Admission, and the device thread."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._executor = ThreadPoolExecutor(1, "kvt-device", initializer=self._prepare)
        self._promised_seconds: dict[object, float] = {}
        self.in_flight = 0
        self.in_flight_bytes = 0

    def pending_seconds(self) -> float:
        """Expected time until everything that was submitted is done."""
        return sum(self._promised_seconds.values())

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Hold one of the places for requests. Raises ``Problem`` 429 when all are taken."""
        if self.in_flight >= self._settings.queue_requests:
            raise Problem(
                "overloaded",
                f"{self._settings.queue_requests} requests are in flight",
                retry_after_seconds=max(1, math.ceil(self.pending_seconds())),
            )
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
            raise Problem(
                "out_of_memory",
                f"the memory for requests in flight, {limit} bytes, is taken",
                retry_after_seconds=max(1, math.ceil(self.pending_seconds())),
            )
        self._count(nbytes)
        try:
            yield
        finally:
            self._count(-nbytes)

    @contextlib.asynccontextmanager
    async def running(
        self, work: Callable[[], None], emission: Emission, expected_seconds: float
    ) -> AsyncIterator[asyncio.Future[None]]:
        """Run ``work`` on the device thread; on leaving the block it has ended or been cancelled.

        Nothing that the work uses may be freed before that, so leaving waits for it.
        """
        key = object()
        self._promised_seconds[key] = expected_seconds
        self._metrics.queue_depth.inc()
        submitted = time.perf_counter()

        def counted() -> None:
            self._metrics.queue_depth.dec()
            self._metrics.stage_seconds.labels("queue").observe(time.perf_counter() - submitted)
            emission.advance(0)  # a request that is gone by now ends here
            _with_memory(work)

        future = asyncio.get_running_loop().run_in_executor(self._executor, counted)
        future.add_done_callback(lambda _: self._promised_seconds.pop(key, None))
        try:
            yield future
        finally:
            emission.cancel()
            await asyncio.wait([future])
            # Looked at here, whether or not the block did, so that no fault goes unnoticed twice.
            future.cancelled() or future.exception()

    def on_device(self, work: Callable[[], Result]) -> Result:
        """Run something on the device thread and wait for it; never from the event loop."""
        return self._executor.submit(work).result()

    def stop(self) -> None:
        """End the thread when its work is done."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _count(self, nbytes: int) -> None:
        self.in_flight_bytes += nbytes
        self._metrics.in_flight_bytes.set(self.in_flight_bytes)

    def _prepare(self) -> None:
        if self._settings.threads is not None:
            torch.set_num_threads(self._settings.threads)


def _with_memory(work: Callable[[], None]) -> None:
    """Run it; memory that cannot be had becomes a ``Problem``, raised when its frames are gone."""
    try:
        work()
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
