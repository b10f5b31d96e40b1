"""The order of a request, from its first byte to its last; every step is a file of its own."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from starlette.responses import Response

from mappers.suffix import SuffixCheck
from service import answers, gate
from service.body import Body, ClientGone
from service.call import Call, Judged
from service.deadline import Deadline
from service.entry import Entry
from service.errors import Problem
from service.guards import Claim, Standing
from service.probing import Probing, check_probe, probe_side, queries_of
from service.schemas import Plan, ShadowRequest, TranslateRequest
from service.settle import learn, observe_stages
from service.side import Side
from service.state import Service
from service.stream import Running
from service.translation import Translation
from service.transport import Approved, Transport
from service.turns import Turn
from service.worker import Emission


async def translate(call: Call, open_: Callable[[Call], Awaitable[Transport]]) -> Response:
    """Answer ``POST /translate``; ``open_`` reads the request document.

    Raises ``Problem`` or an error of the library for what is refused, ``ClientGone`` when there is
    nobody to answer.
    """
    call.service.lifecycle.check_open()
    async with AsyncExitStack() as held:
        held.enter_context(call.service.worker.place())
        if _hopeless(call):
            return answers.too_late(call)
        transport = await open_(call)
        judged = _judge(call, transport.request)
        if judged.ruling.reason is not None:
            return answers.reprefill(judged, judged.ruling.reason)
        held.enter_context(call.service.store.using(judged.entry))
        claim = held.enter_context(_claim(judged))
        work = _reserve(judged, transport, held)
        turn = held.enter_context(_turn(judged))
        held.callback(learn, judged, work, turn)  # when its work has ended, however
        running = await _start(judged, turn, transport, work, held)
        call.ledger.note(**work.facts)
        judged = _ruled_again(judged, work)
        if work.refusal is not None:
            observe_stages(call.service.metrics, work.seconds)
            return answers.reprefill(judged, work.refusal)
        shadow = await call.service.guards.mark(claim, judged.ruling.max_kl)
        if _broken(judged, shadow):
            return answers.reprefill(judged, "breaker_open")
        claim.kl = judged.ruling.drift
        judged = _forecast(judged, work)
        approved = Approved(judged, running, claim, shadow, _give_tail(judged, claim))
        return await transport.answer(approved, held)


def plan(
    service: Service,
    request: TranslateRequest,
    client: str,
    deadline: Deadline,
    named_mapper: str | None = None,
) -> Plan:
    """Answer ``POST /translate/plan``: the same first steps, without the cache.

    A refusal is a doubt in the prediction here as well: who sends nothing after one would never
    have it put to the test.
    """
    service.lifecycle.check_open()
    entry = _identify_pair(service, request, named_mapper)
    standing, ruling = _cheap_gate(service, entry, request, client, deadline)
    source, target = _sides(entry, request, ruling.tokens or request.tokens)
    expected = ruling.expected_seconds
    return Plan(
        decision="translate" if ruling.reason is None else "reprefill",
        reason=ruling.reason,
        detail=ruling.detail,
        mapper=entry.id,
        digest=entry.digest or "",
        tokens=ruling.tokens,
        native_tail=ruling.native_tail,
        **answers.certified(ruling, standing.policy),
        expected_ms=None if expected is None else round(expected * 1000, 3),
        bytes_in=source.nbytes + (probe_side(target).nbytes if request.probe else 0),
        bytes_out=target.nbytes if ruling.tokens else 0,
    )


def _hopeless(call: Call) -> bool:
    """Whether what any request would have to wait for takes longer than this caller waits."""
    return not call.service.worker.turns.ahead_seconds(0.0) < call.deadline.left_seconds()


def _judge(call: Call, request: TranslateRequest) -> Judged:
    entry = _identify_pair(call.service, request, call.named_mapper)
    call.ledger.pair = entry.id
    standing, ruling = _cheap_gate(call.service, entry, request, call.client, call.deadline)
    call.ledger.note(tokens=request.tokens, native_tail=ruling.native_tail)
    return Judged(call, entry, request, standing, ruling)


def _identify_pair(service: Service, request: TranslateRequest, named: str | None) -> Entry:
    entry = service.store.find(request.source, request.target)
    if named not in (None, entry.id):
        raise Problem("pair_not_found", f"the mapper of this pair is {entry.id}, not the one named")
    check_probe(entry, request)
    mapper = entry.loaded.mapper
    limit = min(side.rope.max_position_embeddings for side in (mapper.source, mapper.target))
    last = request.start_position + request.tokens
    if last > limit:
        raise Problem("too_many_tokens", f"the models have {limit} positions, the prompt {last}")
    return entry


def _cheap_gate(
    service: Service,
    entry: Entry,
    request: TranslateRequest,
    client: str,
    deadline: Deadline,
) -> tuple[Standing, gate.Ruling]:
    with service.metrics.stage("gate"):
        standing = service.guards.standing(entry, request, client)
        ruling = gate.rule(
            entry,
            request,
            standing,
            allow_unproven=service.settings.allow_unproven,
            pending_seconds=service.worker.turns.ahead_seconds(_expected(entry, request.tokens)),
            left_seconds=deadline.left_seconds(),
            trust=entry.timing.trust(request.tokens),
        )
    _note_doubt(entry, request, ruling)
    return standing, ruling


def _note_doubt(entry: Entry, request: TranslateRequest, ruling: gate.Ruling) -> None:
    if ruling.doubtful:
        entry.timing.doubt(request.tokens)


def _expected(entry: Entry, tokens: int) -> float:
    """Seconds on the device, as far as they are known."""
    return entry.timing.seconds(tokens) or 0.0


def _turn(judged: Judged) -> contextlib.AbstractContextManager[Turn]:
    return judged.call.service.worker.turn(_expected(judged.entry, judged.ruling.tokens))


def _claim(judged: Judged) -> contextlib.AbstractContextManager[Claim]:
    """Take what the gate found to be free, before anyone else is asked about it."""
    call = judged.call
    return call.service.guards.claim(
        call.request_id, call.client, judged.request, judged.standing, judged.ruling.drift
    )


def _broken(judged: Judged, shadow: ShadowRequest | None) -> bool:
    """Whether the breaker speaks against the answer after all; asked when nothing is sent yet."""
    if judged.call.service.guards.opened_since(judged.standing):
        return True
    return shadow is None and judged.standing.phase == "half_open"


def _sides(entry: Entry, request: TranslateRequest, tokens: int) -> tuple[Side, Side]:
    mapper = entry.loaded.mapper
    return (
        Side.of(mapper.source, request.source, request, request.tokens),
        Side.of(mapper.target, request.target, request, tokens),
    )


def _reserve(judged: Judged, transport: Transport, held: AsyncExitStack) -> Translation:
    """Check the tensors against the declared geometry, then take the memory that it needs."""
    request, ruling = judged.request, judged.ruling
    # With a probe the native tail is not known yet: memory is taken for an answer without one.
    tokens = request.tokens if ruling.provisional else ruling.tokens
    source, target = _sides(judged.entry, request, tokens)
    probing = _probing(judged, target)
    sent = [source] if probing is None else [source, probing.side]
    space = transport.reserve(sent, target, held)
    domain = judged.standing.policy.evidence_domain(request.domain)
    loaded = judged.entry.loaded
    return Translation(loaded, source, target, space, request, domain, ruling.prefix, probing)


def _probing(judged: Judged, target: Side) -> Probing | None:
    if judged.request.probe is None:
        return None

    def rule(error: float) -> gate.Ruling:
        return gate.rule(
            judged.entry,
            judged.request,
            judged.standing,
            allow_unproven=judged.call.service.settings.allow_unproven,
            pending_seconds=0.0,  # it has its turn on the device already
            trust=judged.ruling.trust,
            probe_error=error,
        )

    return Probing(probe_side(target), queries_of(judged.entry), rule)


def _ruled_again(judged: Judged, work: Translation) -> Judged:
    """With the ruling that a probe has led to, if there was one."""
    if work.ruling is None:
        return judged
    judged.call.ledger.note(native_tail=work.ruling.native_tail)
    _note_doubt(judged.entry, judged.request, work.ruling)
    return replace(judged, ruling=work.ruling)


def _forecast(judged: Judged, work: Translation) -> Judged:
    """With the KL to be expected of a cache with this score."""
    policy, score = judged.standing.policy, work.facts.get("score")
    expected = gate.expected_kl(judged.entry, judged.request, policy, judged.ruling, score)
    return replace(judged, ruling=replace(judged.ruling, expected_kl=expected))


async def _start(
    judged: Judged, turn: Turn, transport: Transport, work: Translation, held: AsyncExitStack
) -> Running:
    """Queue the work and take the cache in, which goes on side by side; return when an answer may
    begin, or when the content gate has refused.

    Unless the gate has proven that no value can overflow, an answer begins only when all of it has
    been computed and seen: after the first byte there is no way to say re-prefill.
    """
    emission = Emission()
    worker = judged.call.service.worker
    steps = work.run(emission, lambda: _too_late(judged, turn, work), worker.working_ahead)
    device = worker.running(turn, steps, emission)
    future = await held.enter_async_context(device)
    await _ingest(judged.call, transport, work)
    started = time.perf_counter()
    gone = await held.enter_async_context(_watched(judged.call.body))
    while not (future.done() or (work.proven_finite and emission.ready_bytes)):
        if gone.done():
            raise ClientGone
        await emission.news(future, gone)
    if future.done():
        future.result()
    return Running(work, emission, future, gone, started)


async def _ingest(call: Call, transport: Transport, work: Translation) -> None:
    def arrived(nbytes: int) -> None:
        work.space.arrive(nbytes)
        call.service.worker.turns.nudge()

    with call.service.metrics.stage("ingest"):
        await transport.ingest(work.space, work.milestones_bytes, arrived)
    call.service.metrics.bytes.labels("in").inc(work.space.received.numel())


def _too_late(judged: Judged, turn: Turn, work: Translation) -> bool:
    """Whether the turn has come too late for what is left to do, whatever was predicted before."""
    request, ruling = judged.request, judged.ruling
    waited = work.space.complete_for_seconds()
    left = judged.call.deadline.left_seconds() + waited

    def late(share: float) -> bool:
        done_seconds = waited + share * turn.left_seconds
        return gate.comes_too_late(request, ruling.native_tail, done_seconds, left)

    if not late(ruling.trust):
        return False
    if not late(0.0):
        judged.entry.timing.doubt(request.tokens)
    return True


@contextlib.asynccontextmanager
async def _watched(body: Body) -> AsyncIterator[asyncio.Task[None]]:
    """A task that ends when the client goes away."""
    watcher = asyncio.create_task(body.gone())
    try:
        yield watcher
    finally:
        watcher.cancel()


def _give_tail(judged: Judged, claim: Claim) -> str | None:
    """The token with which the native tail's likelihood is posted, if anything can judge it."""
    return judged.call.service.guards.give_tail(claim, judged.entry.id, _tail_checks(judged))


def _tail_checks(judged: Judged) -> tuple[SuffixCheck, ...]:
    """What can judge the native tail of such an answer; of all domains where none was named."""
    request, ruling = judged.request, judged.ruling
    domain = judged.standing.policy.evidence_domain(request.domain)
    probe_tokens = 0 if request.probe is None else request.probe.tokens
    prefix_known = ruling.prefix is not None or probe_tokens > 0
    kind = (prefix_known, request.hops, probe_tokens), ruling.native_tail
    return tuple(
        check
        for (bucket, tail), check in judged.entry.loaded.suffix_checks.items()
        if (bucket[1:], tail) == kind and domain in (None, bucket.domain)
    )
