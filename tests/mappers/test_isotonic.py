"""Pooling adjacent violators against the closed form, and against every way to pool."""

import random
from itertools import combinations, pairwise

import pytest

from mappers.isotonic import isotonic


def max_min(y: list[float]) -> list[float]:
    """The other definition: the largest over i <= k of the smallest mean of y[i..j], j >= k."""
    return [
        max(min(sum(y[i : j + 1]) / (j + 1 - i) for j in range(k, len(y))) for i in range(k + 1))
        for k in range(len(y))
    ]


def best_of_all(y: list[float]) -> float:
    """The least squared error of all step functions that do not fall."""
    errors = []
    for steps in range(len(y)):
        for cuts in combinations(range(1, len(y)), steps):
            parts = [y[a:b] for a, b in pairwise((0, *cuts, len(y)))]
            means = [sum(part) / len(part) for part in parts]
            if all(a <= b for a, b in pairwise(means)):
                errors.append(
                    sum((v - m) ** 2 for part, m in zip(parts, means, strict=True) for v in part)
                )
    return min(errors)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_nearest_function_that_does_not_fall(seed: int) -> None:
    drawn = random.Random(seed)
    y = [drawn.choice([drawn.gauss(0, 1), float(drawn.randrange(3))]) for _ in range(9)]
    shuffled = list(enumerate(y))
    drawn.shuffle(shuffled)
    fitted = isotonic((float(x), v) for x, v in shuffled)
    got = [fitted(float(x)) for x in range(9)]
    assert got == pytest.approx(max_min(y))
    assert sum((v - g) ** 2 for v, g in zip(y, got, strict=True)) == pytest.approx(best_of_all(y))


def test_between_and_beyond_the_points() -> None:
    fitted = isotonic([(1.0, 0.0), (2.0, 5.0), (3.0, 1.0)])
    assert [fitted(x) for x in (-9.0, 1.0, 1.9, 2.0, 3.0, 99.0)] == [0, 0, 0, 3, 3, 3]
    assert fitted(float("nan")) != fitted(float("nan"))


def test_points_with_the_same_x_share_a_level() -> None:
    assert isotonic([(1.0, 0.0), (1.0, 4.0)])(1.0) == 2.0


def test_no_points() -> None:
    with pytest.raises(ValueError, match="no points"):
        isotonic([])
