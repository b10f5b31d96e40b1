"""The connector's counters in vLLM's metrics: ``vllm:kvt_requests_total``, ``..._tokens_total``."""

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)


class KVTranslationStats(KVConnectorStats):  # type: ignore[misc]
    """``data``: requests and tokens by ``side outcome``."""

    data: dict[str, tuple[int, int]]

    def reset(self) -> None:
        """Forget them."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """The sums."""
        for kind, (requests, tokens) in other.data.items():
            mine = self.data.get(kind, (0, 0))
            self.data[kind] = (mine[0] + requests, mine[1] + tokens)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the engine's log."""
        return {kind: requests for kind, (requests, _) in self.data.items()}


class KVTranslationMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Labels: vLLM's own, ``side`` (export, load), ``outcome`` (exported, loaded, or why not)."""

    def __init__(
        self, config: Any, types: Any, labels: list[str], values: dict[int, list[object]]
    ) -> None:
        super().__init__(config, types, labels, values)
        own = [*labels, "side", "outcome"]
        self._requests = types[Counter](
            name="vllm:kvt_requests", documentation="Requests by outcome.", labelnames=own
        )
        self._tokens = types[Counter](
            name="vllm:kvt_tokens", documentation="Tokens copied.", labelnames=own
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted since the last time."""
        for kind, (requests, tokens) in transfer_stats_data.items():
            labels = (*self.per_engine_labelvalues[engine_idx], *kind.split(" "))
            self._requests.labels(*labels).inc(requests)
            self._tokens.labels(*labels).inc(tokens)
