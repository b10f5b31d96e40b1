"""Which loaded mappers are where: memory in tiers with byte budgets, least recently used out first.

A resident is one loaded version of a mapper. What is on the device is in host memory as well, from
where it comes back without being read and verified again. A resident that is leased never leaves,
nor does a pinned one; one that was replaced leaves when its last lease ends. Bytes are promised
before they are allocated, so loads that run side by side cannot overrun a budget together.
"""

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from service.errors import Problem

Tier = Literal["host", "device"]


class NoRoom(Problem):
    """A tier does not hold it now, whatever may leave."""

    def __init__(self, tier: Tier, nbytes: int, why: str) -> None:
        super().__init__(
            "out_of_memory", f"the mapper needs {nbytes} bytes of {tier} memory: {why}"
        )


class NeverFits(NoRoom):
    """It is larger than the whole budget of a tier."""


@dataclass(eq=False, slots=True)
class Resident:
    """One loaded version of the mapper ``name``; ``left`` is told each tier that it leaves."""

    name: str
    left: Callable[["Resident", Tier], None]
    pinned: bool = False
    nbytes: dict[Tier, int] = field(default_factory=dict)
    leases: int = 0
    replaced: bool = False

    @property
    def idle(self) -> bool:
        """Whether it may be made to leave."""
        return not self.leases and not self.pinned


class Residency:
    """All residents. ``limits`` are bytes a tier, None: no budget.

    ``free_bytes`` says what the device has left whoever uses it (None: not known), of which
    ``min_free_bytes`` are left alone; ``reclaim`` gives it back what has left. Safe from any
    thread; nothing here waits for a load.
    """

    def __init__(
        self,
        limits: Mapping[Tier, int | None],
        *,
        free_bytes: Callable[[], int | None] = lambda: None,
        reclaim: Callable[[], None] = lambda: None,
        min_free_bytes: int = 0,
    ) -> None:
        self.limits = limits
        self._free_bytes, self._reclaim = free_bytes, reclaim
        self._min_free_bytes = min_free_bytes
        self._lock = threading.Lock()
        # The least recently used one first.
        self._residents: OrderedDict[Resident, None] = OrderedDict()
        self._promised: Counter[Tier] = Counter()
        self.evictions: Counter[tuple[str, Tier]] = Counter()

    def used_bytes(self, tier: Tier) -> int:
        """What residents hold there, and what they were promised."""
        return sum(resident.nbytes.get(tier, 0) for resident in list(self._residents))

    def check(self, tier: Tier, nbytes: int, *, evict: bool = True) -> None:
        """Raise NoRoom for what would not fit if all had left that may; nothing leaves yet."""
        with self._lock:
            may_leave = [r.nbytes.get(tier, 0) for r in self._residents if r.idle] if evict else []
            why = self._lacks(tier, nbytes, leaving=sum(may_leave))
        if why is not None:
            raise NoRoom(tier, nbytes, why)

    @contextlib.contextmanager
    def room(
        self, resident: Resident, tier: Tier, nbytes: int, *, evict: bool = True
    ) -> Iterator[None]:
        """Room for what the block allocates; given back if the block fails.

        Others leave for it, unless ``evict`` is False. Raises NoRoom, and Problem 503 when there is
        nothing in host memory that could go to the device.
        """
        while not self._take(resident, tier, nbytes, evict):
            self._reclaim()  # may wait for the device, so nobody waits for us meanwhile
        try:
            yield
        except BaseException:
            with self._lock:
                resident.nbytes.pop(tier, None)
            raise
        finally:
            with self._lock:
                self._promised[tier] -= nbytes
                self._end_lease(resident)

    def settle(self, resident: Resident, tier: Tier, nbytes: int) -> None:
        """What the resident really occupies, which is known when it is there."""
        with self._lock:
            resident.nbytes[tier] = nbytes

    @contextlib.contextmanager
    def lease(self, resident: Resident) -> Iterator[None]:
        """Keep it where it is. Raises Problem 503 when it has left the device before."""
        with self._lock:
            if "device" not in resident.nbytes:
                raise Problem("mapper_not_ready", "the mapper of this pair has just left")
            resident.leases += 1
            self._residents.move_to_end(resident)
        try:
            yield
        finally:
            with self._lock:
                self._end_lease(resident)

    def replace(self, resident: Resident) -> None:
        """Another version took its place, or it is to go: it leaves when nobody uses it."""
        with self._lock:
            resident.replaced = True
            if not resident.leases:
                self._leave(resident)

    def _take(self, resident: Resident, tier: Tier, nbytes: int, evict: bool) -> bool:
        """Promise it the room; or have one other leave, and say False."""
        with self._lock:
            if tier == "device" and "host" not in resident.nbytes:
                raise Problem("mapper_not_ready", "the mapper has just left host memory")
            why = self._lacks(tier, nbytes)
            if why is not None:
                self._evict(self._victim(tier, nbytes, why, evict), tier)
                return False
            resident.nbytes[tier] = nbytes
            self._residents[resident] = None
            self._residents.move_to_end(resident)  # whoever asked for it has yet to use it
            self._promised[tier] += nbytes
            resident.leases += 1
            return True

    def _victim(self, tier: Tier, nbytes: int, why: str, evict: bool) -> Resident:
        for resident in self._residents:
            if evict and resident.idle and resident.nbytes.get(tier):
                return resident
        raise NoRoom(tier, nbytes, why)

    def _lacks(self, tier: Tier, nbytes: int, leaving: int = 0) -> str | None:
        """Why there is no room, if ``leaving`` bytes were free; raises NeverFits."""
        limit, used = self.limits[tier], self.used_bytes(tier) - leaving
        if limit is not None and nbytes > limit:
            raise NeverFits(tier, nbytes, f"the budget is {limit}")
        if limit is not None and used + nbytes > limit:
            return f"{used} of {limit} are in use"
        free = self._free_bytes() if tier == "device" else None
        if free is None:
            return None
        if free + leaving - self._promised[tier] - nbytes < self._min_free_bytes:
            return f"the device has {free} left, of which {self._min_free_bytes} are to stay free"
        return None

    def _evict(self, resident: Resident, tier: Tier) -> None:
        lower: tuple[Tier, ...] = ("device", "host") if tier == "host" else ("device",)
        for leaving in lower:
            if resident.nbytes.pop(leaving, None) is not None:
                self.evictions[resident.name, leaving] += 1
                resident.left(resident, leaving)
        self._forget_empty(resident)

    def _end_lease(self, resident: Resident) -> None:
        resident.leases -= 1
        if resident.replaced and not resident.leases:
            self._leave(resident)
        self._forget_empty(resident)

    def _leave(self, resident: Resident) -> None:
        for tier in list(resident.nbytes):
            del resident.nbytes[tier]
            resident.left(resident, tier)
        self._forget_empty(resident)

    def _forget_empty(self, resident: Resident) -> None:
        if not resident.nbytes:
            self._residents.pop(resident, None)
