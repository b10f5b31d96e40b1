"""One outcome for every request to /translate, counted once and written in its log line."""

from collections.abc import MutableMapping
from types import TracebackType
from typing import Any, Self

from service.body import ClientGone
from service.metrics import Metrics
from service.problems import as_problem

_OVERLOAD = (429, 503, 507)


class Ledger:
    """As a context manager it counts the error that leaves the block; answers count themselves."""

    def __init__(self, metrics: Metrics, facts: MutableMapping[str, Any]) -> None:
        self._metrics, self._facts = metrics, facts
        self._closed = False
        self.pair = "unknown"

    def note(self, **facts: str | int | float | None) -> None:
        """Add to the log line of the request."""
        self._facts.update(facts)

    def close(self, outcome: str, reason: str = "") -> None:
        """Count the outcome; only the first one of a request counts."""
        if not self._closed:
            self._closed = True
            self._metrics.answered(self.pair, outcome, reason)
            self.note(pair=self.pair, outcome=outcome, reason=reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, ClientGone):
            self.close("disconnected", "client_disconnect")
        elif isinstance(error, Exception):
            problem = as_problem(error)
            status = problem.kind.status
            failed = "failed" if status >= 500 else "refused"
            self.close("overloaded" if status in _OVERLOAD else failed, problem.code)
