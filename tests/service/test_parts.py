"""The small parts: estimate, body, worker, request documents, settings, logs."""

import asyncio
import io
import json
import logging
import math
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as some
from pydantic import ValidationError

from service import logs
from service.body import Body, ClientGone
from service.errors import CODES, Problem
from service.estimate import RunningFit
from service.metrics import Metrics
from service.problems import as_problem, render
from service.schemas import read_request
from service.settings import Settings
from service.turns import Steps
from service.worker import Emission, Worker, WorkingAhead
from tests.service.pair import document

quick = settings(deadline=None, max_examples=40)


LENGTHS = some.integers(1, 1 << 24)
TIMES = some.floats(0, 1e6)


class TestRunningFit:
    def test_knows_nothing_at_first(self) -> None:
        assert RunningFit().seconds(10) is None

    def test_one_length_is_taken_as_proportional(self) -> None:
        fit = RunningFit()
        fit.add(100, 1.0)
        assert fit.seconds(200) == pytest.approx(2.0)

    @quick
    @given(some.floats(0, 1), some.floats(0, 0.01), LENGTHS)
    def test_finds_a_line(self, fixed: float, slope: float, tokens: int) -> None:
        fit = RunningFit()
        for seen in (32, 128, 512, 64):
            fit.add(seen, fixed + slope * seen)
        assert fit.seconds(tokens) == pytest.approx(fixed + slope * tokens, rel=1e-6, abs=1e-6)

    def test_follows_a_change(self) -> None:
        fit = RunningFit()
        for seconds in [10.0] * 100 + [1.0] * 200:
            fit.add(64, seconds)
        assert fit.seconds(64) == pytest.approx(1.0, rel=0.01)

    def test_many_short_ones_do_not_make_it_forget_long_ones(self) -> None:
        fit = RunningFit()
        fit.add(30_000, 60.0)
        for _ in range(10_000):
            fit.add(100, 5.0)
        assert fit.seconds(30_000) == 60.0
        assert fit.seconds(100) == pytest.approx(5.0)

    def test_a_short_one_that_was_slow_once_does_not_make_long_ones_cheap(self) -> None:
        fit = RunningFit()
        fit.add(32, 9.0)
        fit.add(1000, 1.0)
        assert fit.seconds(4000) == 1.0

    @pytest.mark.parametrize("slow", range(5))
    def test_a_few_that_were_slow_do_not_count(self, slow: int) -> None:
        fit = RunningFit()
        for seconds in [1.0] * 5 + [50.0] * slow:
            fit.add(64, seconds)
        assert fit.seconds(64) == 1.0

    def test_the_first_that_is_right_mends_a_first_that_was_slow(self) -> None:
        fit = RunningFit()
        fit.add(100, 50.0)
        fit.add(90, 0.9)
        assert fit.seconds(100) == pytest.approx(1.0)

    def test_refusals_make_it_count_less_until_one_is_put_to_the_test(self) -> None:
        fit = RunningFit()
        fit.add(64, 1.0)
        shares = []
        for _ in range(114):
            shares.append(fit.trust(64))
            fit.doubt(64)
        assert (shares[0], shares[34], shares[35]) == (1.0, 0.98**34, 0.98**35)
        assert shares[35] < 1 / 2 < shares[34]
        assert fit.trust(64) < 1 / 10 < shares[113]
        assert (fit.seconds(64), fit.trust(128), fit.trust(63)) == (1.0, 1.0, 1.0)
        fit.believe(64)
        assert fit.trust(64) == 1.0

    @quick
    @given(some.lists(some.tuples(LENGTHS, TIMES), min_size=1, max_size=20), LENGTHS)
    def test_is_always_a_time(self, seen: list[tuple[int, float]], tokens: int) -> None:
        fit = RunningFit()
        for one in seen:
            fit.add(*one)
        found = fit.seconds(tokens)
        assert found is not None
        assert 0 <= found < math.inf
        low, high = min(s for _, s in seen), max(s for _, s in seen)
        if min(t for t, _ in seen) <= tokens <= max(t for t, _ in seen) and len(seen) > 1:
            assert found >= low * (1 - 1e-9) / 2
            assert found <= 2 * high * (1 + 1e-9)

    @pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0])
    def test_what_is_no_time_teaches_nothing(self, seconds: float) -> None:
        fit = RunningFit()
        fit.add(10, seconds)
        assert fit.seconds(10) is None
        fit.add(10, 1.0)
        fit.add(10, seconds)
        assert fit.seconds(10) == 1.0


