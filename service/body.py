"""The request body as a stream with a least speed, read into memory that is there already."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from service.digest import ContentDigest
from service.errors import Problem

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class Body:
    """Reads from an ASGI ``receive``.

    Waiting for the client is limited: ``grace_seconds`` in all, and one second more for each
    ``bytes_per_second`` that have arrived. Time in which nobody reads does not count. A body that
    is read to its end is held to ``digest``.
    """

    def __init__(
        self,
        receive: Receive,
        *,
        limit_bytes: int,
        grace_seconds: float,
        bytes_per_second: float,
        digest: ContentDigest | None = None,
    ) -> None:
        self._receive = receive
        self._digest = digest or ContentDigest({})
        self._limit_bytes = limit_bytes
        self._grace_seconds, self._bytes_per_second = grace_seconds, bytes_per_second
        self._pending = memoryview(b"")
        self._more = True
        self._waited_seconds = 0.0
        self.received_bytes = 0

    async def exactly(self, size: int) -> bytes:
        """The next ``size`` bytes, for small parts. Raises ``Problem`` when there are fewer."""
        part = bytearray(size)
        await self.into(memoryview(part))
        return bytes(part)

    async def into(self, target: memoryview) -> None:
        """Fill ``target`` (bytes) with what comes next. Raises ``Problem`` or ``ClientGone``."""
        filled = 0
        while filled < len(target):
            while not self._pending:
                if not self._more:
                    raise Problem("truncated_body", "the body ended before its declared size")
                await self._next()
            size = min(len(self._pending), len(target) - filled)
            target[filled : filled + size] = self._pending[:size]
            self._pending = self._pending[size:]
            filled += size

    async def rest(self, limit_bytes: int) -> bytes:
        """All that is left, for small bodies. Raises ``Problem`` when it is more than the limit."""
        parts = bytearray(self._pending)
        while self._more:
            await self._next()
            parts += self._pending
            if len(parts) > limit_bytes:
                raise Problem("body_too_large", f"at most {limit_bytes} bytes are read here")
        self._pending = memoryview(b"")
        self._digest.check()
        return bytes(parts)

    async def end(self) -> None:
        """Make sure that nothing follows, and that all of it is what was sent."""
        while not self._pending and self._more:
            await self._next()
        if self._pending:
            raise Problem("bad_safetensors", "there are bytes after the last tensor")
        self._digest.check()

    async def gone(self) -> None:
        """Return when the client goes away; call it when the body has been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _next(self) -> None:
        allowed = self._grace_seconds + self.received_bytes / self._bytes_per_second
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(allowed - self._waited_seconds):
                message = await self._receive()
        except TimeoutError as error:
            raise Problem("body_too_slow", "the body arrives too slowly") from error
        self._waited_seconds += loop.time() - started
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._more = bool(message.get("more_body", False))
        self._pending = memoryview(message.get("body", b""))
        self.received_bytes += len(self._pending)
        if self.received_bytes > self._limit_bytes:
            raise Problem("body_too_large", f"at most {self._limit_bytes} bytes are read")
        self._digest.update(self._pending)
