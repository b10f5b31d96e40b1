"""Which source layers lie side by side in memory, so that one matrix product reads several.

A product over k times the inputs is faster than k products that add up, the more so the fewer
numbers a source layer gives to each. So each layer has a slot in a common memory from its first
reader to its last, and what a target layer reads is a few runs of adjacent slots: a single one
where neighbours read the same layers but for one, whose slot the next layer takes.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Slots:
    """The slot of every source layer that is read; ``count`` are in use at most."""

    of_source: dict[int, int]
    count: int

    @classmethod
    def of(cls, layers: Sequence[tuple[int, ...]]) -> "Slots":
        """For target layers that read these source layers, in turn."""
        last = {source: index for index, sources in enumerate(layers) for source in sources}
        taken: dict[int, int] = {}
        free: list[int] = []
        count = 0
        for index, sources in enumerate(layers):
            for source in sources:
                if source not in taken:
                    taken[source] = heapq.heappop(free) if free else count
                    count = max(count, taken[source] + 1)
            for source in sources:
                if last[source] == index:
                    heapq.heappush(free, taken[source])
        return cls(taken, count)

    def in_order(self, sources: Sequence[int]) -> tuple[int, ...]:
        """Source layers as they lie in memory."""
        return tuple(sorted(sources, key=self.of_source.__getitem__))

    def runs(self, sources: Sequence[int]) -> list[slice]:
        """The slots of these source layers, adjacent ones together."""
        slots = sorted(self.of_source[source] for source in sources)
        gaps = [index for index, (a, b) in enumerate(pairwise(slots), start=1) if b > a + 1]
        bounds = pairwise([0, *gaps, len(slots)])
        return [slice(slots[first], slots[stop - 1] + 1) for first, stop in bounds]
