"""A real process over time: slow translations, clients that stall or leave, signals."""

import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.service.live import (
    SAFETENSORS,
    Live,
    assert_problem,
    read_all,
    unharmed,
    wait_until,
)
from tests.service.pair import Request, good

LAYER_SECONDS = 0.2
PLACES = 3
KIND = b"Host: a\r\nContent-Type: application/vnd.safetensors\r\n"


def start_slow(artifacts: Path, log: Path, **settings: object) -> Live:
    """A process whose translations take about a second."""
    given = {"artifacts": [str(artifacts)], "queue_requests": PLACES, "shadow_rate": 0, **settings}
    return Live(json.dumps(given), log, layer_seconds=LAYER_SECONDS)


@pytest.fixture(scope="module")
def slow(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    running = start_slow(artifacts, tmp_path_factory.mktemp("slow") / "log")
    yield running
    running.stop()


def send(live: Live, request: Request) -> httpx.Response:
    """POST on a connection of its own."""
    url = f"http://127.0.0.1:{live.port}/translate"
    return httpx.post(url, content=request.body, headers=SAFETENSORS, timeout=60)


def in_flight(live: Live, count: int) -> None:
    """Wait until so many requests hold a place."""
    wait_until(lambda: live.metric("kvt_in_flight") == count)


def test_health_answers_while_the_device_is_busy(slow: Live) -> None:
    with unharmed(slow, ("translate", "")), ThreadPoolExecutor(1) as pool:
        running = pool.submit(send, slow, good())
        in_flight(slow, 1)
        answers = 0
        while not running.done():
            assert slow.client.get("/livez").status_code == 200
            answers += 1
        assert running.result().status_code == 200
    assert answers >= 5


def test_first_layers_arrive_before_the_last_are_computed(slow: Live) -> None:
    body = good().body
    with socket.create_connection(("127.0.0.1", slow.port), timeout=60) as connection:
        length = f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        connection.sendall(b"POST /translate HTTP/1.1\r\n" + KIND + length + body)
        received = b""
        while len(received.partition(b"\r\n\r\n")[2]) < 1500:
            received += connection.recv(1 << 16)
        assert b"KVT-Decision: translate".lower() in received.lower()
        assert slow.metric("kvt_in_flight") == 1
        received += read_all(connection)
    assert received.partition(b"\r\n\r\n")[2] == slow.translate(good()).content


def test_one_more_than_the_places_is_told_to_come_back(slow: Live) -> None:
    with unharmed_by(slow), ThreadPoolExecutor(PLACES) as pool:
        running = [pool.submit(send, slow, good(seed=seed)) for seed in range(PLACES)]
        in_flight(slow, PLACES)
        answer = slow.translate(good())
        assert_problem(answer, 429, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        answers = [future.result() for future in running]
    assert [a.headers["kvt-decision"] for a in answers] == ["translate"] * PLACES
    alone = [slow.translate(good(seed=seed)).content for seed in range(PLACES)]
    assert [a.content for a in answers] == alone


class unharmed_by:
    """As ``unharmed``, for a block that makes several requests."""

    def __init__(self, live: Live) -> None:
        self.live = live

    def __enter__(self) -> None:
        self.golden = self.live.translate(good()).content

    def __exit__(self, *_: object) -> None:
        self.live.at_rest()
        assert self.live.translate(good()).content == self.golden


def test_a_queue_that_is_too_long_for_the_caller(slow: Live) -> None:
    expected = slow.client.post("/translate/plan", json=good().document).json()["expected_ms"]
    patient = good(reprefill_ms=expected * 1.5)
    late = ("reprefill", "would_miss_deadline")
    before = slow.at_rest().get(late, 0)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(send, slow, good(seed=seed)) for seed in range(2)]
        wait_until(lambda: slow.metric("kvt_queue_depth") == 1)
        answer = slow.translate(patient)
        [future.result() for future in running]
    assert answer.headers["kvt-reason"] == late[1]
    assert slow.at_rest()[late] == before + 1
    assert slow.translate(patient).headers["kvt-decision"] == "translate"
    assert slow.metric("kvt_queue_depth") == 0


def test_a_client_that_leaves_frees_the_device(slow: Live) -> None:
    body = good().body
    request = (
        b"POST /translate HTTP/1.1\r\n" + KIND + b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    for wait_for in ("kvt_in_flight", "first bytes"):
        with unharmed(slow, ("disconnected", "client_disconnect")):
            with socket.create_connection(("127.0.0.1", slow.port), timeout=60) as connection:
                connection.sendall(request)
                in_flight(slow, 1)
                if wait_for == "first bytes":
                    connection.recv(100)
            wait_until(lambda: slow.metric("kvt_in_flight") == 0)


@pytest.mark.parametrize("sent", [0, 4, 100, -1])
def test_a3_a_body_that_ends_early(live: Live, sent: int) -> None:
    body = good().body
    request = b"POST /translate HTTP/1.1\r\n" + KIND + b"Content-Length: %d\r\n\r\n" % len(body)
    with (
        unharmed(live, ("disconnected", "client_disconnect")),
        socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection,
    ):
        connection.sendall(request + body[:sent])
        in_flight(live, 1)
        connection.close()


def test_a6_bodies_that_stall_are_cut_off(live: Live) -> None:
    body = good().body
    request = b"POST /translate HTTP/1.1\r\n" + KIND + b"Content-Length: %d\r\n\r\n" % len(body)
    for sent in (0, 4, 2000):
        with unharmed(live, ("refused", "body_too_slow")):
            answer = live.raw(request + body[:sent])
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_a6_trickle_is_too_slow(live: Live) -> None:
    body = good().body
    request = b"POST /translate HTTP/1.1\r\n" + KIND + b"Content-Length: %d\r\n\r\n" % len(body)
    with (
        unharmed(live, ("refused", "body_too_slow")),
        socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection,
    ):
        stop = threading.Event()

        def trickle() -> None:
            connection.sendall(request)
            for byte in body:
                if stop.wait(0.1):
                    return
                connection.sendall(bytes([byte]))

        with ThreadPoolExecutor(1) as pool:
            sending: Future[None] = pool.submit(trickle)
            answer = connection.recv(1 << 16)
            stop.set()
            sending.exception()
    assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("sent", [b"", b"POST /tra", b"GET /livez HTTP/1.1\r\nHost: a\r\n"])
def test_a6_heads_that_stall_are_cut_off(live: Live, sent: bytes) -> None:
    with unharmed(live, None):
        assert live.raw(sent) == b""


def test_a6_second_head_on_a_connection_has_a_deadline_too(live: Live) -> None:
    whole = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
    with unharmed(live, None):
        answer = live.raw(whole, whole[:10])
    assert answer.count(b"HTTP/1.1 200 OK") == 1


def test_many_stalled_clients_do_not_stop_a_good_one(live: Live) -> None:
    stalled = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(100)]
    for number, connection in enumerate(stalled):
        connection.sendall(b"POST /translate HTTP/1.1\r\n"[: number % 26])
    assert live.translate(good()).headers["kvt-decision"] == "translate"
    for connection in stalled:
        connection.settimeout(20)
        assert read_all(connection) == b""
        connection.close()


def test_s15_sigterm_finishes_what_is_in_flight(artifacts: Path, tmp_path: Path) -> None:
    """And a second one ends the time in which the port stays open only to say 503."""
    live = start_slow(artifacts, tmp_path / "log", drain_notice_seconds=600, drain_seconds=600)
    golden = live.translate(good()).content
    with ThreadPoolExecutor(PLACES) as pool:
        running = [pool.submit(send, live, good()) for _ in range(PLACES)]
        in_flight(live, PLACES)
        live.process.send_signal(signal.SIGTERM)
        wait_until(lambda: live.client.get("/readyz").status_code == 503)
        assert live.client.get("/readyz").json()["status"] == "draining"
        assert live.client.get("/livez").status_code == 200
        refused = send(live, good())
        answers = [future.result() for future in running]
    assert_problem(refused, 503, "draining")
    assert [answer.content for answer in answers] == [golden] * PLACES
    assert live.process.poll() is None
    # uvicorn raises the signal again when it is done, so that a supervisor sees what ended it.
    assert live.stop() in (0, -signal.SIGTERM)
    assert b"Traceback" not in live.output()
