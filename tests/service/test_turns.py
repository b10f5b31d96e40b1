"""Whose turn it is: what holds for any requests in any order, on a clock that only work moves."""

import itertools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from service.turns import PATIENCE, Cancelled, Steps, Turn, Turns

quick = settings(deadline=None, max_examples=150)
TIMES = some.integers(0, 50).map(float)


@dataclass
class Job:
    """A request: when it comes, what is predicted, what its steps take, and whether it leaves.

    ``leaves_seconds`` None: it stays until it has its answer.
    """

    comes_seconds: float
    expected_seconds: float
    steps_seconds: list[float]
    leaves_seconds: float | None = None
    made: int = 0
    closed: bool = False
    turn: Turn | None = None


jobs = some.builds(
    Job,
    TIMES,
    TIMES,
    some.lists(TIMES, max_size=4),
    some.none() | TIMES,
)


@dataclass
class Device:
    """One thread's worth of device, played step by step."""

    jobs: list[Job]
    now: float = 0.0
    log: list[tuple[float, Job]] = field(default_factory=list)
    turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self.turns = Turns(lambda: self.now)

    def work(self, job: Job) -> Steps:
        try:
            for seconds in job.steps_seconds:
                self.log.append((self.now, job))
                self.now += seconds
                job.made += 1
                yield None
        finally:
            job.closed = True

    def play(self) -> None:
        """Let all come and leave at their times; what comes during a step is seen after it."""
        events = sorted(
            [(job.comes_seconds, 0, n) for n, job in enumerate(self.jobs)]
            + [
                (max(job.comes_seconds, job.leaves_seconds), 1, n)
                for n, job in enumerate(self.jobs)
                if job.leaves_seconds is not None
            ]
        )
        while events or self.turns.step():
            if events and events[0][0] <= self.now:
                _, leaves, number = events.pop(0)
                self.meet(self.jobs[number], bool(leaves))
            elif events and not self.turns.step():
                self.now = events[0][0]

    def meet(self, job: Job, leaves: bool) -> None:
        if not leaves:
            job.turn = self.turns.promise(job.expected_seconds)
            self.turns.begin(job.turn, self.work(job))
        elif job.turn is not None:
            self.turns.withdraw(job.turn)


def played(given_jobs: list[Job]) -> Device:
    device = Device(given_jobs)
    device.play()
    return device


@quick
@given(some.lists(jobs, max_size=8))
def test_all_that_stay_are_done_and_nothing_is_left(given_jobs: list[Job]) -> None:
    device = played(given_jobs)
    for job in given_jobs:
        assert job.turn is not None
        assert job.turn.ended.done()
        if job.leaves_seconds is None:
            assert job.made == len(job.steps_seconds)
            assert job.turn.ended.result() is None
        assert job.closed or not job.made
    assert device.turns.left_seconds() == device.turns.waiting == 0
    assert device.turns.ahead_seconds(math.inf) == 0
    assert not device.turns.step()


@quick
@given(some.lists(jobs, max_size=8))
def test_who_has_left_is_not_worked_for(given_jobs: list[Job]) -> None:
    device = played(given_jobs)
    for began, job in device.log:
        assert job.leaves_seconds is None or began <= max(job.comes_seconds, job.leaves_seconds)


@quick
@given(some.lists(jobs, max_size=8))
def test_the_first_that_is_due_goes_on(given_jobs: list[Job]) -> None:
    device = played(given_jobs)
    ended = {id(job): began for began, job in device.log}
    for began, job in device.log:
        for other in given_jobs:
            waits = other.leaves_seconds is None and other.comes_seconds <= began
            waits = waits and other.steps_seconds and ended[id(other)] > began
            if other is not job and waits and job.turn and other.turn:
                assert job.turn.due_seconds <= other.turn.due_seconds


