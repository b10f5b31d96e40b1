"""Leases: whose they are, what they may cost, and when they end; with a clock of our own."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from service.buffers import FETCH_SECONDS, LEASES_A_CLIENT, Buffers, Lease
from service.errors import Problem
from service.memfd import file_bytes
from service.metrics import Metrics
from service.settings import Settings

UID = 1000
ROOM = file_bytes(1)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def buffers(clock: Clock) -> Buffers:
    """Room for three small leases a client, four in all, of 60 seconds."""
    settings = Settings(
        buffers=Path("unused"),
        buffer_bytes=4 * ROOM,
        buffer_client_bytes=3 * ROOM,
        buffer_seconds=60,
    )
    return Buffers(settings, Metrics(version="test"), clock)


def fetched(buffers: Buffers, client: str = "a", nbytes: int = 1) -> Lease:
    lease = buffers.open(client, nbytes)
    asyncio.run(buffers.fetch(lease.id, UID))
    return lease


def refused(code: str, work: Callable[[], object]) -> Problem:
    with pytest.raises(Problem) as caught:
        work()
    assert caught.value.code == code
    return caught.value


def never(work: Awaitable[object]) -> Callable[[], object]:
    async def run() -> object:
        return await work

    return lambda: asyncio.run(run())


class TestBudgets:
    def test_a_client_has_its_share(self, buffers: Buffers) -> None:
        for _ in range(3):
            buffers.open("a", 1)
        problem = refused("buffer_budget", lambda: buffers.open("a", 1))
        assert problem.kind.status == 429
        assert problem.retry_after_seconds == FETCH_SECONDS
        buffers.open("b", 1)

    def test_all_clients_have_one_budget(self, buffers: Buffers) -> None:
        for _ in range(3):
            buffers.open("a", 1)
        buffers.open("b", 1)
        problem = refused("out_of_memory", lambda: buffers.open("b", 1))
        assert problem.kind.status == 507
        assert problem.retry_after_seconds == FETCH_SECONDS

    def test_what_nobody_may_ever_have(self, buffers: Buffers) -> None:
        assert refused("buffer_too_large", lambda: buffers.open("a", 3 * ROOM)).kind.status == 413
        refused("buffer_too_large", lambda: buffers.open("a", 1 << 40))

    def test_a_number_of_leases(self) -> None:
        many = Buffers(Settings(buffers=Path("unused")), Metrics(version="test"))
        for _ in range(LEASES_A_CLIENT):
            many.open("a", 1)
        refused("buffer_budget", lambda: many.open("a", 1))
        many.open("b", 1)

    def test_what_was_given_back_can_be_had_again(self, buffers: Buffers) -> None:
        lease = [fetched(buffers) for _ in range(3)][0]
        buffers.release(lease.id, "a")
        fetched(buffers)


class TestWhose:
    def test_another_clients_lease_is_none(self, buffers: Buffers) -> None:
        lease = fetched(buffers)
        for client, lease_id in (("b", lease.id), ("a", "0" * 32), ("b", "0" * 32)):
            find = partial(buffers.find, lease_id, client)
            release = partial(buffers.release, lease_id, client)
            said = {refused("buffer_not_found", use).detail for use in (find, release)}
            assert len(said) == 1
        assert buffers.find(lease.id, "a") is lease

    def test_the_first_user_to_fetch_it_is_the_only_one(self, buffers: Buffers) -> None:
        lease = fetched(buffers)
        assert asyncio.run(buffers.fetch(lease.id, UID)) is lease.memory
        refused("buffer_not_found", never(buffers.fetch(lease.id, UID + 1)))
        refused("buffer_not_found", never(buffers.fetch("0" * 32, UID)))

    def test_one_that_ends_while_it_is_fetched_again_hands_nothing_out(
        self, buffers: Buffers
    ) -> None:
        async def run() -> None:
            lease = buffers.open("a", 1)
            await buffers.fetch(lease.id, UID)
            async with lease.fetching:
                again = asyncio.create_task(buffers.fetch(lease.id, UID))
                await asyncio.sleep(0)
            buffers.release(lease.id, "a")
            # The next memory has the descriptor's number.
            await buffers.fetch(buffers.open("b", 1).id, UID)
            with pytest.raises(Problem) as caught:
                await again
            assert caught.value.code == "buffer_not_found"

        asyncio.run(run())

    def test_memory_is_zeros_and_never_anothers(self, buffers: Buffers) -> None:
        lease = fetched(buffers)
        lease.shared().data.fill_(7)
        buffers.release(lease.id, "a")
        assert fetched(buffers, "b").shared().data.tolist() == [0]


class TestTime:
    def test_a_lease_that_is_never_fetched_ends_soon(self, buffers: Buffers, clock: Clock) -> None:
        lease = buffers.open("a", 1)
        clock.now = FETCH_SECONDS - 1
        assert buffers.find(lease.id, "a").memory is None
        clock.now = FETCH_SECONDS
        refused("buffer_not_found", lambda: buffers.find(lease.id, "a"))
        refused("buffer_not_found", never(buffers.fetch(lease.id, UID)))

    def test_every_use_renews_it(self, buffers: Buffers, clock: Clock) -> None:
        lease = fetched(buffers)
        for _ in range(3):
            clock.now += 59
            buffers.find(lease.id, "a")
        clock.now += 59
        with buffers.reading(lease):
            pass
        clock.now += 59
        assert buffers.left_seconds(lease) == 1
        clock.now += 1
        refused("buffer_not_found", lambda: buffers.find(lease.id, "a"))

    @pytest.mark.parametrize("use", [Buffers.reading, Buffers.writing])
    def test_it_neither_ends_nor_goes_while_it_is_used(
        self, buffers: Buffers, clock: Clock, use: Callable[..., object]
    ) -> None:
        lease = fetched(buffers)
        with use(buffers, lease) as memory:  # type: ignore[attr-defined]
            clock.now += 1000
            buffers.sweep()
            problem = refused("buffer_in_use", lambda: buffers.release(lease.id, "a"))
            assert (problem.kind.status, problem.kind.retryable) == (409, True)
            memory.data.fill_(3)
        assert buffers.left_seconds(lease) == 60
        buffers.release(lease.id, "a")

    def test_memory_of_a_lease_that_ended_stays_with_who_looks_at_it(
        self, buffers: Buffers
    ) -> None:
        lease = fetched(buffers)
        view = lease.shared().data
        buffers.release(lease.id, "a")
        view.fill_(5)
        assert view.tolist() == [5]


class TestUse:
    def test_many_read_and_one_writes(self, buffers: Buffers) -> None:
        lease = fetched(buffers)
        with buffers.reading(lease), buffers.reading(lease):
            refused("buffer_in_use", buffers.writing(lease).__enter__)
        with buffers.writing(lease):
            refused("buffer_in_use", buffers.writing(lease).__enter__)
            refused("buffer_in_use", buffers.reading(lease).__enter__)
        assert not lease.in_use

    def test_a_fault_frees_it(self, buffers: Buffers) -> None:
        lease, other = fetched(buffers), fetched(buffers)
        with pytest.raises(ZeroDivisionError), buffers.writing(lease), buffers.reading(other):
            raise ZeroDivisionError
        assert not lease.in_use
        assert not other.in_use

    def test_without_memory_it_is_of_no_use(self, buffers: Buffers) -> None:
        lease = buffers.open("a", 1)
        refused("bad_buffer", buffers.reading(lease).__enter__)
        refused("bad_buffer", buffers.writing(lease).__enter__)


def test_memory_that_is_not_there_is_507(buffers: Buffers, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise OSError(28, "no space")

    lease = buffers.open("a", 1)
    monkeypatch.setattr("os.posix_fallocate", none_left)
    assert refused("out_of_memory", never(buffers.fetch(lease.id, UID))).kind.status == 507
    assert not lease.in_use
    monkeypatch.undo()
    asyncio.run(buffers.fetch(lease.id, UID))
