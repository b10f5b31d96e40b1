"""Each bound against exact arithmetic, and against simulation."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from mappers.bounds import documents_needed, kl_bound, mean_bound

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
    assert documents_needed(alpha, delta) == needed
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


def normal(x: float) -> float:
    """The distribution function of a standard normal variable."""
    return (1 + math.erf(x / math.sqrt(2))) / 2


# E[min(X, 1)] for X = exp(N(-2, 1)), in closed form.
CLIPPED_LOGNORMAL = math.exp(-1.5) * normal(1) + 1 - normal(2)

Draw = Callable[[np.random.Generator, int], np.ndarray]
CLIPPED: dict[str, tuple[Draw, float]] = {
    "bernoulli": (lambda rng, n: (rng.random(n) < 0.1).astype(float), 0.1),
    "beta": (lambda rng, n: rng.beta(2, 5, n), 2 / 7),
    "lognormal": (lambda rng, n: rng.lognormal(-2, 1, n), CLIPPED_LOGNORMAL),
    "steady": (lambda rng, n: rng.uniform(0.1, 0.12, n), 0.11),
    "certain": (lambda rng, n: np.full(n, 0.3), 0.3),
}


def hoeffding(kls: np.ndarray, delta: float) -> float:
    """The textbook bound on the mean of values between 0 and 1."""
    return float(np.minimum(kls, 1).mean()) + math.sqrt(-math.log(delta) / (2 * len(kls)))


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("rows", [30, 120])
def test_the_mean_lies_below_its_bound_as_often_as_it_says(name: str, rows: int) -> None:
    draw, mean = CLIPPED[name]
    rng, runs, delta = np.random.default_rng(rows), 600, 0.1
    bounds = [mean_bound(draw(rng, rows), 1.0, delta) for _ in range(runs)]
    missed = np.mean([bound < mean for bound in bounds])
    assert missed <= delta + 3 * math.sqrt(delta * (1 - delta) / runs)


@pytest.mark.parametrize("name", CLIPPED)
def test_a_mean_bound_is_never_below_the_sample_nor_above_the_clip(name: str) -> None:
    draw, _ = CLIPPED[name]
    for seed in range(20):
        kls = np.sort(draw(np.random.default_rng(seed), 50))
        for order in (kls, kls[::-1]):
            bound = mean_bound(order, 1.0, 0.1)
            assert np.minimum(kls, 1).mean() <= bound <= 1


@pytest.mark.parametrize("rows", [40, 200, 1000])
def test_low_variance_makes_a_mean_bound_far_tighter_than_hoeffdings(rows: int) -> None:
    kls = CLIPPED["steady"][0](np.random.default_rng(1), rows)
    excess = mean_bound(kls, 1.0, 0.05) - kls.mean()
    assert excess < 0.6 * (hoeffding(kls, 0.05) - kls.mean())


def test_a_mean_bound_by_exact_arithmetic() -> None:
    """For one value, whose bet is known before it is seen."""
    # One zero: K = 1 + b m with b = min(sqrt(2 ln(1/delta) / 0.25), 0.9 / (1 - m)).
    delta = 0.9
    bet = math.sqrt(-8 * math.log(delta))
    least = (1 / delta - 1) / bet  # where the bet is not held back
    assert bet < 0.9 / (1 - least)
    assert mean_bound([0.0], 1.0, delta) == pytest.approx(least, rel=1e-6)
    assert mean_bound([0.0], 4.0, delta) == pytest.approx(4 * least, rel=1e-6)
    assert mean_bound([0.0], 1.0, delta) >= least


def test_more_documents_and_less_confidence_tighten_a_mean_bound() -> None:
    kls = CLIPPED["beta"][0](np.random.default_rng(3), 400)
    by_rows = [mean_bound(kls[:n], 1.0, 0.05) - kls[:n].mean() for n in (25, 50, 100, 200, 400)]
    assert by_rows == sorted(by_rows, reverse=True)
    by_delta = [mean_bound(kls, 1.0, delta) for delta in (0.001, 0.01, 0.1, 0.3)]
    assert by_delta == sorted(by_delta, reverse=True)


@pytest.mark.parametrize("kl", [NAN, math.inf, 7.0])
def test_what_is_not_finite_counts_as_the_clip(kl: float) -> None:
    assert mean_bound([kl] * 3 + [0.1] * 50, 2.0, 0.1) == mean_bound(
        [2.0] * 3 + [0.1] * 50, 2.0, 0.1
    )
    assert mean_bound([kl] * 50, 2.0, 0.1) == 2.0
    assert mean_bound([], 2.0, 0.1) == 2.0


@pytest.mark.parametrize(("clip", "delta"), [(0, 0.1), (math.inf, 0.1), (NAN, 0.1), (1, 0), (1, 1)])
def test_a_clip_or_level_that_makes_no_sense_is_an_error(clip: float, delta: float) -> None:
    with pytest.raises(ValueError, match="clip is above 0"):
        mean_bound([0.1], clip, delta)
