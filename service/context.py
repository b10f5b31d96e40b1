"""Around every request: an id of our own, one log line, and a quiet end for bodies left unread."""

import asyncio
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = structlog.get_logger("service.access")

LINGER_SECONDS = 2.0
LINGER_BYTES = 64 << 20


class RequestContext:
    """ASGI middleware.

    An id that the client sends is never used: it could be forged, huge, or another client's. A
    request that is answered before its body has been read is read on for a moment, because closing
    a socket with unread data resets it and may destroy the answer on its way.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=exchange.request_id)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            exchange.log()


class _Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.request_id = uuid.uuid4().hex
        self._receive, self._send = receive, send
        self._started = time.perf_counter()
        self._unread, self._asked, self._status = _has_body(scope), False, 0
        self._expects = _header(scope, b"expect") is not None
        self._facts: MutableMapping[str, Any] = {"method": scope["method"], "path": scope["path"]}
        scope["kvt.request_id"] = self.request_id
        scope["kvt.facts"] = self._facts

    async def receive(self) -> Message:
        self._asked = True
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._unread = False
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self.request_id
            if self._unread:
                headers["Connection"] = "close"
        elif self._unread and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _linger(self) -> None:
        if self._expects and not self._asked:
            return  # the client waits for a word from us before it sends its body
        left = LINGER_BYTES
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while self._unread and left > 0:
                    left -= len((await self.receive()).get("body", b""))
        except TimeoutError:
            return

    def log(self) -> None:
        milliseconds = round((time.perf_counter() - self._started) * 1000, 3)
        log.info("request", status=self._status, ms=milliseconds, **_printable(self._facts))


def _has_body(scope: Scope) -> bool:
    length = _header(scope, b"content-length")
    return length not in (None, b"0") or _header(scope, b"transfer-encoding") is not None


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _printable(facts: MutableMapping[str, Any]) -> dict[str, Any]:
    return {name: v[:128] if isinstance(v, str) else v for name, v in facts.items()}
