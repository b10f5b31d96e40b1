"""Sending a translation while its later layers are still being computed."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Literal, NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.translation import Translation
from service.worker import Emission

SLICE_BYTES = 256 * 1024

Cut = Literal["client", "fault"]


class Running(NamedTuple):
    """A translation on its way: ``future`` is its end, ``gone`` that of the client's connection."""

    work: Translation
    emission: Emission
    future: asyncio.Future[None]
    gone: asyncio.Task[None]
    started_seconds: float


class AnswerCut(Exception):
    """An answer ended early: the ``client`` went or is too slow, or the ``fault`` is ours."""

    def __init__(self, cut: Cut) -> None:
        super().__init__(cut)
        self.cut = cut


class Stream(Response):
    """Sends the header, then the tensors as the worker finishes them.

    Content-Length is stated, so an answer that is cut off can never be taken for whole: the
    connection is closed before that many bytes were sent. ``given`` is told when all were, before
    ``held`` is released, which it is at the end, whatever the end is; then ``ended`` learns which
    it was (None: all was sent). Waiting for the client is limited as it is for a request's body.
    """

    def __init__(
        self,
        head: bytes,
        headers: dict[str, str],
        *,
        running: Running,
        held: AsyncExitStack,
        given: Callable[[], None],
        ended: Callable[[Cut | None], None],
        grace_seconds: float,
        bytes_per_second: float,
    ) -> None:
        super().__init__()
        self.raw_headers = [(k.lower().encode(), v.encode()) for k, v in headers.items()]
        self._head, self._running = memoryview(head), running
        self._held, self._given, self._ended = held, given, ended
        self._grace_seconds, self._bytes_per_second = grace_seconds, bytes_per_second
        self._waited_seconds, self._sent_bytes = 0.0, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        cut: Cut | None = "fault"
        try:
            await self._send_all(send)
            self._given()
            cut = None
        except AnswerCut as error:
            cut = error.cut
            _abort(scope)
        finally:
            try:
                await self._held.aclose()
            finally:
                self._ended(cut)

    async def _send_all(self, send: Send) -> None:
        # It waits as well, for the end of what was sent on this connection before.
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await self._in_time(send(start))
        await self._put(send, self._head, more=True)
        data, done = self._running.work.output, 0
        while done < len(data):
            ready = await self._ready_beyond(done)
            await self._put(send, data[done:ready], more=ready < len(data))
            done = ready

    async def _ready_beyond(self, done: int) -> int:
        """Bytes that may be sent, more than ``done``."""
        running = self._running
        while running.emission.ready_bytes <= done:
            if running.gone.done():
                raise AnswerCut("client")
            if running.future.done():  # its last news came before its end
                raise AnswerCut("fault")
            await running.emission.news(running.gone, running.future)
        return running.emission.ready_bytes

    async def _put(self, send: Send, data: memoryview, *, more: bool) -> None:
        for at in range(0, len(data), SLICE_BYTES):
            last = not more and at + SLICE_BYTES >= len(data)
            await self._slice(send, data[at : at + SLICE_BYTES], last=last)

    async def _slice(self, send: Send, part: memoryview, *, last: bool) -> None:
        if self._running.gone.done():
            raise AnswerCut("client")
        message = {"type": "http.response.body", "body": part, "more_body": not last}
        await self._in_time(send(message))
        self._sent_bytes += len(part)

    async def _in_time(self, sending: Awaitable[None]) -> None:
        allowed = self._grace_seconds + self._sent_bytes / self._bytes_per_second
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(allowed - self._waited_seconds):
                await sending
        except TimeoutError as error:
            raise AnswerCut("client") from error
        self._waited_seconds += loop.time() - started


def _abort(scope: Scope) -> None:
    """Drop the connection with what it has buffered; only our uvicorn protocol offers that."""
    abort = scope.get("state", {}).get("kvt.abort")
    if abort is not None:
        abort()
