"""One request driven through the application by hand: to see an answer that is never finished."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from tests.service.pair import Request

Message = dict[str, Any]

CLIENT = ("127.0.0.1", 123)  # as httpx's own ASGI transport has it


@dataclass
class Answer:
    """What the application has sent; ``aborted`` when it dropped the connection."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    finished: bool = False
    aborted: bool = False
    parts_read: int = 0

    def take(self, message: Message) -> None:
        """Add one ASGI message."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.body += bytes(message["body"])
            self.finished = not message.get("more_body", False)

    @property
    def cut(self) -> bool:
        """Whether a client sees an answer that ends too early."""
        return not self.finished and len(self.body) < int(self.headers["content-length"])


async def post(
    app: FastAPI,
    request: Request,
    *,
    on_send: Callable[[Message], Awaitable[None]] | None = None,
    leave: asyncio.Event | None = None,
    parts: Sequence[bytes] = (),
    **headers: str,
) -> Answer:
    """POST to /translate; ``leave`` disconnects when it is set, ``on_send`` may stall.

    The body is that of ``request``, or ``parts``, of which the answer counts those that were asked
    for.
    """
    answer = Answer()
    left = list(parts or [request.body])

    async def receive() -> Message:
        if left:
            answer.parts_read += 1
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if on_send is not None:
            await on_send(message)
        answer.take(message)

    def abort() -> None:
        answer.aborted = True

    sent = {"content-type": "application/vnd.safetensors", **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "client": CLIENT,
        "path": "/translate",
        "raw_path": b"/translate",
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        "state": {"kvt.abort": abort},
    }
    await app(scope, receive, send)
    return answer
