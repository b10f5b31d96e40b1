"""The least that a server can do with a cache: take a body in, send as many bytes as are asked for.

    python -m tests.bench.echo      # says on which port it listens, until it is ended

Raw ASGI under the service's own front door: one buffer for what comes, one for what goes, slices
of the service's size. What the service needs beside this is not the transport's.
"""

import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

from service.server import MAX_HEAD_BYTES, FrontDoor
from service.stream import SLICE_BYTES

Message = MutableMapping[str, Any]
HEADER = b"answer-bytes"


async def app(
    scope: Message,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """POST any body with a header ``answer-bytes``."""
    headers = dict(scope["headers"])
    received = memoryview(bytearray(int(headers[b"content-length"])))
    filled, more = 0, True
    while more:
        message = await receive()
        body = message.get("body", b"")
        received[filled : filled + len(body)] = body
        filled, more = filled + len(body), message.get("more_body", False)
    answer = memoryview(bytearray(int(headers[HEADER])))
    length = (b"content-length", str(len(answer)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    for start in range(0, len(answer), SLICE_BYTES):
        part, last = answer[start : start + SLICE_BYTES], start + SLICE_BYTES >= len(answer)
        await send({"type": "http.response.body", "body": part, "more_body": not last})


def main() -> None:
    """Serve on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    front_door = type("Door", (FrontDoor,), {"header_seconds": 10})
    config = uvicorn.Config(
        app,
        http=front_door,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        lifespan="off",
        log_config=None,
        access_log=False,
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
