"""Leases: whose they are, what they may cost, and when they end; with a clock of our own."""

import asyncio
import ctypes
import gc
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from service.allocators import HostAllocator, Memory
from service.buffer_budgets import LEASES_A_CLIENT
from service.buffers import FETCH_SECONDS, Buffers
from service.device import Cpu
from service.errors import Problem
from service.lease import Lease
from service.memfd import DESCRIPTORS, attach, file_bytes
from service.settings import Settings
from tests.service.sharing import books

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
    return books(settings, clock)


def fetched(buffers: Buffers, client: str = "a", nbytes: int = 1) -> Lease:
    lease = opened(buffers, client, nbytes)
    asyncio.run(buffers.fetch(lease.id, UID))
    return lease


def opened(buffers: Buffers, client: str = "a", nbytes: int = 1) -> Lease:
    return asyncio.run(buffers.open(client, nbytes))


def release(buffers: Buffers, lease: Lease, client: str = "a") -> None:
    asyncio.run(buffers.release(lease.id, client))


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
            opened(buffers, "a", 1)
        problem = refused("buffer_budget", lambda: opened(buffers, "a", 1))
        assert problem.kind.status == 429
        assert problem.retry_after_seconds == FETCH_SECONDS
        opened(buffers, "b", 1)

    def test_all_clients_have_one_budget(self, buffers: Buffers) -> None:
        for _ in range(3):
            opened(buffers, "a", 1)
        opened(buffers, "b", 1)
        problem = refused("out_of_memory", lambda: opened(buffers, "b", 1))
        assert problem.kind.status == 507
        assert problem.retry_after_seconds == FETCH_SECONDS

    def test_what_nobody_may_ever_have(self, buffers: Buffers) -> None:
        assert (
            refused("buffer_too_large", lambda: opened(buffers, "a", 3 * ROOM)).kind.status == 413
        )
        refused("buffer_too_large", lambda: opened(buffers, "a", 1 << 40))

    def test_a_number_of_leases(self) -> None:
        many = books(Settings(buffers=Path("unused")))
        for _ in range(LEASES_A_CLIENT):
            opened(many, "a", 1)
        refused("buffer_budget", lambda: opened(many, "a", 1))
        opened(many, "b", 1)

    def test_half_of_the_descriptors(
        self, buffers: Buffers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("resource.getrlimit", lambda _: (8, 8))
        for client in ("a", "b"):
            fetched(buffers, client)
        assert refused("out_of_memory", lambda: opened(buffers, "c")).retry_after_seconds == 60

    def test_descriptors_are_as_many_as_is_said(self, buffers: Buffers) -> None:
        before, lease = len(os.listdir("/proc/self/fd")), fetched(buffers)
        assert len(os.listdir("/proc/self/fd")) - before == DESCRIPTORS
        release(buffers, lease)
        assert len(os.listdir("/proc/self/fd")) <= before + 1  # the view's own

    def test_what_was_given_back_can_be_had_again(self, buffers: Buffers) -> None:
        lease = [fetched(buffers) for _ in range(3)][0]
        release(buffers, lease)
        fetched(buffers)


class TestWhose:
    def test_another_clients_lease_is_none(self, buffers: Buffers) -> None:
        lease = fetched(buffers)
        for client, lease_id in (("b", lease.id), ("a", "0" * 32), ("b", "0" * 32)):
            find = partial(buffers.find, lease_id, client)
            give_back = never(buffers.release(lease_id, client))
            said = {refused("buffer_not_found", use).detail for use in (find, give_back)}
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
            lease = await buffers.open("a", 1)
            await buffers.fetch(lease.id, UID)
            async with lease.fetching:
                again = asyncio.create_task(buffers.fetch(lease.id, UID))
                await asyncio.sleep(0)
            await buffers.release(lease.id, "a")
            # The next memory has the descriptor's number.
            await buffers.fetch((await buffers.open("b", 1)).id, UID)
            with pytest.raises(Problem) as caught:
                await again
            assert caught.value.code == "buffer_not_found"

        asyncio.run(run())

    def test_memory_is_zeros_and_never_anothers(self, buffers: Buffers) -> None:
        lease = fetched(buffers)
        lease.shared().data.fill_(7)
        release(buffers, lease)
        assert fetched(buffers, "b").shared().data.tolist() == [0]


class TestTime:
    def test_a_lease_that_is_never_fetched_ends_soon(self, buffers: Buffers, clock: Clock) -> None:
        lease = opened(buffers, "a", 1)
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
            asyncio.run(buffers.sweep())
            problem = refused("buffer_in_use", lambda: release(buffers, lease))
            assert (problem.kind.status, problem.kind.retryable) == (409, True)
            memory.data.fill_(3)
        assert buffers.left_seconds(lease) == 60
        release(buffers, lease)


class Registering(Cpu):
    """A device that host memory is registered with; it remembers what that held at the end."""

    def __init__(self) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.unpinned: list[int] = []

    def pin(self, address: int, nbytes: int) -> None:
        self.pinned.append((address, nbytes))

    def unpin(self, address: int) -> None:
        self.unpinned.append(ctypes.c_ubyte.from_address(address).value)


class TestEnded:
    """What a client has mapped nobody can take away; it counts until the client lets go."""

    def test_it_stays_and_counts(self, buffers: Buffers) -> None:
        lease = fetched(buffers, nbytes=2 * ROOM)
        client = attach(lease.shared().handle(), 2 * ROOM)
        client.close()
        client.data.fill_(5)
        release(buffers, lease)
        assert set(client.data.tolist()) == {5}
        assert refused("buffer_budget", lambda: opened(buffers)).retry_after_seconds == 1
        opened(buffers, "b")
        assert refused("out_of_memory", lambda: opened(buffers, "b")).retry_after_seconds == 10
        del client
        opened(buffers, "b")

    def test_one_that_expired_counts_likewise(self, buffers: Buffers, clock: Clock) -> None:
        lease = fetched(buffers, nbytes=2 * ROOM)
        client = attach(lease.shared().handle(), 2 * ROOM)
        client.close()
        clock.now = 1000
        refused("buffer_budget", lambda: opened(buffers))
        del client
        opened(buffers)

    def test_what_nobody_holds_is_freed_at_once_whoever_of_us_still_looks(
        self, buffers: Buffers
    ) -> None:
        lease = fetched(buffers)
        watched, view = os.dup(lease.shared().descriptor), lease.shared().data  # type: ignore[attr-defined]
        try:
            assert os.fstat(watched).st_blocks > 0
            release(buffers, lease)
            assert os.fstat(watched).st_blocks == 0
        finally:
            os.close(watched)
        assert view.tolist() == [0]

    def test_the_event_loop_neither_allocates_nor_frees(
        self, buffers: Buffers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads: dict[str, threading.Thread] = {}
        for name in ("allocate", "free"):
            original = getattr(HostAllocator, name)

            def noted(*given: object, name: str = name, original: Any = original) -> object:
                threads[name] = threading.current_thread()
                return original(*given)

            monkeypatch.setattr(HostAllocator, name, noted)
        release(buffers, fetched(buffers))
        assert threads.keys() == {"allocate", "free"}
        assert threading.current_thread() not in threads.values()

    def test_whoever_stops_waiting_stops_no_freeing(
        self, buffers: Buffers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease, freed, go = fetched(buffers, nbytes=2 * ROOM), list[object](), threading.Event()
        original = HostAllocator.free

        def slow(self: HostAllocator, memory: Memory) -> None:
            assert go.wait(60)
            freed.append(memory)
            original(self, memory)

        monkeypatch.setattr(HostAllocator, "free", slow)

        async def run() -> None:
            giving = asyncio.create_task(buffers.release(lease.id, "a"))
            await asyncio.sleep(0.01)
            giving.cancel()
            await asyncio.wait([giving])
            asking = asyncio.create_task(buffers.open("a", 2 * ROOM - 4096))
            await asyncio.sleep(0.01)
            assert not asking.done()
            go.set()
            await asking

        asyncio.run(run())
        assert len(freed) == 1

    def test_it_is_registered_with_the_device_until_it_is_freed(self, clock: Clock) -> None:
        device = Registering()
        registering = books(Settings(buffers=Path("unused")), clock, device)
        lease = fetched(registering)
        lease.shared().data.fill_(7)
        assert device.pinned == [(lease.shared().data.data_ptr(), 1)]
        assert device.unpinned == []
        release(registering, lease)
        assert device.unpinned == [7]  # while the pages were there

    def test_memory_that_cannot_be_registered_is_507(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError("CUDA error 2")

        gc.collect()  # what other tests have left
        before, device = len(os.listdir("/proc/self/fd")), Registering()
        monkeypatch.setattr(device, "pin", full)
        registering = books(Settings(buffers=Path("unused")), clock, device)
        lease = opened(registering)
        refused("out_of_memory", never(registering.fetch(lease.id, UID)))
        gc.collect()  # the error's frames
        assert len(os.listdir("/proc/self/fd")) == before


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
        lease = opened(buffers, "a", 1)
        refused("bad_buffer", buffers.reading(lease).__enter__)
        refused("bad_buffer", buffers.writing(lease).__enter__)


def test_memory_that_is_not_there_is_507(buffers: Buffers, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise OSError(28, "no space")

    lease = opened(buffers, "a", 1)
    monkeypatch.setattr("os.posix_fallocate", none_left)
    assert refused("out_of_memory", never(buffers.fetch(lease.id, UID))).kind.status == 507
    assert not lease.in_use
    monkeypatch.undo()
    asyncio.run(buffers.fetch(lease.id, UID))
