"""Prometheus metrics, in a registry made for each application. All labels are bounded."""

import contextlib
import platform
import time
from collections.abc import Iterator

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

OUTCOMES = ("translate", "reprefill", "refused", "overloaded", "failed", "disconnected")
STAGES = ("gate", "ingest", "queue", "content_gate", "translate", "egress")
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_KL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """Every metric of the service. ``pair`` is a mapper id that we loaded, or ``unknown``."""

    def __init__(self, *, version: str) -> None:
        self.registry = registry = CollectorRegistry()
        self.translations = Counter(
            "kvt_translations",
            "Answers to /translate; the reason is a code or one of the closed list",
            ["pair", "outcome", "reason"],
            registry=registry,
        )
        self.stage_seconds = Histogram(
            "kvt_stage_seconds", "Time in a stage", ["stage"], buckets=_SECONDS, registry=registry
        )
        self.tokens = Counter(
            "kvt_tokens_translated", "Rows of target KV answered", ["pair"], registry=registry
        )
        self.bytes = Counter(
            "kvt_bytes", "Bytes of KV read and answered", ["direction"], registry=registry
        )
        self.kl_bound = Histogram(
            "kvt_kl_bound_nats",
            "Certified KL of translated answers",
            ["pair"],
            buckets=_KL,
            registry=registry,
        )
        self.prefill_saved = Counter(
            "kvt_prefill_seconds_saved",
            "reprefill_ms of the callers less our time",
            ["pair"],
            registry=registry,
        )
        self.aborted = Counter(
            "kvt_answers_aborted",
            "Answers cut off after their header",
            ["reason"],
            registry=registry,
        )
        self.shadowed = Counter(
            "kvt_shadow_requested",
            "Answers whose KL the caller was asked to measure",
            ["pair"],
            registry=registry,
        )
        self.feedback = Counter(
            "kvt_feedback",
            "Measured KLs that callers posted: good, violation, or the code of a refusal",
            ["pair", "outcome"],
            registry=registry,
        )
        self.suffixes = Counter(
            "kvt_suffix",
            "Answers whose native tail's likelihood was posted: keep or reprefill",
            ["pair", "decision"],
            registry=registry,
        )
        self.in_flight = Gauge("kvt_in_flight", "Requests that hold a place", registry=registry)
        self.in_flight_bytes = Gauge(
            "kvt_in_flight_bytes", "Memory of requests in flight", registry=registry
        )
        self.buffer_leases = Gauge("kvt_buffer_leases", "Leases of buffers", registry=registry)
        self.buffer_bytes = Gauge(
            "kvt_buffer_bytes", "Memory of all leases, fetched or not", registry=registry
        )
        self.buffer_ended_bytes = Gauge(
            "kvt_buffer_ended_bytes",
            "Memory of leases that are over, which a client still maps",
            registry=registry,
        )
        self.queue_depth = Gauge(
            "kvt_queue_depth", "Translations that wait for the device", registry=registry
        )
        self.queue_seconds = Gauge(
            "kvt_queue_predicted_seconds",
            "Predicted time until all translations in flight are done",
            registry=registry,
        )
        self.queue_refusals = Counter(
            "kvt_queue_refusals",
            "Requests that found no room: requests, bytes, or seconds of waiting",
            ["bound"],
            registry=registry,
        )
        Info("kvt_build", "What is running", registry=registry).info(
            {"version": version, "python": platform.python_version(), "torch": torch.__version__}
        )

    @contextlib.contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        """Measure the block as a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stage_seconds.labels(stage).observe(time.perf_counter() - started)

    def answered(self, pair: str, outcome: str, reason: str = "") -> None:
        """Count the one outcome of one request."""
        self.translations.labels(pair, outcome, reason).inc()
