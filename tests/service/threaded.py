"""The service on a port of its own, in a thread of this process: for clients that need a port."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import httpx

from service.server import Server
from service.settings import Settings
from service.state import Service
from tests.service.live import START_SECONDS


class Running(NamedTuple):
    """Where it listens, and its parts."""

    url: str
    service: Service


@contextmanager
def serving(settings: Settings) -> Iterator[Running]:
    """Every mapper has been tried; it may still not be ready."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while httpx.get(f"{url}/startupz", timeout=START_SECONDS).status_code != 200:
            if time.monotonic() > deadline:
                raise RuntimeError("the service did not start")
            time.sleep(0.01)
        yield Running(url, server._service)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
