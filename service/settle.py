"""What is counted when an answer with tensors has ended.

And what is learned of its time, also where it never began or was cut off.
"""

import time
from collections.abc import Mapping

import structlog

from service.call import Judged
from service.logs import described
from service.metrics import Metrics
from service.problems import as_problem
from service.stream import Cut, Running
from service.translation import Translation
from service.transport import Approved
from service.turns import Turn

log = structlog.get_logger("service.settle")


def settle(approved: Approved, cut: Cut | None) -> None:
    """Count what became of an answer that had begun; ``cut`` None: all of it was sent."""
    call = approved.judged.call
    match cut:
        case None:
            _sent(approved)
        case "client":
            call.service.metrics.aborted.labels(cut).inc()
            call.ledger.close("disconnected", "client_disconnect")
        case "fault":
            call.service.metrics.aborted.labels(cut).inc()
            call.ledger.close("failed", _fault(approved.running))


def learn(judged: Judged, work: Translation, turn: Turn) -> None:
    """Of work that has ended: computed to its end, it has shown how long that takes, whoever has
    read it. Cut short, it has shown that it takes longer; where that is longer than the gate has
    counted on, the doubts were wrong, and callers that hang up are not let in one after another."""
    timing, seconds = judged.entry.timing, turn.spent_seconds
    if work.complete:
        timing.add(work.target.geometry.tokens, seconds)
    if work.complete or seconds > judged.ruling.trust * turn.expected_seconds:
        timing.believe(judged.request.tokens)


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
