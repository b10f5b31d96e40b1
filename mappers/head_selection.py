"""Which single source heads a target layer should read, and how many.

Heads are chosen greedily (``mappers.forward``) from ``joint`` moments: one choice for each target
head, or one that all heads of a target layer share. The choice is a path, of which any number of
first steps may be taken. ``spread`` takes more of them where they are worth more, at the cost of
other layers and for as many operations in all. What counts there is not what a step explains of the
rows fitted, which the last of many steps owe to chance, but of others: the final prediction error
(Akaike 1970, "Statistical predictor identification").
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mappers.forward import Path, Penalised, System, forward, penalised, spread
from mappers.mapper import HeadReads, Heads, heads_of_a_token
from mappers.moments import Moments, PairMoments

Share = Literal["head", "layer"]
"""Who shares a choice of heads: all target heads of a layer, or nobody, each having its own."""
POOL, POOLED_FROM = 4, 12
"""A target head that chooses m heads does so among so many times m, from this m on."""
ROWS_AN_INPUT = 8
"""Where reads are spread, no layer gets so many that there would be fewer."""


@dataclass(frozen=True, slots=True)
class HeadPaths:
    """For keys and values of each target layer (keys of layer 0, its values, keys of layer 1, ...)
    the choices of its heads, one each or one in all; from ``rows`` rows, ``source_dim`` inputs a
    read."""

    paths: tuple[tuple[Path, ...], ...]
    target_heads: int
    source_dim: int
    rows: int

    def reads(self, counts: Sequence[int]) -> tuple[HeadReads, ...]:
        """The first steps of all paths, per target layer; ``counts`` for each of ``paths``."""
        chosen = [_first(paths, count) for paths, count in zip(self.paths, counts, strict=True)]
        return tuple(HeadReads(*pair) for pair in zip(chosen[::2], chosen[1::2], strict=True))

    def explained(self, counts: Sequence[int]) -> Tensor:
        """R2 of what is read, mean over target heads, float64 ``[2 * L_t]``."""
        r2 = [gains[:count].sum() for gains, count in zip(self._gains(), counts, strict=True)]
        return torch.stack(r2) / self.target_heads

    def even(self, m: int) -> list[int]:
        """m reads for each."""
        return [m] * len(self.paths)

    def spread(self, m: int, worth: Tensor, *, times: int) -> list[int]:
        """m reads on average and up to ``times`` as many, each where it lowers the error that is
        expected on other rows most, in units of ``worth [2 * L_t]``; fewer where none would."""
        longest = min(times * m, max(m, self.rows // (ROWS_AN_INPUT * self.source_dim)))
        gains = [
            -self._expected(gains[:longest]).diff() * weight
            for gains, weight in zip(self._gains(), worth, strict=True)
        ]
        return spread(gains, m * len(gains))

    def _expected(self, gains: Tensor) -> Tensor:
        """The share of the variance that is expected to be left on other rows, after no step,
        after one, ...: ``[M + 1]``."""
        left = 1 - torch.cat([gains.new_zeros(1), gains.cumsum(0)]) / self.target_heads
        inputs = self.source_dim * torch.arange(len(left))
        return left * (self.rows + inputs) / (self.rows - inputs)

    def _gains(self) -> list[Tensor]:
        return [torch.stack([path.gains for path in paths]).sum(0) for paths in self.paths]


class HeadSearch:
    """Chooses on average m heads for the keys and for the values of every target layer.

    Where each target head has its own choice, and m is not small, it chooses among the first
    ``POOL`` times m of what its layer as a whole would read: of all heads the search would take as
    many times as long as there are target heads, and explain no more. ``lags``: the farthest that
    may be read; all that the ``joint`` moments have if None. What it finds raises SingularSystem
    where heads depend linearly on others and there is no ridge.
    """

    def __init__(
        self, moments: PairMoments, m: int, ridge: float, *, lags: int | None = None
    ) -> None:
        geometry = moments.geometry
        lags = moments.lags if lags is None else lags
        self._moments, self._m = moments, m
        self._candidates = (lags + 1) * heads_of_a_token(geometry)
        inputs = self._candidates * geometry.source_dim
        gram = moments.keys.gram[0, :inputs, :inputs]
        self._gram: Penalised = penalised(gram, geometry.source_dim, ridge)
        self._found: dict[int, Path] = {}

    def paths(self, share: Share) -> HeadPaths:
        """Choices of m heads."""
        geometry = self._moments.geometry
        places = range(2 * geometry.target_layers)
        paths = tuple(self._path(place, self._m, share) for place in places)
        return HeadPaths(paths, geometry.target_heads, geometry.source_dim, self._moments.count)

    def spread(
        self, paths: HeadPaths, share: Share, worth: Tensor, *, times: int
    ) -> tuple[HeadPaths, list[int]]:
        """``HeadPaths.spread``, with paths that are followed just as far as they are used.

        What a path gains beyond the reads that are worth taking decides nothing.
        """
        reach, counts = 1, paths.even(self._m)
        while reach < times:
            reach = min(2 * reach, times)
            found = tuple(
                self._path(place, reach * self._m, share) if count == len(own[0].blocks) else own
                for place, (own, count) in enumerate(zip(paths.paths, counts, strict=True))
            )
            paths = replace(paths, paths=found)
            counts = paths.spread(self._m, worth, times=reach)
        return paths, counts

    def _path(self, place: int, longest: int, share: Share) -> tuple[Path, ...]:
        steps = min(longest, self._candidates)
        if share == "layer":
            return (self._of_layer(place, steps),)
        gram, wanted, pool = self._gram, self._wanted(place), self._pool(place)
        if len(pool) < self._candidates:  # or all of a large matrix would be copied
            gram, wanted, steps = _only(gram, pool), wanted[pool], min(steps, len(pool))
        return tuple(
            _renumbered(forward([System(gram, own, steps)], steps), pool)
            for own in wanted.chunk(self._moments.geometry.target_heads, 2)
        )

    def _pool(self, place: int) -> list[int]:
        if self._m < POOLED_FROM:
            return list(range(self._candidates))
        return sorted(self._of_layer(place, min(POOL * self._m, self._candidates)).blocks)

    def _of_layer(self, place: int, steps: int) -> Path:
        """The choice that all heads of a layer share; the longest so far is kept."""
        found = self._found.get(place)
        if found is None or len(found.blocks) < steps:
            found = forward([System(self._gram, self._wanted(place), steps)], steps)
            self._found[place] = found
        return Path(found.blocks[:steps], found.gains[:steps])

    def _wanted(self, place: int) -> Tensor:
        """``unit_heads`` of keys or values of a layer, by candidate: ``[N, D, H_t * D_t]``."""
        layer, kind = divmod(place, 2)
        part = (self._moments.keys, self._moments.values)[kind]
        size = self._moments.geometry.source_dim
        wanted = unit_heads(self._moments, part, 0, layer)[: self._candidates * size]
        return wanted.view(self._candidates, size, -1)


def unit_heads(moments: PairMoments, part: Moments, group: int, layer: int) -> Tensor:
    """Cross products of a group's inputs with one target layer, ``[F, O]``, each of its heads
    scaled to a sum of squares of 1, so that what is explained of it is its R2."""
    outputs = slice(layer * moments.target_block, (layer + 1) * moments.target_block)
    squares = part.squares_y[group, outputs].view(-1, moments.geometry.target_dim).sum(1)
    # A head that never changes has no cross products either: any scale will do.
    scale = torch.where(squares > 0, squares, 1.0).rsqrt()
    return part.cross[group, :, outputs] * scale.repeat_interleave(moments.geometry.target_dim)


def _first(paths: Sequence[Path], steps: int) -> Heads:
    return tuple(tuple(sorted(path.blocks[:steps])) for path in paths)


def _only(of: Penalised, blocks: Sequence[int]) -> Penalised:
    count, size = of.gram.shape[:2]
    chosen = torch.tensor(blocks)
    columns = (chosen[:, None] * size + torch.arange(size)).flatten()
    # Rows and columns at once: whole rows are not copied for a few columns.
    gram = of.gram.view(count * size, -1)[columns[:, None], columns]
    return Penalised(gram.view(len(blocks), size, len(blocks), size), of.added[chosen])


def _renumbered(path: Path, blocks: Sequence[int]) -> Path:
    return Path(tuple(blocks[number] for number in path.blocks), path.gains)