@quick
@given(some.lists(jobs, max_size=8))
def test_a_long_one_is_overtaken_only_by_what_comes_soon_after_it(given_jobs: list[Job]) -> None:
    """So nobody starves: at most so much comes in that time, whatever comes afterwards."""
    device = played(given_jobs)
    for job in given_jobs:
        last = max((at for at, (_, done) in enumerate(device.log) if done is job), default=0)
        for _, other in device.log[:last]:
            if other is not job and job.turn and other.turn:
                soon = job.comes_seconds + PATIENCE * job.expected_seconds
                # It is noted when the step that is being made has ended.
                slack = max(itertools.chain(*(j.steps_seconds for j in given_jobs)), default=0)
                assert other.comes_seconds <= soon + slack


def test_a_stream_of_short_ones_does_not_starve_a_long_one() -> None:
    long = Job(0, 10, [1.0] * 10)
    short = [Job(float(at), 0.5, [1.0]) for at in range(1, 200)]
    device = played([long, *short])
    finished = max(began for began, job in device.log if job is long) + 1
    assert 10 < finished <= 10 + PATIENCE * 10 + 1


def test_short_ones_overtake_a_long_one_that_has_begun() -> None:
    long, short = Job(0, 100, [1.0] * 100), Job(3, 1, [1.0])
    device = played([long, short])
    assert [at for at, (_, job) in enumerate(device.log) if job is short] == [3]


@quick
@given(some.lists(TIMES, max_size=6), TIMES)
def test_the_predicted_wait_is_the_wait_when_predictions_are_right(
    before: list[float], expected: float
) -> None:
    device = Device([])
    for seconds in before:
        device.meet(Job(0, seconds, [seconds / 2, seconds / 2]), leaves=False)
    device.turns.step()
    wait, came = device.turns.ahead_seconds(expected), device.now
    mine = Job(came, expected, [expected])
    device.meet(mine, leaves=False)
    while device.turns.step():
        pass
    began = next(at for at, job in device.log if job is mine)
    assert began - came == pytest.approx(wait)


def test_what_cannot_go_on_yet_lets_others_go_first() -> None:
    turns, made, arrived = Turns(lambda: 0.0), [], threading.Event()

    def waiting() -> Steps:
        made.append("asked")
        yield arrived.is_set
        made.append("went on")

    def other() -> Steps:
        made.append("other")
        yield from ()

    first, second = turns.promise(1.0), turns.promise(2.0)
    turns.begin(first, waiting())
    turns.begin(second, other())
    while turns.step():
        pass
    assert made == ["asked", "other"]
    arrived.set()
    while turns.step():
        pass
    assert made == ["asked", "other", "went on"]


def test_a_nudge_wakes_the_thread_that_serves() -> None:
    turns, arrived = Turns(), threading.Event()

    def waiting() -> Steps:
        yield arrived.is_set

    turn = turns.promise(1.0)
    turns.begin(turn, waiting())
    thread = threading.Thread(target=turns.serve)
    thread.start()
    arrived.set()
    turns.nudge()
    assert turn.ended.result(20) is None
    turns.close()
    thread.join(20)
    assert not thread.is_alive()


def test_who_leaves_while_a_step_is_made_gets_no_other() -> None:
    turns, made = Turns(lambda: 0.0), []

    def leaving() -> Steps:
        for number in range(3):
            made.append(number)
            turns.withdraw(turn)
            assert not turn.ended.done(), "what the step uses is still needed"
            yield None

    turn = turns.promise(1.0)
    turns.begin(turn, leaving())
    assert turns.step()
    assert isinstance(turn.ended.exception(), Cancelled)
    assert not turns.step()
    assert made == [0]


def test_what_was_spent_is_not_expected_again() -> None:
    device = Device([])
    device.meet(Job(0, 10, [4.0, 9.0, 1.0]), leaves=False)
    left = [device.turns.left_seconds() for _ in range(3) if device.turns.step()]
    assert left == [6.0, 0.0, 0.0]


def test_an_error_is_told_to_whoever_waits_and_nobody_else() -> None:
    turns = Turns(lambda: 0.0)

    def broken() -> Steps:
        yield None
        raise ValueError("why")

    def whole() -> Steps:
        yield None

    bad, good = turns.promise(1.0), turns.promise(1.0)
    turns.begin(bad, broken())
    turns.begin(good, whole())
    while turns.step():
        pass
    assert isinstance(bad.ended.exception(), ValueError)
    assert good.ended.exception() is None


