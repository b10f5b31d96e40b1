"""The process: uvicorn with a front door that has deadlines, and a shutdown that loses nothing."""

import asyncio
import http
import logging
import re
import socket
import uuid
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.app import create_app
from service.errors import Problem
from service.logs import configure
from service.problems import render
from service.settings import Settings
from service.state import Service

MAX_HEAD_BYTES = 32 * 1024
END_OF_HEAD = re.compile(rb"\n\r?\n")
KEEP_ALIVE_SECONDS = 5
BACKLOG = 512


def run(settings: Settings, listener: socket.socket) -> None:
    """Serve on a listening socket until SIGTERM or SIGINT, and finish what is in flight.

    The process then ends by the signal that it got.
    """
    configure(settings)
    Server(settings).run(sockets=[listener])


class Server(uvicorn.Server):
    """uvicorn, draining before it closes its port.

    On the first signal /readyz turns to 503 and new translations are refused with Retry-After,
    while the port stays open for ``drain_notice_seconds`` and until those in flight are done, at
    most ``drain_seconds``. A second signal ends the waiting.
    """

    def __init__(self, settings: Settings) -> None:
        app = create_app(settings)
        self._service: Service = app.state.service
        self._drain_started: float | None = None
        front_door = type("Door", (FrontDoor,), {"header_seconds": settings.header_seconds})
        super().__init__(
            uvicorn.Config(
                app,
                # h11 bounds a request's head and refuses malformed framing; httptools does not.
                http=front_door,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=max(1, int(settings.drain_seconds)),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and says where it listens."""
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        logging.getLogger("service.server").info("listening on http://%s:%d", host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: stop waiting."""
        if self._drain_started is not None:
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)
        self._service.lifecycle.draining = True
        self._drain_started = asyncio.get_running_loop().time()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to close the port now."""
        if self._drain_started is not None and self._drained(self._drain_started):
            self.should_exit = True
        return await super().on_tick(counter)

    def _drained(self, started: float) -> bool:
        settings = self._service.settings
        waited = asyncio.get_running_loop().time() - started
        if waited >= settings.drain_seconds:
            return True
        return waited >= settings.drain_notice_seconds and self._service.worker.in_flight == 0


class FrontDoor(H11Protocol):
    """A deadline for the request's head, problem+json for bytes that are not HTTP, and abort.

    uvicorn itself waits for ever for a head, and middleware only sees requests that have one.
    """

    header_seconds: float
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.app_state = {**self.app_state, "kvt.abort": transport.abort}
        super().connection_made(transport)
        # asyncio does this only for sockets whose protocol number is stated, which
        # socket.create_server leaves at 0; without it every answer waits 40 ms for an ACK.
        connection = transport.get_extra_info("socket")
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._deadline = self.loop.call_later(self.header_seconds, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_deadline()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE:
            if self._deadline is None:
                self._deadline = self.loop.call_later(self.header_seconds, self._too_slow)
            # h11 judges a head by its size only while it is incomplete, and one read can hold a
            # large one that is complete.
            head = self.conn.trailing_data[0] + data
            if len(head) > MAX_HEAD_BYTES and not END_OF_HEAD.search(head, 0, MAX_HEAD_BYTES):
                self._refuse(Problem("head_too_large", f"at most {MAX_HEAD_BYTES} bytes are read"))
                return
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for bytes that are not HTTP."""
        self._refuse(Problem("bad_request", "this is not HTTP/1.1 as it should be"))

    def _refuse(self, problem: Problem) -> None:
        if self.transport.is_closing():
            return
        answer = render(problem, uuid.uuid4().hex)
        status = http.HTTPStatus(problem.kind.status)
        self.transport.write(
            b"HTTP/1.1 %d %s\r\nconnection: close\r\n" % (status, status.phrase.encode())
            + b"".join(b"%s: %s\r\n" % header for header in answer.raw_headers)
            + b"\r\n"
            + bytes(answer.body)
        )
        self.transport.close()

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
