"""Budgets, leases and evictions, without any mapper; and all of it from many threads at once."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.errors import Problem
from service.residency import NeverFits, NoRoom, Residency, Resident, Tier

Left = list[tuple[str, Tier]]


class Shelf:
    """A residency with what has left it, and residents that are put in host and device memory."""

    def __init__(self, host: int | None = 100, device: int | None = 100, **options: object) -> None:
        self.left: Left = []
        limits: dict[Tier, int | None] = {"host": host, "device": device}
        self.residency = Residency(limits, **options)  # type: ignore[arg-type]

    def resident(self, name: str, *, pinned: bool = False) -> Resident:
        return Resident(name, lambda r, tier: self.left.append((r.name, tier)), pinned)

    def put(self, name: str, nbytes: int, *, pinned: bool = False, evict: bool = True) -> Resident:
        resident = self.resident(name, pinned=pinned)
        with (
            self.residency.room(resident, "host", nbytes, evict=evict),
            self.residency.room(resident, "device", nbytes, evict=evict),
        ):
            pass
        return resident


def test_the_least_recently_used_leaves_first() -> None:
    shelf = Shelf()
    a, _ = shelf.put("a", 40), shelf.put("b", 40)
    with shelf.residency.lease(a):
        pass
    shelf.put("c", 40)
    assert shelf.left == [("b", "device"), ("b", "host")]
    assert shelf.residency.used_bytes("host") == shelf.residency.used_bytes("device") == 80
    assert shelf.residency.evictions == {("b", "device"): 1, ("b", "host"): 1}


def test_what_has_just_come_back_does_not_leave_before_it_was_used() -> None:
    shelf = Shelf(host=1000, device=80)
    a = shelf.put("a", 40)
    shelf.put("b", 40)
    shelf.put("c", 40)
    with shelf.residency.room(a, "device", 40):
        pass
    shelf.put("d", 40)
    assert shelf.left == [("a", "device"), ("b", "device"), ("c", "device")]


def test_what_leaves_the_device_stays_in_host_memory() -> None:
    shelf = Shelf(host=1000, device=50)
    a = shelf.put("a", 40)
    shelf.put("b", 40)
    assert shelf.left == [("a", "device")]
    assert a.nbytes == {"host": 40}
    with pytest.raises(Problem) as caught, shelf.residency.lease(a):
        pass
    assert caught.value.code == "mapper_not_ready"


def test_what_is_leased_pinned_or_being_loaded_never_leaves() -> None:
    shelf = Shelf()
    a, _ = shelf.put("a", 30), shelf.put("b", 30, pinned=True)
    loading = shelf.resident("loading")
    with shelf.residency.room(loading, "host", 30), shelf.residency.lease(a):
        with pytest.raises(NoRoom, match="needs 30 bytes of host memory: 90 of 100 are in use"):
            shelf.put("c", 30)
        assert shelf.left == []
    shelf.put("c", 70)
    assert set(shelf.left) == {("loading", "host"), ("a", "device"), ("a", "host")}


def test_what_can_never_fit_makes_nobody_leave() -> None:
    shelf = Shelf()
    shelf.put("a", 60)
    with pytest.raises(NoRoom, match="the budget is 100"):
        shelf.put("b", 101)
    assert shelf.left == []


def test_a_preload_takes_what_is_free_and_no_more() -> None:
    shelf = Shelf()
    shelf.put("a", 60, evict=False)
    with pytest.raises(NoRoom):
        shelf.put("b", 60, evict=False)
    assert shelf.left == []
    assert shelf.residency.used_bytes("host") == 60


def test_a_load_that_fails_gives_its_room_back() -> None:
    shelf = Shelf()
    resident = shelf.resident("a")
    with pytest.raises(ValueError, match="broken"), shelf.residency.room(resident, "host", 60):
        raise ValueError("broken")
    assert shelf.residency.used_bytes("host") == 0
    assert shelf.put("b", 100).nbytes == {"host": 100, "device": 100}


def test_what_was_replaced_leaves_with_its_last_lease() -> None:
    shelf = Shelf()
    a = shelf.put("a", 40)
    with shelf.residency.lease(a), shelf.residency.lease(a):
        shelf.residency.replace(a)
        assert shelf.residency.used_bytes("host") == 40
    assert shelf.residency.used_bytes("host") == 0
    assert shelf.residency.evictions == {}
    shelf.residency.replace(a)


def test_what_has_left_host_memory_cannot_go_to_the_device() -> None:
    shelf = Shelf()
    gone = shelf.resident("gone")
    with pytest.raises(Problem) as caught, shelf.residency.room(gone, "device", 10):
        pass
    assert caught.value.code == "mapper_not_ready"
    assert shelf.residency.used_bytes("device") == 0


def test_the_real_size_counts_when_it_is_known() -> None:
    shelf = Shelf()
    a = shelf.put("a", 60)
    shelf.residency.settle(a, "device", 0)
    assert shelf.residency.used_bytes("device") == 0
    with shelf.residency.lease(a):
        pass


def test_other_processes_memory_is_left_alone() -> None:
    """The device's free memory falls with what we allocate, and with what others do."""
    others, reclaimed = [100], list[int]()

    def free() -> int:
        return 1000 - others[0] - shelf.residency.used_bytes("device")

    shelf = Shelf(
        host=None,
        device=None,
        free_bytes=free,
        reclaim=lambda: reclaimed.append(1),
        min_free_bytes=300,
    )
    shelf.put("a", 300)
    shelf.put("b", 300)
    assert shelf.left == []
    others[0] = 350
    shelf.put("c", 300)
    assert shelf.left == [("a", "device"), ("b", "device")]
    assert len(reclaimed) == 2
    others[0] = 800
    with pytest.raises(NoRoom, match="of which 300 are to stay free"):
        shelf.put("d", 10)


