"""Clients that are slow to send or to read, or stop: over real sockets, against a service whose
answers are larger than what sockets hold. They cost a place and their memory, and no more."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mappers.layouts import Layout, write
from tests.service.live import Live, read_all, wait_until
from tests.service.pair import Request, cache_of, claim, document, good, identity, mapper, publish

LAYERS, TOKENS = 24, 500
SOURCE = identity("wide-small", layers=LAYERS, theta=10_000.0, heads=8, dim=32)
TARGET = identity("wide-large", layers=LAYERS, theta=500_000.0, heads=8, dim=32)
PLACES = 3
PIECE_BYTES = 1 << 16


@pytest.fixture(scope="module")
def live(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("wide")
    publish(folder / "artifacts", mapper(SOURCE, TARGET), proven=False)
    given = {
        "artifacts": [str(folder / "artifacts"), str(artifacts)],
        "allow_unproven": True,
        "queue_requests": PLACES,
        "body_grace_seconds": 3,
        "shadow_rate": 0,
    }
    running = Live(json.dumps(given), folder / "log")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def request_bytes() -> bytes:
    said = document(
        TOKENS, source=claim(SOURCE), target=claim(TARGET), prefix_token_ids=[], layout="NHD"
    )
    return Request(said, write(Layout.NHD, cache_of(SOURCE, TOKENS))).body


@pytest.fixture(scope="module")
def answer_bytes(live: Live, request_bytes: bytes) -> bytes:
    """To the request, when it comes at once and is read at once."""
    return live.post(request_bytes).content


@contextmanager
def connected(live: Live) -> Iterator[socket.socket]:
    """A connection that holds as little as the kernel lets it."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", live.port))
        yield connection


def head(body: bytes) -> bytes:
    kind = b"Host: a\r\nContent-Type: application/vnd.safetensors\r\nConnection: close\r\n"
    return b"POST /translate HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n" % (kind, len(body))


def own_bytes(live: Live) -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{live.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak_growth_bytes(live: Live, work: Callable[[], object]) -> int:
    """How much memory of its own the service takes at most, beyond what it had."""
    before, peak, done = own_bytes(live), [0], threading.Event()

    def look() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], own_bytes(live))
            time.sleep(0.001)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return peak[0] - before


def test_sent_slowly_and_read_slowly_it_is_the_same_answer(
    live: Live, request_bytes: bytes, answer_bytes: bytes
) -> None:
    """Its target layers are computed while later source layers are still to come: also then both
    caches together need little more memory than they have bytes."""
    received = bytearray()

    def exchange() -> None:
        with connected(live) as connection:
            connection.sendall(head(request_bytes))
            for start in range(0, len(request_bytes), 16 * PIECE_BYTES):
                connection.sendall(request_bytes[start : start + 16 * PIECE_BYTES])
                time.sleep(0.03)
            while part := connection.recv(PIECE_BYTES):
                received.extend(part)

    growth = peak_growth_bytes(live, exchange)
    assert bytes(received).partition(b"\r\n\r\n")[2] == answer_bytes
    assert growth <= 1.1 * (len(request_bytes) + len(answer_bytes))


def test_a_reader_that_stops_holds_a_place_and_no_more_memory_and_is_cut_off(
    live: Live, request_bytes: bytes, answer_bytes: bytes
) -> None:
    def stall() -> None:
        with connected(live) as connection:
            connection.sendall(head(request_bytes) + request_bytes)
            assert connection.recv(15).startswith(b"HTTP/1.1 200 ")
            assert live.metric("kvt_in_flight") == 1
            assert live.translate(good()).headers["kvt-decision"] == "translate"
            wait_until(lambda: live.metric("kvt_in_flight") == 0)
            assert len(read_all(connection)) < len(answer_bytes)

    with unharmed_by(live, ("disconnected", "client_disconnect")):
        growth = peak_growth_bytes(live, stall)
    assert growth <= 1.1 * (len(request_bytes) + len(answer_bytes))


def test_a_writer_that_stops_holds_a_place_and_what_it_has_sent_and_is_cut_off(
    live: Live, request_bytes: bytes
) -> None:
    sent = request_bytes[: len(request_bytes) // 4]

    def stall() -> None:
        with connected(live) as connection:
            connection.sendall(head(request_bytes) + sent)
            wait_until(lambda: live.metric("kvt_in_flight") == 1)
            assert live.translate(good()).headers["kvt-decision"] == "translate"
            assert read_all(connection).startswith(b"HTTP/1.1 408 ")

    with unharmed_by(live, ("refused", "body_too_slow")):
        growth = peak_growth_bytes(live, stall)
    # A quarter of the source, and the target layers that it was enough for.
    assert growth <= len(request_bytes)


def test_stopped_clients_cost_a_place_each_and_the_rest_is_served(
    live: Live, request_bytes: bytes, answer_bytes: bytes
) -> None:
    with connected(live) as reading, connected(live) as writing:
        reading.sendall(head(request_bytes) + request_bytes)
        assert reading.recv(15).startswith(b"HTTP/1.1 200 ")
        writing.sendall(head(request_bytes) + request_bytes[:PIECE_BYTES])
        wait_until(lambda: live.metric("kvt_in_flight") == PLACES - 1)
        assert live.post(request_bytes).content == answer_bytes
        wait_until(lambda: live.metric("kvt_in_flight") == 0)
    live.at_rest()


@contextmanager
def unharmed_by(live: Live, outcome: tuple[str, str]) -> Iterator[None]:
    """As ``unharmed``, for a block that makes one good request as well."""
    before = live.at_rest().get(outcome, 0)
    golden = live.translate(good()).content
    yield
    assert live.at_rest()[outcome] == before + 1
    assert live.translate(good()).content == golden
