"""Forward selection against fits of every candidate by least squares on the rows themselves."""

import itertools

import pytest
import torch
from torch import Tensor

from mappers.errors import SingularSystem
from mappers.forward import System, forward, penalised, spread

ROWS, BLOCKS, WIDTH = 200, 5, 3


def rows(seed: int, outputs: int = 2) -> tuple[Tensor, Tensor]:
    """Correlated inputs of very different scales and outputs of all of them, centred."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, BLOCKS * WIDTH, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(BLOCKS * WIDTH, BLOCKS * WIDTH, generator=generator, dtype=torch.float64)
    x = x * torch.logspace(-3, 3, BLOCKS, dtype=torch.float64).repeat_interleave(WIDTH)
    noise = torch.randn(ROWS, outputs, generator=generator, dtype=torch.float64)
    mixing = torch.randn(BLOCKS * WIDTH, outputs, generator=generator, dtype=torch.float64)
    y = (x / x.std(0)) @ mixing + 3 * noise
    return x - x.mean(0), y - y.mean(0)


def minimum(x: Tensor, y: Tensor, blocks: tuple[int, ...], ridge: float) -> float:
    """What the ridge regression on these blocks minimises, at its minimum."""
    columns = torch.cat([torch.arange(b * WIDTH, (b + 1) * WIDTH) for b in blocks])
    chosen = x[:, columns]
    scale = chosen.square().sum(0).view(-1, WIDTH).mean(1).repeat_interleave(WIDTH)
    padded = torch.cat([chosen, (ridge * scale).sqrt().diag()])
    wanted = torch.cat([y, torch.zeros(len(columns), y.shape[1], dtype=torch.float64)])
    residual = wanted - padded @ torch.linalg.lstsq(padded, wanted).solution
    return float(residual.square().sum())


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 0.3])
def test_each_step_takes_what_lowers_the_minimum_most(ridge: float) -> None:
    systems, data = [], [rows(1), rows(2)]
    for x, y in data:
        systems.append(System(penalised(x.T @ x, WIDTH, ridge), x.T @ y, 4))
    path = forward(systems, 4)
    chosen: tuple[int, ...] = ()
    before = sum(float(y.square().sum()) for _, y in data)
    for block, gain in zip(path.blocks, path.gains, strict=True):
        after = {
            b: sum(minimum(x, y, (*chosen, b), ridge) for x, y in data)
            for b in set(range(BLOCKS)) - set(chosen)
        }
        assert block == min(after, key=lambda b: after[b])
        assert float(gain) == pytest.approx(before - after[block], rel=1e-6)
        before, chosen = after[block], (*chosen, block)


def test_blocks_that_matter_only_together_are_found_one_after_the_other() -> None:
    """y = a - b with a and b nearly equal: each alone says little, and a decoy says more."""
    generator = torch.Generator().manual_seed(3)
    common, a, b, noise = torch.randn(4, 500, generator=generator, dtype=torch.float64)
    first, second = 3 * common + a, 3 * common + b
    x = torch.stack([first, second, (a - b) + 3 * noise], 1)
    x = x - x.mean(0)
    y = (first - second)[:, None] - (first - second).mean()
    path = forward([System(penalised(x.T @ x, 1, 1e-9), x.T @ y, 3)], 3)
    assert float(path.gains.sum()) == pytest.approx(float(y.square().sum()), rel=1e-6)


def test_equal_blocks_are_taken_from_the_first_and_depend_on_each_other_without_a_ridge() -> None:
    x, y = rows(4)
    same = torch.cat([x[:, :WIDTH], x[:, :WIDTH]], 1)
    gram, cross = same.T @ same, same.T @ y
    assert forward([System(penalised(gram, WIDTH, 0.01), cross, 2)], 2).blocks == (0, 1)
    with pytest.raises(SingularSystem, match="depend linearly"):
        forward([System(penalised(gram, WIDTH, 0.0), cross, 2)], 2)


def test_spreading_steps_is_the_best_of_all_ways_where_gains_diminish() -> None:
    generator = torch.Generator().manual_seed(5)
    gains = [torch.rand(4, generator=generator).sort(descending=True).values for _ in range(3)]
    for budget in range(3, 13):
        counts = spread(gains, budget)
        assert sum(counts) == budget
        ways = (w for w in itertools.product(range(1, 5), repeat=3) if sum(w) == budget)
        best = max(sum(float(g[:n].sum()) for g, n in zip(gains, w, strict=True)) for w in ways)
        given = sum(float(g[:n].sum()) for g, n in zip(gains, counts, strict=True))
        assert given == pytest.approx(best)
    assert spread(gains, 100) == [4, 4, 4]