def test_nobody_waits_while_the_device_takes_memory_back() -> None:
    """Emptying torch's cache waits for the device; a request that takes its lease must not."""
    leased: list[str] = []

    def reclaim() -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(lease).result(60)

    def lease() -> None:
        with shelf.residency.lease(kept):
            leased.append(kept.name)

    shelf = Shelf(reclaim=reclaim)
    shelf.put("a", 40)
    kept = shelf.put("kept", 40)
    shelf.put("b", 40)
    assert set(leased) == {"kept"}
    assert shelf.left == [("a", "device"), ("a", "host")]


def test_what_would_fit_is_known_before_anyone_leaves() -> None:
    shelf = Shelf(host=1000)
    a, _ = shelf.put("a", 40), shelf.put("b", 40)
    shelf.residency.check("device", 100)
    with pytest.raises(NoRoom, match="80 of 100 are in use"):
        shelf.residency.check("device", 40, evict=False)
    with shelf.residency.lease(a):
        shelf.residency.check("device", 60)
        with pytest.raises(NoRoom, match="40 of 100 are in use") as caught:
            shelf.residency.check("device", 61)
        assert not isinstance(caught.value, NeverFits)
    with pytest.raises(NeverFits, match="the budget is 100"):
        shelf.residency.check("device", 101)
    assert shelf.left == []


def test_loads_side_by_side_cannot_overrun_a_budget_together() -> None:
    shelf, start = Shelf(host=1000, device=100), threading.Barrier(8)
    most: list[int] = []

    def load(name: str) -> bool:
        start.wait()
        resident = shelf.resident(name)
        try:
            with (
                shelf.residency.room(resident, "host", 40),
                shelf.residency.room(resident, "device", 40),
            ):
                most.append(shelf.residency.used_bytes("device"))
        except NoRoom:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        loaded = list(threads.map(load, "abcdefgh"))
    assert any(loaded)
    assert max(most) <= 80
    assert shelf.residency.used_bytes("device") <= 80


def test_threads_that_load_use_replace_and_evict_lose_no_byte() -> None:
    shelf = Shelf(host=300, device=200)
    residents = {name: shelf.put(name, 20) for name in "abcdefgh"}
    wrong: list[str] = []

    def use(resident: Resident) -> None:
        with shelf.residency.lease(resident):
            if "device" not in resident.nbytes:
                wrong.append(resident.name)

    def hammer(seed: int) -> None:
        for step in range(300):
            name = "abcdefgh"[(step * 7 + seed * 3) % 8]
            with contextlib.suppress(Problem):
                match (step + seed) % 3:
                    case 0:
                        residents[name] = shelf.put(name, 20)
                    case 1:
                        shelf.residency.replace(residents[name])
                    case _:
                        use(residents[name])

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(hammer, range(6)))
    assert wrong == []
    assert shelf.residency.used_bytes("host") <= 300
    assert shelf.residency.used_bytes("device") <= 200
    for resident in list(shelf.residency._residents):
        assert resident.leases == 0
        shelf.residency.replace(resident)
    assert shelf.residency.used_bytes("host") == shelf.residency.used_bytes("device") == 0
