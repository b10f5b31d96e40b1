"""``kvt serve`` as a process of its own, on a free port, for as long as a block lasts."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from service.client import Client, NotTranslated
from service.commands.exits import Code, Failure

START_SECONDS = 60.0
STOP_SECONDS = 20.0
_POLL_SECONDS = 0.05
_URL = re.compile(rb"listening on (http://\S+)")


class ServerProcess:
    """Started on entering and ready then; stopped by SIGTERM, as a supervisor would, on leaving.

    ``url`` is where it listens. Raises Failure (server) when it does not become ready.
    """

    def __init__(self, artifacts: Sequence[Path], *options: str) -> None:
        folders = [part for path in artifacts for part in ("--artifacts", str(path))]
        self._command = [
            *(sys.executable, "-m", "service.cli", "serve"),
            *("--host", "127.0.0.1", "--port", "0"),
            *folders,
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        """Of the process, while it runs."""
        if self._process is None:
            raise Failure(Code.SERVER, "the server has not been started")
        return self._process.pid

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not (self.url and self._ready()):
            if self._process is None or self._process.poll() is not None:
                raise Failure(Code.SERVER, f"the server did not start: {self._last_line()}")
            if time.monotonic() > deadline:
                late = f"the server was not ready in {START_SECONDS:g} seconds"
                raise Failure(Code.SERVER, f"{late}: {self._last_line()}")
            time.sleep(_POLL_SECONDS)
            found = _URL.search(self._said())
            self.url = found[1].decode() if found else ""

    def _ready(self) -> bool:
        try:
            with Client(self.url) as client:
                return client.health().status == "ok"
        except NotTranslated:
            return False

    def _said(self) -> bytes:
        if self._log is None:
            return b""
        self._log.seek(0)
        return self._log.read()

    def _last_line(self) -> str:
        lines = self._said().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._log is not None:
            self._log.close()
