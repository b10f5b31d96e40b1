"""Waiting for what other processes do: looking again and again, for long, as machines are busy."""

import time
from collections.abc import Callable

PATIENCE_SECONDS = 600


def until(holds: Callable[[], bool], what: str) -> None:
    """Come back once it holds. Raises TimeoutError, which says what did not happen."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE_SECONDS} seconds: {what}")
        time.sleep(0.05)
