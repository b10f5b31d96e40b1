"""Each bound against exact arithmetic, and against simulation."""

import math
from fractions import Fraction

import numpy as np
import pytest

from mappers.bounds import kl_bound

NAN = float("nan")


def exact_bound(values: list[float], alpha: Fraction, delta: Fraction) -> float | None:
    """The definition in rational arithmetic."""
    n, ordered = len(values), sorted(values)
    for r in range(1, n + 1):
        tail = sum(math.comb(n, i) * alpha**i * (1 - alpha) ** (n - i) for i in range(n - r + 1))
        if tail <= delta:
            return ordered[r - 1]
    return None


@pytest.mark.parametrize("rows", [1, 5, 21, 22, 28, 29, 45, 58, 59, 90])
@pytest.mark.parametrize(("alpha", "delta"), [("0.1", "0.1"), ("0.1", "0.05"), ("0.05", "0.05")])
def test_bound_is_the_order_statistic_of_the_definition(rows: int, alpha: str, delta: str) -> None:
    values = [float(v) for v in np.random.default_rng(rows).permutation(rows)]
    assert kl_bound(values, float(alpha), float(delta)) == exact_bound(
        values, Fraction(alpha), Fraction(delta)
    )


@pytest.mark.parametrize(("alpha", "delta", "needed"), [(0.1, 0.1, 22), (0.05, 0.05, 59)])
def test_too_few_rows_give_no_bound(alpha: float, delta: float, needed: int) -> None:
    assert kl_bound([0.0] * (needed - 1), alpha, delta) is None
    assert kl_bound([0.0] * needed, alpha, delta) == 0.0
    assert kl_bound([], alpha, delta) is None


def test_the_bound_holds_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    quantile = -math.log(0.1)  # of Exp(1), exceeded with probability 0.1
    draws = rng.exponential(size=(4_000, 60))
    missed = np.mean([kl_bound(row.tolist(), 0.1, 0.1) < quantile for row in draws])
    assert 0.02 < missed <= 0.1 + 3 * math.sqrt(0.09 / 4_000)


def test_values_that_are_not_finite_fail_closed() -> None:
    assert kl_bound([NAN] + [0.1] * 21, 0.1, 0.1) == math.inf
    assert kl_bound([math.inf] + [0.1] * 21, 0.1, 0.1) == math.inf
    assert kl_bound([NAN] + [0.1] * 59, 0.1, 0.1) == 0.1  # one may be among the worst tenth


@pytest.mark.parametrize(("alpha", "delta"), [(0, 0.1), (1, 0.1), (0.1, 0), (0.1, 1), (NAN, 0.1)])
def test_levels_outside_zero_to_one_are_errors(alpha: float, delta: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        kl_bound([0.1] * 100, alpha, delta)