def test_closing_ends_what_is_left_and_takes_no_more() -> None:
    turns = Turns(lambda: 0.0)

    def whole() -> Iterator[None]:
        yield None

    begun, promised = turns.promise(1.0), turns.promise(1.0)
    turns.begin(begun, whole())
    turns.close()
    late = turns.promise(1.0)
    turns.begin(late, whole())
    assert isinstance(begun.ended.exception(), Cancelled)
    assert isinstance(promised.ended.exception(), Cancelled)
    assert isinstance(late.ended.exception(), Cancelled)
    assert turns.left_seconds() == 0


def test_what_is_still_being_sent_makes_nobody_wait() -> None:
    turns, arrived = Turns(lambda: 0.0), threading.Event()

    def sent_slowly() -> Steps:
        yield arrived.is_set
        yield None

    turns.begin(turns.promise(20.0), sent_slowly())
    assert turns.ahead_seconds(30.0) == 20.0  # it has yet to say what it waits for
    turns.step()
    assert turns.ahead_seconds(30.0) == 0.0
    arrived.set()
    assert turns.ahead_seconds(30.0) == 20.0


@pytest.mark.parametrize("end", ["withdraw", "close"])
def test_work_that_never_began_is_no_success(end: str) -> None:
    turns = Turns(lambda: 0.0)
    turn = turns.promise(1.0)
    turns.withdraw(turn) if end == "withdraw" else turns.close()
    with pytest.raises(Cancelled):
        turn.ended.result(timeout=0)


class TestCleaningUp:
    """What work lets go of when it is cut short may take long, call back, or fail."""

    @staticmethod
    def begun(turns: Turns, steps: Steps) -> Turn:
        turn = turns.promise(1.0)
        turns.begin(turn, steps)
        assert turns.step()
        return turn

    @pytest.mark.parametrize("end", ["withdraw", "close", "in its step"])
    def test_nobody_else_waits_for_it(self, end: str) -> None:
        turns, asked = Turns(lambda: 0.0), list[bool]()

        def holding() -> Steps:
            try:
                while True:
                    yield None
                    turns.withdraw(turn)
            finally:
                other = threading.Thread(target=turns.nudge)
                other.start()
                other.join(20)
                asked.append(other.is_alive())

        turn = self.begun(turns, holding())
        {"withdraw": lambda: turns.withdraw(turn), "close": turns.close}.get(end, turns.step)()
        assert asked == [False]
        assert isinstance(turn.ended.exception(timeout=0), Cancelled)

    def test_it_is_done_once_and_before_its_end_is_told(self) -> None:
        turns, told = Turns(lambda: 0.0), list[str]()

        def holding() -> Steps:
            try:
                yield None
            finally:
                turns.withdraw(turn)
                told.append("free")

        turn = self.begun(turns, holding())
        turn.ended.add_done_callback(lambda _: told.append("ended"))
        turns.withdraw(turn)
        turns.close()
        assert told == ["free", "ended"]

    @pytest.mark.parametrize("end", ["withdraw", "close", "in its step"])
    def test_its_error_is_told_to_whoever_waits_and_stops_nobody(self, end: str) -> None:
        turns = Turns(lambda: 0.0)

        def failing() -> Steps:
            try:
                while True:
                    yield None
                    turns.withdraw(turn)
            finally:
                raise ValueError("why")

        turn = self.begun(turns, failing())
        later = turns.promise(2.0)
        {"withdraw": lambda: turns.withdraw(turn), "close": turns.close}.get(end, turns.step)()
        assert isinstance(turn.ended.exception(timeout=0), ValueError)
        turns.withdraw(later)
        assert isinstance(later.ended.exception(timeout=0), Cancelled)

    def test_who_waits_cannot_cancel_the_end_itself(self) -> None:
        turns = Turns(lambda: 0.0)

        def whole() -> Steps:
            yield from ()

        turn = turns.promise(1.0)
        turns.begin(turn, whole())
        assert not turn.ended.cancel()
        assert turns.step()
        assert turn.ended.result(timeout=0) is None
