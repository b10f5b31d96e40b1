"""Greedy forward selection of blocks of inputs for ridge regressions, from second moments alone.

The first block is the one that alone leaves the smallest error, each next the one that leaves the
smallest error beside those before it. After each choice the other blocks and the outputs are
projected off it (block Gram-Schmidt on the moments), so that a step costs one small factorisation a
candidate and nothing is solved twice. The error is that of the ridge regression itself: what counts
is how far its minimum, penalty included, goes down.

Legend: N candidate blocks, D inputs in a block, O outputs.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mappers.errors import SingularSystem


class Path(NamedTuple):
    """The chosen blocks in the order of their choice, and what each explained, float64 ``[M]``."""

    blocks: tuple[int, ...]
    gains: Tensor


class Penalised(NamedTuple):
    """A Gram matrix as a view ``[N, D, N, D]``, and what its blocks' diagonals count more, ``[N]``.

    Apart, because with the penalty in it the matrix would be in memory twice.
    """

    gram: Tensor
    added: Tensor


class System:
    """One regression during a selection; several that share their choice are chosen for together.

    cross: ``[N * D, O]``, with outputs in a unit in which their errors can be added up. ``most``:
    how many blocks can be taken.
    """

    def __init__(self, penalised: Penalised, cross: Tensor, most: int) -> None:
        self.gram, self.added = penalised
        blocks, size = self.gram.shape[:2]
        every = torch.arange(blocks)
        self.left = self.gram[every, :, every].clone()
        self.left.diagonal(dim1=1, dim2=2).add_(self.added[:, None])
        self.wanted = cross.reshape(blocks, size, -1).clone()
        # In one piece, so that a step is one large product with all rows before it. In 32 bits,
        # which is twice as fast: rounding is not projected off again, as sums would need it to be.
        self.basis = torch.empty(most * size, blocks * size, dtype=torch.float32)
        self.taken = 0
        self.factor, self.white = self.left, self.wanted

    def gains(self) -> Tensor:
        """By how much each block would reduce the sum of squares, ``[N]``."""
        self.factor, failed = torch.linalg.cholesky_ex(self.left)
        if bool(failed.any()):
            raise SingularSystem("some inputs are constant or depend linearly on others")
        self.white = torch.linalg.solve_triangular(self.factor, self.wanted, upper=False)
        return self.white.square().sum((1, 2))

    def take(self, block: int) -> None:
        """Project the other blocks and the outputs off a block; after ``gains``."""
        size = self.gram.shape[1]
        own = slice(block * size, (block + 1) * size)
        rows = self.gram[block].flatten(1).clone()
        rows[:, own].diagonal().add_(self.added[block])
        before = self.basis[: self.taken]
        rows -= before[:, own].T @ before
        rows = torch.linalg.solve_triangular(self.factor[block], rows, upper=False)
        self.basis[self.taken : self.taken + size] = rows
        self.taken += size
        columns = rows.view(size, -1, size).transpose(0, 1)
        self.left -= columns.mT @ columns
        self.wanted -= columns.mT @ self.white[block]
        # What is left of a block that was taken is its penalty's; it is out of the running.
        self.left[block] = torch.eye(size, dtype=rows.dtype)
        self.wanted[block] = 0.0


def forward(systems: Sequence[System], m: int) -> Path:
    """Choose ``m`` blocks; of those that are equally good the first. Uses the systems up.

    Raises SingularSystem where blocks depend linearly on others and there is no ridge.
    """
    chosen: list[int] = []
    gains = []
    for _ in range(m):
        explained = torch.stack([system.gains() for system in systems]).sum(0)
        explained[chosen] = -1.0
        best = int(explained.argmax())
        gains.append(explained[best])
        chosen.append(best)
        if len(chosen) < m:
            for system in systems:
                system.take(best)
    return Path(tuple(chosen), torch.stack(gains))


def spread(gains: Sequence[Tensor], steps: int) -> list[int]:
    """How many steps of each path to go, at least one of each and ``steps`` in all, or fewer where
    no further one gains anything.

    The steps go, one at a time, where the next one gains the most.
    """
    counts = [1] * len(gains)
    ahead = [(-float(path[1]), index) for index, path in enumerate(gains) if len(path) > 1]
    heapq.heapify(ahead)
    for _ in range(steps - len(counts)):
        if not ahead or ahead[0][0] >= 0:
            break
        _, index = heapq.heappop(ahead)
        counts[index] += 1
        if counts[index] < len(gains[index]):
            heapq.heappush(ahead, (-float(gains[index][counts[index]]), index))
    return counts


def penalised(gram: Tensor, block: int, ridge: float) -> Penalised:
    """``gram [N * D, N * D]`` with a penalty for each block of D inputs: ``ridge`` times the mean
    of the block's own diagonal."""
    means = gram.diagonal().view(-1, block).mean(1)
    return Penalised(gram.view(-1, block, gram.shape[0] // block, block), ridge * means)
