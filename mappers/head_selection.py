"""Which single source heads a target layer should read, and how many.

Heads are chosen greedily (``mappers.forward``) from ``joint`` moments: one choice for each target
head, or one that all heads of a target layer share. The choice is a path, of which any number of
first steps may be taken. ``spread`` takes more of them where they are worth more, at the cost of
other layers and for as many operations in all. What counts there is not what a step explains of the
rows fitted, which the last of many steps owe to chance, but of others: the final prediction error
(Akaike 1970, "Statistical predictor identification").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mappers.forward import Path, System, forward, penalised, spread
from mappers.mapper import HeadReads, Heads, heads_of_a_token
from mappers.moments import Moments, PairMoments

Share = Literal["head", "layer"]
"""Who shares a choice of heads: all target heads of a layer, or nobody, each having its own."""
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


def head_paths(
    moments: PairMoments, longest: int, ridge: float, share: Share, *, lags: int | None = None
) -> HeadPaths:
    """Choices of ``longest`` heads, or of all where that is more than there are.

    ``lags``: the farthest that may be read; all that the moments have if None. Raises
    SingularSystem.
    """
    geometry = moments.geometry
    lags = moments.lags if lags is None else lags
    candidates = (lags + 1) * heads_of_a_token(geometry)
    inputs, groups = candidates * geometry.source_dim, geometry.target_heads
    gram = penalised(moments.keys.gram[0, :inputs, :inputs], geometry.source_dim, ridge)
    paths = []
    for layer in range(geometry.target_layers):
        for part in (moments.keys, moments.values):
            whole = unit_heads(moments, part, 0, layer)[:inputs]
            wanted = whole.chunk(groups if share == "head" else 1, dim=1)
            steps = min(longest, candidates)
            paths.append(tuple(forward([System(gram, heads)], steps) for heads in wanted))
    return HeadPaths(tuple(paths), groups, geometry.source_dim, moments.count)


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
