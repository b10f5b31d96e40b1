"""Breakers at the moment of a scrape: they become half-open by the passing of time alone."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from service.guards import Guards
from service.store import Store

STATES = {"closed": 0, "half_open": 1, "open": 2}
LABELS = ["pair", "domain", "max_tokens"]


class BreakerCollector(Collector):
    """Three gauges per breaker that has samples; labels are mapper ids, measured domains, sizes."""

    def __init__(self, store: Store, guards: Guards) -> None:
        self._store, self._guards = store, guards

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One pass over all breakers."""
        state = GaugeMetricFamily(
            "kvt_breaker_state", "0 closed, 1 half-open, 2 open", labels=LABELS
        )
        evidence = GaugeMetricFamily(
            "kvt_breaker_e_value", "Evidence of too many violations", labels=LABELS
        )
        samples = GaugeMetricFamily(
            "kvt_breaker_samples", "KLs counted since it last opened or closed", labels=LABELS
        )
        for entry in self._store.entries:
            for breaker in self._guards.breakers(entry.id, entry.digest):
                labels = [entry.id, breaker.domain, str(breaker.max_tokens)]
                state.add_metric(labels, STATES[breaker.state])
                evidence.add_metric(labels, breaker.e_value)
                samples.add_metric(labels, breaker.samples)
        yield from (state, evidence, samples)
