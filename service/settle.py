"""What is counted when an answer with tensors has ended."""

import time
from collections.abc import Mapping

import structlog

from service.call import Judged
from service.logs import described
from service.metrics import Metrics
from service.problems import as_problem
from service.stream import Cut, Running
from service.transport import Approved

log = structlog.get_logger("service.settle")


def settle(approved: Approved, cut: Cut | None) -> None:
    """Count what became of an answer that had begun; ``cut`` None: all of it was sent."""
    call = approved.judged.call
    _learn(approved)
    match cut:
        case None:
            _sent(approved)
        case "client":
            call.service.metrics.aborted.labels(cut).inc()
            call.ledger.close("disconnected", "client_disconnect")
        case "fault":
            call.service.metrics.aborted.labels(cut).inc()
            call.ledger.close("failed", _fault(approved.running))


def _learn(approved: Approved) -> None:
    """What was computed to its end has shown how long that takes, whoever has read it."""
    judged, running = approved.judged, approved.running
    work, future = running.work, running.future
    if future.done() and future.exception() is None and work.complete:
        judged.entry.timing.add(judged.ruling.tokens, sum(work.seconds.values()))


def _fault(running: Running) -> str:
    error = running.future.exception() if running.future.done() else None
    if error is None:
        return running.work.refusal or "internal"
    # Never exc_info: without our configuration structlog would print local variables.
    log.error("answer cut off", **described(error))
    return as_problem(error).code


def _sent(approved: Approved) -> None:
    judged, running = approved.judged, approved.running
    metrics, pair, ruling = judged.call.service.metrics, judged.entry.id, judged.ruling
    observe_stages(metrics, running.work.seconds)
    egress = time.perf_counter() - running.started_seconds
    metrics.stage_seconds.labels("egress").observe(egress)
    metrics.tokens.labels(pair).inc(ruling.tokens)
    metrics.bytes.labels("out").inc(running.work.target.nbytes)
    metrics.prefill_saved.labels(pair).inc(max(0.0, _prefill_seconds(judged) - egress))
    if ruling.kl_bound is not None:
        metrics.kl_bound.labels(pair).observe(ruling.kl_bound)
    if approved.shadow is not None:
        metrics.shadowed.labels(pair).inc()
    judged.call.ledger.close("translate")


def observe_stages(metrics: Metrics, seconds: Mapping[str, float]) -> None:
    """Count how long the device thread was in each of its stages."""
    for stage, spent in seconds.items():
        metrics.stage_seconds.labels(stage).observe(spent)


def _prefill_seconds(judged: Judged) -> float:
    """What the target would have paid for the rows that were answered."""
    request = judged.request
    if request.reprefill_ms is None:
        return 0.0
    return judged.ruling.tokens / request.tokens * request.reprefill_ms / 1000
