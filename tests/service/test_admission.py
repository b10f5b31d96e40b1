"""What is let in, who goes first, and what is free again when somebody leaves: the real service,
its device held by a test, its time estimates told by one."""

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as some

from service.body_transport import BodyTransport
from service.deadline import Deadline
from service.errors import Problem
from service.metrics import Metrics
from service.settings import Settings
from service.state import Service
from service.translation import Translation
from service.turns import PATIENCE
from service.worker import Emission, Worker
from tests.service.asgi import Answer, Message, post
from tests.service.pair import good
from tests.service.reporting import BREAKS, Clock
from tests.service.sharing import fetched
from tests.service.test_faults import break_third, counted, hook, run, telling

TOKENS, ANSWERED = 32, 31
PREDICTED = 5.0


def service_of(app: FastAPI) -> Service:
    service: Service = app.state.service
    return service


def predict(app: FastAPI, **seconds_of: float) -> None:
    """Make the service expect so many ``t{tokens}`` seconds, and nothing that it has measured."""
    [entry] = service_of(app).store.entries
    entry.timing.__init__()  # type: ignore[misc]
    for name, seconds in (seconds_of or {f"t{ANSWERED}": PREDICTED}).items():
        entry.timing.add(int(name.removeprefix("t")), seconds)


@asynccontextmanager
async def busy(app: FastAPI) -> AsyncIterator[threading.Event]:
    """The device does nothing else until the event is set, or the block ends."""
    begun, release = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        hold = lambda: begun.set() or release.wait(30)  # noqa: E731
        held = pool.submit(service_of(app).worker.on_device, hold)
        await asyncio.to_thread(begun.wait, 30)
        try:
            yield release
        finally:
            release.set()
        await asyncio.wrap_future(held)


