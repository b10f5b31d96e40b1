"""Isotonic regression: the best function that never falls (Barlow et al., 1972)."""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple


class Isotonic(NamedTuple):
    """A step function: ``levels[i]`` from ``starts[i]`` on, ``levels[0]`` before as well."""

    starts: tuple[float, ...]
    levels: tuple[float, ...]

    def __call__(self, x: float) -> float:
        """The level at ``x``; not a number where ``x`` is not."""
        return self.levels[max(0, bisect_right(self.starts, x) - 1)] if x == x else x


class _Block(NamedTuple):
    """Neighbours that share a level, since apart they would fall."""

    start: float
    total: float
    size: int

    @property
    def level(self) -> float:
        return self.total / self.size

    def joined(self, after: "_Block") -> "_Block":
        return _Block(self.start, self.total + after.total, self.size + after.size)


def isotonic(points: Iterable[tuple[float, float]]) -> Isotonic:
    """The non-decreasing function of x nearest to the y of points (x, y), in squares.

    By pooling adjacent violators, in n log n. Points with the same x share a level. Raises
    ValueError when there are no points.
    """
    blocks: list[_Block] = []
    for x, same in groupby(sorted(points), key=lambda point: point[0]):
        heights = [y for _, y in same]
        block = _Block(x, sum(heights), len(heights))
        while blocks and blocks[-1].level >= block.level:
            block = blocks.pop().joined(block)
        blocks.append(block)
    if not blocks:
        raise ValueError("a function of no points")
    return Isotonic(tuple(b.start for b in blocks), tuple(b.level for b in blocks))