def body_of(*messages: Any, limit: int = 1000, grace: float = 5.0, rate: float = 1e6) -> Body:
    """A body that arrives as these byte strings; None: the client leaves, ``...``: it stalls."""
    waiting = list(messages)

    async def receive() -> dict[str, Any]:
        part = waiting.pop(0)
        if part is ...:
            await asyncio.Event().wait()
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(waiting)}

    return Body(receive, limit_bytes=limit, grace_seconds=grace, bytes_per_second=rate)


def done(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


class TestBody:
    @quick
    @given(some.lists(some.binary(max_size=20), min_size=1), some.data())
    def test_chunks_do_not_matter(self, parts: list[bytes], data: some.DataObject) -> None:
        whole = b"".join(parts)
        first = data.draw(some.integers(0, len(whole)))

        async def read() -> bytes:
            body, rest = body_of(*parts), bytearray(len(whole) - first)
            start = await body.exactly(first)
            await body.into(memoryview(rest))
            await body.end()
            return start + bytes(rest)

        assert done(read()) == whole

    def test_too_short(self) -> None:
        with pytest.raises(Problem, match="ended before"):
            done(body_of(b"abc").exactly(4))

    def test_too_long(self) -> None:
        body = body_of(b"abcd", b"")

        async def read() -> None:
            await body.exactly(3)
            await body.end()

        with pytest.raises(Problem, match="after the last tensor"):
            done(read())

    def test_over_the_limit(self) -> None:
        with pytest.raises(Problem, match="at most 5 bytes"):
            done(body_of(b"abc", b"def", b"", limit=5).exactly(6))
        with pytest.raises(Problem, match="at most 4 bytes"):
            done(body_of(b"abc", b"def", b"").rest(4))

    def test_a_client_that_leaves(self) -> None:
        with pytest.raises(ClientGone):
            done(body_of(b"abc", None).exactly(4))

    def test_a_client_that_stalls(self) -> None:
        with pytest.raises(Problem, match="too slowly"):
            done(body_of(b"abc", ..., grace=0.05).exactly(5))


def worker(**changes: Any) -> Worker:
    return Worker(Settings(**changes), Metrics(version="0"))


def at_once(work: Callable[[], object]) -> Steps:
    """Work of one step."""
    work()
    yield from ()


class TestWorker:
    def test_places_are_limited_and_come_back(self) -> None:
        busy = worker(queue_requests=1)
        with busy.place():
            with pytest.raises(Problem) as full, busy.place():
                pass
            assert full.value.code == "overloaded"
        with busy.place():
            assert busy.in_flight == 1
        assert busy.in_flight == 0

    def test_memory_is_limited_and_comes_back(self) -> None:
        small = worker(max_inflight_bytes=100)
        with small.memory(60):
            with pytest.raises(Problem) as full, small.memory(60):
                pass
            assert (full.value.code, small.in_flight_bytes) == ("out_of_memory", 60)
        with pytest.raises(Problem) as never, small.memory(101):
            pass
        assert (never.value.code, small.in_flight_bytes) == ("body_too_large", 0)

    def test_a_wait_that_is_too_long_is_refused_with_the_time_to_come_back(self) -> None:
        busy = worker(queue_seconds=2)
        with busy.turn(2.0) as one, busy.turn(2.0) as other:
            for turn in (one, other):  # one that is still being sent would make nobody wait
                with busy.turn(9.0):
                    pass
                busy.turns.begin(turn, nothing())
            with pytest.raises(Problem, match="at most 2 are allowed") as late, busy.turn(9.0):
                pass
            assert (late.value.code, late.value.retry_after_seconds) == ("overloaded", 2)
            with busy.turn(0.0):  # goes first, so it has no wait
                pass
        with busy.turn(9.0):  # alone anything may
            pass

    def test_one_after_the_other_on_one_thread(self) -> None:
        names: list[str] = []
        one = worker()

        async def run() -> None:
            async def submit(name: str) -> None:
                work = lambda: names.append(f"{name} {threading.current_thread().name}")  # noqa: E731
                with one.turn(1.0) as turn:
                    async with one.running(turn, at_once(work), Emission()) as future:
                        await future

            await asyncio.gather(*(submit(name) for name in "abc"))

        done(run())
        one.stop()
        assert [name.split()[0] for name in names] == ["a", "b", "c"]
        assert len({name.split()[1] for name in names}) == 1

    def test_leaving_waits_for_the_thread(self) -> None:
        ended = threading.Event()
        one = worker()

        async def run() -> None:
            begun, release = threading.Event(), threading.Event()

            def work() -> None:
                begun.set()
                release.wait(10)
                ended.set()

            with one.turn(2.0) as turn:
                async with one.running(turn, at_once(work), Emission()):
                    assert one.turns.left_seconds() == 2.0
                    await asyncio.to_thread(begun.wait, 10)
                    asyncio.get_running_loop().call_later(0.05, release.set)
                assert ended.is_set()

        done(run())
        one.stop()
        assert one.turns.left_seconds() == 0

    def test_leaving_waits_for_the_thread_also_where_who_awaited_it_was_cancelled(self) -> None:
        ended = threading.Event()
        one = worker()

        async def run() -> None:
            begun, release = threading.Event(), threading.Event()

            def work() -> None:
                begun.set()
                release.wait(10)
                ended.set()

            async def ask() -> None:
                with one.turn(2.0) as turn:
                    async with one.running(turn, at_once(work), Emission()) as future:
                        await future

            asking = asyncio.create_task(ask())
            await asyncio.to_thread(begun.wait, 10)
            for _ in range(3):
                asking.cancel()
                await asyncio.sleep(0.01)
            assert not asking.done()
            release.set()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert ended.is_set()

        done(run())
        one.stop()

    def test_who_waits_for_news_and_is_cancelled_leaves_nothing_behind(self) -> None:
        async def run() -> None:
            emission, other = Emission(), asyncio.get_running_loop().create_future()
            waiting = asyncio.create_task(emission.news(other))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert not other.cancelled()

        done(run())

    def test_what_begun_work_holds_goes_on_a_thread_of_its_own(self) -> None:
        """While the device is another's; the event loop has others to answer."""
        one, freed = worker(), list[str]()

        def holding() -> Steps:
            try:
                yield None
                yield lambda: False
            finally:
                freed.append(threading.current_thread().name)

        async def run() -> None:
            with one.turn(1.0) as turn:
                async with one.running(turn, holding(), Emission()):
                    while turn.ready is None:
                        await asyncio.sleep(0.001)

        done(run())
        one.stop()
        [name] = freed
        assert name not in ("MainThread", "kvt-device")

    def test_work_whose_client_has_left_never_starts_and_waits_for_nobody(self) -> None:
        one = worker()
        started: list[int] = []

        async def run() -> None:
            begun, hold = threading.Event(), threading.Event()
            busy = lambda: begun.set() or hold.wait(10)  # noqa: E731
            with one.turn(1.0) as first, one.turn(1.0) as second:
                async with one.running(first, at_once(busy), Emission()):
                    await asyncio.to_thread(begun.wait, 10)
                    async with one.running(second, at_once(lambda: started.append(1)), Emission()):
                        assert one.turns.waiting == 1
                    assert one.turns.waiting == 0
                    hold.set()

        done(run())
        one.stop()
        assert not started

    def test_memory_that_cannot_be_had_on_the_device_is_a_problem(self) -> None:
        one = worker()

        def work() -> None:
            raise MemoryError

        async def run() -> None:
            with one.turn(1.0) as turn:
                async with one.running(turn, at_once(work), Emission()) as future:
                    await future

        with pytest.raises(Problem, match="no memory"):
            done(run())
        one.stop()


def test_the_first_and_the_last_bytes_are_news_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.worker.NEWS_SECONDS", 60)

    async def run() -> list[int]:
        emission, seen = Emission(), []
        for ready, last in ((0, False), (10, False), (20, False), (30, True)):
            emission.advance(ready, last=last)
            await asyncio.sleep(0)
            seen.append(emission.ready_bytes)
        return seen

    assert asyncio.run(run()) == [0, 10, 10, 30]


def test_no_bytes_are_kept_from_who_waits() -> None:
    async def run() -> int:
        emission = Emission()
        for ready in range(1, 100):
            emission.advance(ready)
        async with asyncio.timeout(60):
            while emission.ready_bytes < 99:
                await emission.news()
        return emission.ready_bytes

    assert asyncio.run(run()) == 99


class TestDocuments:
    def test_round_trip(self) -> None:
        request = read_request(json.dumps(document(7)))
        again = read_request(request.model_dump_json(exclude_defaults=True))
        assert again == request

    @quick
    @given(some.recursive(some.none() | some.booleans() | some.floats() | some.text(), some.lists))
    def test_anything_else_is_a_problem(self, value: Any) -> None:
        with pytest.raises(Problem):
            read_request(json.dumps(value))

    @quick
    @given(some.text(max_size=60))
    def test_any_text(self, text: str) -> None:
        with pytest.raises(Problem) as problem:
            read_request(text)
        assert problem.value.kind.status in (400, 422)

    @quick
    @given(some.sampled_from(list(document(3))), some.integers() | some.text() | some.none())
    def test_one_bad_field(self, name: str, value: Any) -> None:
        said = json.dumps(document(3) | {name: value})
        try:
            request = read_request(said)
        except Problem as problem:
            assert problem.code == "bad_document"  # noqa: PT017
        else:
            assert getattr(request, name) == value


class TestProblems:
    @pytest.mark.parametrize("code", CODES)
    def test_every_code_renders(self, code: str) -> None:
        answer = render(Problem(code, "why"), "ab")
        body = json.loads(bytes(answer.body))
        assert (body["code"], body["status"]) == (code, answer.status_code)
        assert body["instance"] == "urn:kv-translator:request:ab"
        assert ("retry-after" in answer.headers) is body["retryable"]

    def test_unknown_errors_say_nothing(self) -> None:
        problem = as_problem(ValueError("/etc/passwd"))
        assert (problem.code, "passwd" in problem.detail) == ("internal", False)


class TestSettings:
    def test_order_is_arguments_environment_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "kvt.yaml"
        file.write_text("port: 1\nmax_kl: 0.1\nalpha: 0.2\n")
        monkeypatch.setenv("KVT_CONFIG", str(file))
        monkeypatch.setenv("KVT_PORT", "2")
        monkeypatch.setenv("KVT_MAX_KL", "0.3")
        found = Settings(port=3)
        assert (found.port, found.max_kl, found.alpha) == (3, 0.3, 0.2)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("max_kl", "nan"), ("port", 70_000), ("alpha", 1), ("nonsense", 1), ("admin_token", "x")],
    )
    def test_a_bad_value_names_its_key(self, name: str, value: Any) -> None:
        with pytest.raises(ValidationError, match=name):
            Settings(**{name: value})

    def test_the_token_is_not_shown(self) -> None:
        assert "sesame" not in repr(Settings(admin_token="sesame-open-sesame"))  # type: ignore[arg-type]