def slow_upload(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """So much of a deadline passes between a request's document and its tensors."""
    real = BodyTransport.ingest

    async def ingest(self: BodyTransport, *given: Any) -> None:
        self._call.deadline._ends_seconds -= seconds
        await real(self, *given)

    monkeypatch.setattr(BodyTransport, "ingest", ingest)


async def queued(app: FastAPI, count: int) -> None:
    """Until so many translations wait for the device."""
    async with asyncio.timeout(20):
        while service_of(app).worker.turns.waiting != count:
            await asyncio.sleep(0.001)


def nothing_held(service: Service) -> bool:
    worker = service.worker
    held = (worker.in_flight, worker.in_flight_bytes, worker.turns.waiting)
    return held == (0, 0, 0) and worker.turns.left_seconds() == 0


def metric(service: Service, name: str, **labels: str) -> float | None:
    return service.metrics.registry.get_sample_value(name, labels)


class TestDeadline:
    @pytest.mark.parametrize("value", ["", "soon", "-1", "nan", "inf", "1e3", "1,5", "9" * 10])
    def test_anything_but_milliseconds_is_refused(self, settings: Settings, value: str) -> None:
        answers = []

        async def test(app: FastAPI) -> None:
            answers.append(await post(app, good(), **{"kvt-deadline-ms": value}))

        assert counted(run(settings, test)) == {("refused", "bad_request"): 1}
        assert (answers[0].status, answers[0].parts_read) == (400, 0)

    def test_it_passes_with_the_clock(self) -> None:
        now = [100.0]
        deadline = Deadline.of_header(["850.5"])
        assert 0 < deadline.left_seconds() <= 0.8505
        deadline = Deadline(2.0, lambda: now[0])
        now[0] += 1.5
        assert deadline.left_seconds() == 0.5
        assert Deadline().left_seconds() == math.inf

    def test_a_queue_that_is_too_long_is_said_before_anything_is_read(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers: list[Answer] = []
        now = [0.0]

        async def test(app: FastAPI) -> None:
            predict(app)
            turns = service_of(app).worker.turns
            monkeypatch.setattr(turns, "_clock", lambda: now[0])
            async with busy(app):
                first = asyncio.create_task(post(app, good()))
                await queued(app, 1)
                now[0] += PATIENCE * PREDICTED  # from now on nobody goes before it
                for deadline in (PREDICTED * 1000, 0):
                    header = {"kvt-deadline-ms": str(int(deadline))}
                    answers.append(await post(app, good(), **header))
            assert (await first).headers["kvt-decision"] == "translate"

        service = run(settings, test)
        assert counted(service) == {("reprefill", "would_miss_deadline"): 2, ("translate", ""): 1}
        for answer in answers:
            assert (answer.status, answer.parts_read) == (200, 0)
            assert answer.headers["kvt-decision"] == "reprefill"
            assert answer.headers["kvt-reason"] == "would_miss_deadline"
            assert json.loads(answer.body)["mapper"] is None

    def test_a_translation_that_takes_too_long_is_said_before_the_tensors_are_read(
        self, settings: Settings
    ) -> None:
        request = good()
        parts = [request.header, request.data]

        async def test(app: FastAPI) -> None:
            predict(app)
            late = await post(app, request, parts=parts, **{"kvt-deadline-ms": "4999"})
            assert late.headers["kvt-reason"] == "would_miss_deadline"
            assert late.parts_read == 1
            assert late.headers["kvt-mapper"] == json.loads(late.body)["mapper"]
            soon = await post(app, request, parts=parts, **{"kvt-deadline-ms": "60000"})
            assert soon.headers["kvt-decision"] == "translate"

        run(settings, test)

    def test_what_its_turn_comes_too_late_for_is_not_computed(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers: list[Answer] = []

        async def test(app: FastAPI) -> None:
            async with busy(app):
                asked = asyncio.create_task(post(app, good(), **{"kvt-deadline-ms": "60000"}))
                await queued(app, 1)
                monkeypatch.setattr(Deadline, "left_seconds", lambda _: -1.0)
            answers.append(await asked)

        service = run(settings, test)
        assert answers[0].headers["kvt-reason"] == "would_miss_deadline"
        assert counted(service) == {("reprefill", "would_miss_deadline"): 1}
        assert not metric(service, "kvt_stage_seconds_count", stage="translate")

    @pytest.mark.parametrize("asking", ["deadline", "reprefill_ms", "plan"])
    def test_a_prediction_that_is_wrong_and_only_refuses_is_tried(
        self, settings: Settings, asking: str
    ) -> None:
        """One measurement was slow, and nobody asks without a limit: half of what is predicted."""
        request = good(reprefill_ms=PREDICTED * 500) if asking == "reprefill_ms" else good()
        header = {} if asking == "reprefill_ms" else {"kvt-deadline-ms": str(int(PREDICTED * 500))}

        async def refused(app: FastAPI) -> bool:
            if asking != "plan":
                return (await post(app, request, **header)).headers["kvt-decision"] == "reprefill"
            async with http(app) as client:
                said = request.document
                plan = (await client.post("/translate/plan", json=said, headers=header)).json()
            assert plan["expected_ms"] == PREDICTED * 1000
            return bool(plan["decision"] == "reprefill")

        async def test(app: FastAPI) -> None:
            predict(app)
            tries = 0
            while await refused(app):
                tries += 1
                assert tries < 100
            assert tries >= 30
            [entry] = service_of(app).store.entries
            if asking == "plan":  # which measures nothing
                assert not await refused(app)
                assert (await post(app, request, **header)).headers["kvt-decision"] == "translate"
            found = entry.timing.seconds(ANSWERED)
            assert found is not None
            assert found < PREDICTED / 2
            assert entry.timing.trust(TOKENS) == 1.0

        run(settings, test)

    @pytest.mark.parametrize(("share", "fewest", "most"), [(0.5, 36, 45), (1.01, 1, 5)])
    def test_a_wrong_prediction_is_tried_also_where_the_upload_takes_time(
        self,
        settings: Settings,
        monkeypatch: pytest.MonkeyPatch,
        share: float,
        fewest: int,
        most: int,
    ) -> None:
        """Which is known only when all of it has been read: the gate lets it in, the turn does not.
        The deadline is so much of what is predicted."""
        slow_upload(monkeypatch, 0.08)
        header = {"kvt-deadline-ms": str(int(share * PREDICTED * 1000))}

        async def test(app: FastAPI) -> None:
            predict(app)
            refused = 0
            while (await post(app, good(), **header)).headers["kvt-decision"] == "reprefill":
                refused += 1
                assert refused < most
            assert refused >= fewest
            [entry] = service_of(app).store.entries
            found = entry.timing.seconds(ANSWERED)
            assert found is not None
            assert found < share * PREDICTED / 2
            assert entry.timing.trust(TOKENS) == 1.0

        run(settings, test)

    @pytest.mark.parametrize("waiting", [0.0, 60.0])
    def test_a_turn_that_comes_too_late_is_a_doubt_where_the_prediction_made_it_so(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch, waiting: float
    ) -> None:
        slow_upload(monkeypatch, 1.5 + waiting)
        header = {"kvt-deadline-ms": str(int(PREDICTED * 1200))}

        async def test(app: FastAPI) -> None:
            predict(app)
            [entry] = service_of(app).store.entries
            answer = await post(app, good(), **header)
            assert answer.headers["kvt-reason"] == "would_miss_deadline"
            assert entry.timing.trust(TOKENS) == (1.0 if waiting else 0.98)

        run(settings, test)

    def test_a_trial_that_is_not_computed_ends_no_doubt(self, settings: Settings) -> None:
        header = {"kvt-deadline-ms": str(int(PREDICTED * 500))}
        spoiled = good()
        next(iter(spoiled.tensors.values()))[0, 0, 0] = math.nan

        async def test(app: FastAPI) -> None:
            predict(app)
            [entry] = service_of(app).store.entries
            for _ in range(40):
                entry.timing.doubt(TOKENS)
            trust = entry.timing.trust(TOKENS)
            ended = await post(app, good(), parts=[good().header], **header)
            refused = await post(app, spoiled, **header)
            assert (ended.status, refused.headers["kvt-reason"]) == (400, "non_finite")
            assert entry.timing.trust(TOKENS) == trust
            assert (await post(app, good(), **header)).headers["kvt-decision"] == "translate"
            assert entry.timing.trust(TOKENS) == 1.0

        run(settings, test)

    @pytest.mark.parametrize(("predicted", "trust"), [(1e-9, 1.0), (PREDICTED, 0.98)])
    def test_what_was_cut_short_after_what_was_counted_on_ends_the_doubts(
        self,
        settings: Settings,
        monkeypatch: pytest.MonkeyPatch,
        predicted: float,
        trust: float,
    ) -> None:
        """Callers that hang up at their deadline leave no measurement, and must not be let in one
        after the other."""

        async def test(app: FastAPI) -> None:
            predict(app, t31=predicted)
            [entry] = service_of(app).store.entries
            entry.timing.doubt(TOKENS)
            begun = threading.Event()
            hook(monkeypatch, break_third, begun)
            assert (await post(app, good(), on_send=telling(begun))).cut
            assert entry.timing.seconds(ANSWERED) == predicted
            assert entry.timing.trust(TOKENS) == trust

        run(settings, test)

    def test_one_that_was_right_goes_on_to_refuse(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        header = {"kvt-deadline-ms": str(int(PREDICTED * 500))}
        asked: list[bool] = []

        async def test(app: FastAPI) -> None:
            predict(app)
            [entry] = service_of(app).store.entries
            real = entry.timing.add
            monkeypatch.setattr(entry.timing, "add", lambda tokens, _: real(tokens, PREDICTED))
            for _ in range(3 * 36):
                answer = await post(app, good(), **header)
                asked.append(answer.headers["kvt-decision"] == "translate")

        run(settings, test)
        assert [number for number, tried in enumerate(asked) if tried] == [35, 71, 107]

    def test_what_was_computed_to_its_end_is_learned_from_whoever_reads_it(
        self, settings: Settings
    ) -> None:
        """A caller that is let through to be measured may leave when its deadline is over."""

        async def leave(message: Message) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        async def test(app: FastAPI) -> None:
            [entry] = service_of(app).store.entries
            entry.timing.__init__()  # type: ignore[misc]
            assert (await post(app, good(), on_send=leave)).aborted
            assert entry.timing.seconds(ANSWERED) is not None

        service = run(settings.model_copy(update={"body_grace_seconds": 0.5}), test)
        assert counted(service) == {("disconnected", "client_disconnect"): 1}

    @pytest.mark.parametrize("transport", ["body", "buffers"])
    def test_so_it_is_where_the_client_left_before_the_answer_began(
        self,
        settings: Settings,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        transport: str,
    ) -> None:
        cancelled = threading.Event()
        cancel = Emission.cancel
        monkeypatch.setattr(Emission, "cancel", lambda self: (cancel(self), cancelled.set()))
        monkeypatch.setattr(Translation, "_bounded", lambda *_: False)

        async def test(app: FastAPI) -> None:
            loop, leave = asyncio.get_running_loop(), asyncio.Event()

            def at_the_last(index: int, layer: Any) -> Any:
                if index == 3:
                    loop.call_soon_threadsafe(leave.set)
                    assert cancelled.wait(20)
                return layer

            hook(monkeypatch, at_the_last)
            [entry] = service_of(app).store.entries
            entry.timing.__init__()  # type: ignore[misc]
            if transport == "body":
                answer = await post(app, good(), leave=leave)
            else:
                kind = {"content-type": "application/json"}
                async with http(app) as client, leased(client) as (parts, _):
                    answer = await post(app, good(), leave=leave, parts=parts, **kind)
            assert answer.status == 499
            assert entry.timing.seconds(ANSWERED) is not None

        run(settings.model_copy(update={"buffers": tmp_path / "s"}), test)

    def test_what_was_cut_short_teaches_nothing(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def test(app: FastAPI) -> None:
            [entry] = service_of(app).store.entries
            entry.timing.__init__()  # type: ignore[misc]
            begun = threading.Event()
            hook(monkeypatch, break_third, begun)
            assert (await post(app, good(), on_send=telling(begun))).cut
            assert entry.timing.seconds(ANSWERED) is None

        run(settings, test)

    def test_a_plan_knows_it_too(self, settings: Settings) -> None:
        async def test(app: FastAPI) -> None:
            predict(app)
            found = []
            async with http(app) as client:
                for deadline in ("4999", "60000"):
                    header = {"KVT-Deadline-Ms": deadline}
                    answer = await client.post(
                        "/translate/plan", json=good().document, headers=header
                    )
                    found.append((answer.json()["reason"], answer.json()["expected_ms"]))
            assert found == [("would_miss_deadline", PREDICTED * 1000), (None, PREDICTED * 1000)]

        run(settings, test)


@asynccontextmanager
async def leased(client: httpx.AsyncClient) -> AsyncIterator[tuple[list[bytes], list[str]]]:
    """The body of a good request whose two sides are leases, and the paths of these."""
    document, leases, mapped = dict(good().document), [], []
    for side in ("source", "target"):
        lease = (await client.post("/buffers", json={"nbytes": 1 << 16})).json()
        document[side] = {**document[side], "buffer": lease["id"]}
        leases.append(f"/buffers/{lease['id']}")
        mapped.append(await asyncio.to_thread(fetched, lease))
    yield [json.dumps(document).encode()], leases


def http(app: FastAPI) -> httpx.AsyncClient:
    """A client of the application in this process."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://kvt")


class TestBounds:
    def test_a_wait_that_is_too_long_is_told_when_to_come_back(self, settings: Settings) -> None:
        refused: list[Answer] = []

        async def test(app: FastAPI) -> None:
            predict(app)
            async with busy(app):
                first = asyncio.create_task(post(app, good()))
                await queued(app, 1)
                assert metric(service_of(app), "kvt_queue_depth") == 1
                assert metric(service_of(app), "kvt_queue_predicted_seconds") == PREDICTED
                refused.append(await post(app, good(), parts=[good().header, good().data]))
            assert (await first).headers["kvt-decision"] == "translate"

        service = run(settings.model_copy(update={"queue_seconds": 2}), test)
        assert (refused[0].status, refused[0].parts_read) == (429, 1)
        assert json.loads(refused[0].body)["code"] == "overloaded"
        assert refused[0].headers["retry-after"] == "3"
        assert counted(service) == {("overloaded", "overloaded"): 1, ("translate", ""): 1}
        assert metric(service, "kvt_queue_refusals_total", bound="seconds") == 1
        assert metric(service, "kvt_queue_depth") == 0

    @pytest.mark.parametrize(
        ("limits", "bound", "status"),
        [
            ({"queue_requests": 1}, "requests", 429),
            ({"max_inflight_bytes": 40_000}, "bytes", 507),
        ],
    )
    def test_all_that_is_predicted_is_the_time_to_come_back(
        self, settings: Settings, limits: dict[str, int], bound: str, status: int
    ) -> None:
        refused: list[Answer] = []

        async def test(app: FastAPI) -> None:
            predict(app)
            async with busy(app):
                first = asyncio.create_task(post(app, good()))
                await queued(app, 1)
                refused.append(await post(app, good()))
            assert (await first).headers["kvt-decision"] == "translate"

        service = run(settings.model_copy(update=limits), test)
        assert (refused[0].status, refused[0].headers["retry-after"]) == (status, "5")
        assert metric(service, "kvt_queue_refusals_total", bound=bound) == 1

    @tried(deadline=None, max_examples=60)
    @given(
        some.lists(
            some.tuples(
                some.sampled_from(["place", "memory", "turn", "leave"]), some.integers(0, 9)
            )
        )
    )
    def test_no_bound_is_ever_broken_and_all_comes_back(self, steps: list[tuple[str, int]]) -> None:
        limits = {"queue_requests": 3, "max_inflight_bytes": 12, "queue_seconds": 12.0}
        worker = Worker(Settings(**limits), Metrics(version="0"))  # type: ignore[arg-type]
        held: list[Any] = []
        for what, size in steps:
            if what == "leave":
                if held:
                    held.pop(size % len(held)).__exit__(None, None, None)
                continue
            block: Any = worker.place() if what == "place" else getattr(worker, what)(size)
            with contextlib.suppress(Problem):
                block.__enter__()
                held.append(block)
            assert worker.in_flight <= 3
            assert worker.in_flight_bytes <= 12
            # The wait of who was let in last was in bounds, and it is itself no longer than 9.
            assert worker.turns.ahead_seconds(0.0) <= 12 + 9
        for block in held:
            block.__exit__(None, None, None)
        assert worker.in_flight == worker.in_flight_bytes == worker.turns.left_seconds() == 0


class TestOrder:
    def test_a_short_request_overtakes_a_long_one_and_both_have_their_bits(
        self, settings: Settings
    ) -> None:
        """Also one that has begun; in chunks of 8 tokens the long one stops often."""
        long, short = good(64), good(16, seed=1)
        alone: list[Answer] = []
        ended: list[str] = []

        def noting(name: str) -> Callable[[Message], Awaitable[None]]:
            async def note(message: Message) -> None:
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    ended.append(name)

            return note

        async def test(app: FastAPI) -> None:
            [entry] = service_of(app).store.entries
            entry.loaded.translator.chunk_tokens = 8
            alone.extend([await post(app, long), await post(app, short)])
            predict(app, t15=0.5, t63=50.0)
            async with busy(app) as release:
                first = asyncio.create_task(post(app, long, on_send=noting("long")))
                await queued(app, 1)
                second = asyncio.create_task(post(app, short, on_send=noting("short")))
                await queued(app, 2)
                release.set()
                together = [await first, await second]
            assert [a.body for a in together] == [a.body for a in alone]
            assert ended == ["short", "long"]

        run(settings, test)


class TestLeaving:
    """While the device is busy with somebody else."""

    def test_all_that_it_held_is_free_at_once(self, settings: Settings) -> None:
        async def test(app: FastAPI) -> None:
            predict(app)
            async with busy(app):
                leave = asyncio.Event()
                asked = asyncio.create_task(post(app, good(), leave=leave))
                await queued(app, 1)
                assert service_of(app).worker.in_flight_bytes > 0
                assert service_of(app).worker.turns.left_seconds() == PREDICTED
                leave.set()
                assert (await asked).status == 499
                assert nothing_held(service_of(app))

        assert counted(run(settings, test)) == {("disconnected", "client_disconnect"): 1}

    def test_its_leases_are_free_at_once(self, settings: Settings, tmp_path: Path) -> None:
        async def test(app: FastAPI) -> None:
            async with http(app) as client, leased(client) as (parts, leases), busy(app):
                leave, kind = asyncio.Event(), {"content-type": "application/json"}
                asked = asyncio.create_task(post(app, good(), leave=leave, parts=parts, **kind))
                await queued(app, 1)
                assert [(await client.delete(path)).status_code for path in leases] == [409, 409]
                leave.set()
                assert (await asked).status == 499
                assert nothing_held(service_of(app))
                assert [(await client.delete(path)).status_code for path in leases] == [204, 204]

        run(settings.model_copy(update={"buffers": tmp_path / "s"}), test)

    def test_a_place_of_a_half_open_breaker_is_free_again(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock(monkeypatch)
        impatient = {"shadow_rate": 1, "breaker_cool_down_seconds": 60, "breaker_probes": 1}

        async def test(app: FastAPI) -> None:
            async with http(app) as client:
                for _ in range(10):
                    answer = await post(app, good())
                    said = {"answer_id": answer.headers["kvt-answer-id"], "kl": BREAKS}
                    token = {"KVT-Feedback-Token": answer.headers["kvt-feedback-token"]}
                    told = await client.post("/feedback", json=said, headers=token)
                    if told.json()["breaker"] == "open":
                        break
            assert (await post(app, good())).headers["kvt-reason"] == "breaker_open"
            clock.now += 61
            async with busy(app):
                leave = asyncio.Event()
                asked = asyncio.create_task(post(app, good(), leave=leave))
                await queued(app, 1)
                assert (await post(app, good())).headers["kvt-reason"] == "breaker_open"
                leave.set()
                assert (await asked).status == 499
            assert (await post(app, good())).headers["kvt-decision"] == "translate"

        run(settings.model_copy(update=impatient), test)
