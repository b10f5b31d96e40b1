"""A real uvicorn process of the service, and what must be true of it after anything."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.service.pair import Request, good

SAFETENSORS = {"Content-Type": "application/vnd.safetensors"}
START_SECONDS = 240  # nearly all of it is imports, on a machine that may be busy
ADMIN_TOKEN = "a-token-for-tests-only"
PROGRAM = """
import socket, sys, time
import torch
from mappers.translate import Translator
from service.server import run
from service.settings import Settings

real, seconds = Translator.steps, float(sys.argv[2])

def slow(self, *args, **names):
    for layer in real(self, *args, **names):
        end, busy = time.monotonic() + seconds, torch.rand(128, 128)
        while time.monotonic() < end:
            busy @ busy
        yield layer

if seconds:
    Translator.steps = slow
listener = socket.create_server(("127.0.0.1", 0), backlog=64)
print("port", listener.getsockname()[1], flush=True)
run(Settings.model_validate_json(sys.argv[1]), listener)
"""
PORT = re.compile(rb"^port (\d+)$", re.MULTILINE)
LEAKS = re.compile(rb"Traceback|/work|/tmp|/home|/usr|0x[0-9a-f]{6}|\.py\"")
OUTCOME = re.compile(r'kvt_translations_total\{outcome="(.*?)",pair="(.*?)",reason="(.*?)"\} (.*)')


class Live:
    """One process; ``settings`` are JSON text for ``Settings``.

    Each target layer computes for ``layer_seconds`` longer than it has to.
    """

    def __init__(self, settings: str, log: Path, *, layer_seconds: float = 0) -> None:
        self.log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, settings, str(layer_seconds)],
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=Path(__file__).parents[2],
            )
        self.port = self._port()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        self.wait_ready()

    def _port(self) -> int:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := PORT.search(self.log.read_bytes()):
                return int(found[1])
            time.sleep(0.02)
        self.process.kill()
        self.process.wait()
        raise RuntimeError(f"the service did not start: {self.log.read_text()}")

    def wait_ready(self) -> None:
        """Until every mapper was tried."""
        deadline = time.monotonic() + START_SECONDS
        while self.client.get("/startupz").status_code != 200:
            if time.monotonic() > deadline:
                raise RuntimeError("the service did not become ready")
            time.sleep(0.02)

    def translate(self, request: Request, **headers: str) -> httpx.Response:
        """POST it."""
        return self.client.post("/translate", content=request.body, headers=SAFETENSORS | headers)

    def post(self, body: bytes, **headers: str) -> httpx.Response:
        """POST any bytes as a safetensors body."""
        return self.client.post("/translate", content=body, headers=SAFETENSORS | headers)

    def raw(self, *parts: bytes, shut: bool = False, seconds: float = 20) -> bytes:
        """Send bytes on a socket of its own; all that comes back until the service closes it."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            try:
                for part in parts:
                    connection.sendall(part)
                if shut:
                    connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # refused in the middle: an answer may be there all the same
            return read_all(connection)

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        found = re.search(rf"^{name} (.*)$", self.client.get("/metrics").text, re.MULTILINE)
        if found is None:
            raise KeyError(name)
        return float(found[1])

    def at_rest(self) -> dict[tuple[str, str], float]:
        """Wait until nothing is in flight; how often each (outcome, reason) was answered."""
        texts = [""]

        def idle() -> bool:
            texts[0] = self.client.get("/metrics").text
            return "\nkvt_in_flight 0.0\n" in texts[0]

        wait_until(idle)
        assert "\nkvt_in_flight_bytes 0.0\n" in texts[0]
        totals: dict[tuple[str, str], float] = {}
        for outcome, _, reason, value in OUTCOME.findall(texts[0]):
            totals[outcome, reason] = totals.get((outcome, reason), 0) + float(value)
        return totals

    def descriptors(self) -> int:
        """Open file descriptors."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def threads(self) -> int:
        """Running threads."""
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def memory_bytes(self) -> int:
        """Resident memory."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def output(self) -> bytes:
        """Everything logged; the process has ended."""
        return self.log.read_bytes()

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """End it and return its exit code."""
        self.client.close()
        self.process.send_signal(sig)
        return self.process.wait(60)


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other side closes, also by reset."""
    received = b""
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionResetError:
        pass
    return received


@contextmanager
def unharmed(live: Live, outcome: tuple[str, str] | None) -> Iterator[None]:
    """The oracle: around any request, whatever it does to the service.

    Afterwards the process is the same and healthy, a good request is answered bit for bit as
    before, memory reservations and descriptors are back, and exactly the one expected outcome was
    counted (None: the request never reached the application).
    """
    golden = live.translate(good()).content
    # An answer is counted, and its place free, a moment after its last byte has arrived.
    before = live.at_rest()
    descriptors, threads = live.descriptors(), live.threads()
    yield
    assert live.process.poll() is None
    assert live.client.get("/livez", timeout=5).status_code == 200
    assert live.client.get("/readyz").status_code == 200
    after = live.at_rest()
    moved = {key: value - before.get(key, 0) for key, value in after.items()}
    assert {key: n for key, n in moved.items() if n} == ({} if outcome is None else {outcome: 1})
    assert live.translate(good()).content == golden
    wait_until(lambda: live.descriptors() <= descriptors)
    assert live.threads() <= threads


def wait_until(condition: Callable[[], object], seconds: float = 15) -> None:
    """Poll a condition of the other process; fails when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def assert_problem(answer: httpx.Response, status: int, code: str) -> None:
    """An answer is the one documented refusal, and gives nothing away."""
    assert (answer.status_code, answer.headers["content-type"]) == (
        status,
        "application/problem+json",
    )
    body = answer.json()
    assert (body["code"], body["status"], body["decision"]) == (code, status, "reprefill")
    assert body["type"] == f"urn:kv-translator:problem:{code}"
    assert body["request_id"] == answer.headers["x-request-id"]
    assert body["instance"].endswith(body["request_id"])
    assert {"title", "detail", "retryable"} <= body.keys()
    assert ("retry-after" in answer.headers) is body["retryable"]
    assert not LEAKS.search(answer.content)