@pytest.fixture
def logged() -> Callable[[], list[dict[str, Any]]]:
    root = logging.getLogger()
    before = (root.handlers, root.level)
    logs.configure(Settings())
    stream = io.StringIO()
    root.handlers[0].stream = stream  # type: ignore[attr-defined]

    def lines() -> list[dict[str, Any]]:
        root.handlers, root.level = before
        structlog.reset_defaults()
        return [json.loads(line) for line in stream.getvalue().splitlines()]

    return lines


class TestLogs:
    def test_g6_a_hostile_value_stays_on_its_line(
        self, logged: Callable[[], list[dict[str, Any]]]
    ) -> None:
        structlog.get_logger("t").info("event", model="a\nb\x1b[31m")
        lines = logged()
        assert [line["model"] for line in lines] == ["a\nb\x1b[31m"]

    def test_an_exception_is_its_type_and_place(
        self, logged: Callable[[], list[dict[str, Any]]]
    ) -> None:
        try:
            raise ValueError("/secret")
        except ValueError as error:
            logging.getLogger("uvicorn.error").error("Exception in ASGI\n", exc_info=error)
        (line,) = logged()
        assert line["error"] == "ValueError"
        assert line["at"][-1].startswith("test_parts.py:")
        assert "/secret" not in json.dumps(line)


def nothing() -> Steps:
    yield None


def test_one_request_at_a_time_works_ahead() -> None:
    ahead, one, other = WorkingAhead(), object(), object()
    assert (ahead.take(one), ahead.take(other), ahead.take(one)) == (True, False, True)
    ahead.give_back(other)
    assert not ahead.take(other)
    ahead.give_back(one)
    assert ahead.take(other)
