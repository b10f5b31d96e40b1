"""The processes of a deployment: two vLLM servers, the translator, the router. Real ones."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.vllm.waiting import PATIENCE_SECONDS, until

ROOT = Path(__file__).parents[2]
FAMILY = ROOT / "mappers" / "demo"
BLOCK_TOKENS = 32
MAX_TOKENS = 1280
WAITING = {"deadline_seconds": 240.0, "lease_seconds": 240.0}
"""Of the connectors: no test fails because the service takes long. A request may say less."""
LOG_LINES = 60
THRIFT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Process:
    """A server of the stack, in a process group of its own; its output goes to ``log``."""

    def __init__(self, command: Sequence[str], port: int, ready: str, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_SECONDS)
        self._command, self._ready, self._log = list(command), ready, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin; ``wait_ready`` waits for it."""
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen(
                self._command,
                stdout=sink,
                stderr=sink,
                env=os.environ | THRIFT,
                cwd=ROOT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Until it answers. Raises RuntimeError, with the end of its log, when it does not."""
        try:
            until(lambda: self._answers() or not self._runs(), "it answers")
        except TimeoutError as error:
            raise RuntimeError(self._how_it_started()) from error
        if not self._runs():
            raise RuntimeError(self._how_it_started())

    def signal(self, number: int) -> None:
        """To all of its processes, if it runs."""
        if self._process is not None and self._runs():
            os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """End it, if it still runs; nothing is asked of it any more."""
        self.http.close()
        if self._process is None or not self._runs():
            return
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self._process.wait()

    def kill(self) -> None:
        """As an out-of-memory killer does."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all its labels that contain these."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = self.http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        chosen = [line for line in found if all(label in line for label in wanted)]
        return sum(float(line.rpartition(" ")[2]) for line in chosen)

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _how_it_started(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"{self._log.stem} did not start: {self._command}", *lines])

    def _answers(self) -> bool:
        try:
            return self.http.get(self._ready, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


@dataclass
class Stack:
    """All of them. ``python`` runs the translator and the router, this interpreter the engines."""

    translator: Process
    small: Process
    large: Process
    router: Process

    @classmethod
    def of(cls, folder: Path, python: str) -> "Stack":
        """Not started yet."""
        port = free_port()
        command = [python, "-m", "service.cli", "serve", "--port", str(port)]
        command += ["--buffers", str(folder / "kvt.sock"), "--shadow-rate", "1"]
        command += ["--buffer-seconds", "3600"]
        translator = Process(command, port, "/readyz", folder / "translator.log")
        small = _engine("small", translator.url, folder)
        large = _engine("large", translator.url, folder)
        return cls(translator, small, large, _router(translator, small, large, folder, python))

    @property
    def processes(self) -> list[Process]:
        """In the order in which they depend on each other."""
        return [self.translator, self.small, self.large, self.router]


def _engine(name: str, service: str, folder: Path) -> Process:
    port = free_port()
    transfer = {
        "kv_connector": "BreakableConnector" if name == "large" else "KVTranslationConnector",
        "kv_connector_module_path": (
            "tests.vllm.breakable" if name == "large" else "service.vllm_connector"
        ),
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": service, "model": name} | WAITING,
    }
    options: dict[str, Any] = {
        "model": FAMILY / name,
        "served-model-name": name,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "block-size": BLOCK_TOKENS,
        "max-model-len": MAX_TOKENS,
        "max-num-seqs": 4,
        "kv-cache-memory-bytes": 128 << 20,
        "max-logprobs": 20,
        "kv-transfer-config": json.dumps(transfer),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += ["--enable-prompt-tokens-details"]
    for option, value in options.items():
        command += [f"--{option}", str(value)]
    return Process(command, port, "/health", folder / f"{name}.log")


def _router(
    translator: Process, small: Process, large: Process, folder: Path, python: str
) -> Process:
    example = ROOT / "deploy" / "examples" / "router"
    config = yaml.safe_load((example / "router.yaml").read_text())
    port = free_port()
    config |= {"service": translator.url, "port": port}
    config["engines"]["small"]["url"], config["engines"]["large"]["url"] = small.url, large.url
    (folder / "router.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    command = [python, str(example / "router.py"), str(folder / "router.yaml")]
    return Process(command, port, "/metrics", folder / "router.log")
