"""Where mappers are at the moment of a scrape, what they occupy, and what had to leave."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.residency import Tier
from service.store import Store

TIERS: tuple[Tier, ...] = ("host", "device")


class StoreCollector(Collector):
    """Labels are mapper ids and the two tiers."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """One pass over all mappers."""
        labels = ["pair", "tier"]
        resident = GaugeMetricFamily(
            "kvt_mapper_resident_bytes", "Memory of a loaded mapper", labels=labels
        )
        seconds = GaugeMetricFamily(
            "kvt_mapper_load_seconds", "What the last load took", labels=["pair"]
        )
        evictions = CounterMetricFamily(
            "kvt_mapper_evictions", "Times that it had to leave for another", labels=labels
        )
        for entry in list(self._store.entries):
            for tier in TIERS:
                resident.add_metric([entry.id, tier], entry.resident_bytes(tier))
                count = self._store.residency.evictions[entry.id, tier]
                evictions.add_metric([entry.id, tier], count)
            if entry.load_seconds is not None:
                seconds.add_metric([entry.id], entry.load_seconds)
        budget = GaugeMetricFamily(
            "kvt_mapper_memory_budget_bytes", "Most for all mappers", labels=["tier"]
        )
        for tier, limit in self._store.residency.limits.items():
            if limit is not None:
                budget.add_metric([tier], limit)
        yield from (resident, seconds, evictions, budget)
