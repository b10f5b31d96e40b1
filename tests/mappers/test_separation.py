"""What signals add, on documents for which it is known."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from mappers.evidence import EvidenceRow
from mappers.separation import Separation, separation, spearman
from tests.mappers.records import varied


def documents(seed: int = 0, count: int = 400) -> list[EvidenceRow]:
    """Three causes of the KL: the score sees the first, the probe both, the tail the third."""
    rng = np.random.default_rng(seed)
    first, second, third = rng.normal(size=(3, count))
    kls = np.exp(-3 + 0.6 * (first + second + third))
    found = varied(kls.tolist(), scores=first.tolist(), errors=(first + second).tolist())
    return [
        row.model_copy(update={"tail_nll": 3 + excess, "source_tail_nll": 3.0})
        for row, excess in zip(found, third.tolist(), strict=True)
    ]


def by_signal(rows: Sequence[EvidenceRow]) -> dict[str, Separation]:
    return {line.signal: line for line in separation(rows)}


def test_each_signal_and_what_they_say_together() -> None:
    found = by_signal(documents())
    assert list(found) == ["score", "probe_error", "tail_excess", "together"]
    # Of three equal causes: correlations of sqrt(1/3), sqrt(2/3), sqrt(1/3) and 1.
    for name, expected in (("score", 0.577), ("probe_error", 0.816), ("tail_excess", 0.577)):
        assert found[name].spearman == pytest.approx(expected, abs=0.12)
    assert found["together"].spearman > 0.99
    assert found["together"].explained > 0.95
    assert 0 < found["score"].explained < found["probe_error"].explained < 0.9
    assert all(150 <= line.documents <= 250 for line in found.values())


def test_noise_explains_nothing_on_documents_that_it_was_not_fitted_on() -> None:
    noise = np.random.default_rng(1).normal(size=400).tolist()
    rows = [
        row.model_copy(update={"score": noise[n], "probe_error": None, "tail_nll": None})
        for n, row in enumerate(documents())
    ]
    [line] = separation(rows)
    assert (line.signal, abs(line.spearman) < 0.25, line.explained < 0.1) == ("score", True, True)


def test_a_signal_that_some_rows_lack_is_left_out() -> None:
    rows = documents()
    rows[3] = rows[3].model_copy(update={"probe_error": None})
    assert list(by_signal(rows)) == ["score", "tail_excess", "together"]
    rows[4] = rows[4].model_copy(update={"score": math.nan})
    assert list(by_signal(rows)) == ["tail_excess"]


def test_the_order_of_the_rows_does_not_matter() -> None:
    rows = documents()
    for one, other in zip(separation(rows), separation(rows[::-1]), strict=True):
        assert one[:2] == other[:2]
        assert one[2:] == pytest.approx(other[2:])


def test_too_few_documents_say_nothing() -> None:
    assert separation(documents(count=15)) == []
    assert separation(varied([0.1] * 400)) == []


def test_rank_correlation_by_counting() -> None:
    rng = np.random.default_rng(5)
    x, y = rng.integers(0, 6, size=(2, 40)).astype(float)

    def ranks(values: np.ndarray) -> np.ndarray:
        """How many are smaller, and half of those that are equal."""
        return (values[:, None] > values).sum(1) + ((values[:, None] == values).sum(1) - 1) / 2

    assert spearman(x, y) == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1])
    assert spearman(x, -x) == pytest.approx(-1)
    assert math.isnan(spearman(x, np.ones(40)))
