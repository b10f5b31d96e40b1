"""Tables for people against numbers worked out by hand."""

import math

import numpy as np
import pytest

from mappers.evidence import Arm, Evidence, EvidenceRow
from mappers.summary import Setting, bootstrap_interval, recovered, summarise


def row(arm: Arm, kl: float, nll: float, *, tail: int = 1, document: str = "d") -> EvidenceRow:
    return EvidenceRow(
        document=document,
        domain="chat",
        length=128,
        native_tail=tail,
        prefix_known=arm is Arm.TRANSLATED,
        arm=arm,
        kl=kl,
        kl_max=kl,
        top1=0.5,
        nll=nll,
    )


ROWS = (
    row(Arm.NATIVE, 0.0, 2.0, tail=128),
    row(Arm.SOURCE_ALONE, 1.0, 3.0, tail=0),
    row(Arm.NO_CONTEXT, 0.8, 4.0),
    row(Arm.TRANSLATED, 0.1, 2.1),
    row(Arm.TRANSLATED, 0.3, 2.4, document="e"),
)
KEY = Setting("chat", 128, Arm.TRANSLATED, 1, True)


def record(*rows: EvidenceRow) -> Evidence:
    return Evidence(continuation_tokens=32, corpora={}, rows=rows)


def test_cells_are_means_over_documents() -> None:
    cells = summarise(record(*ROWS))
    assert len(cells) == 4
    cell = cells[KEY]
    assert cell.documents == 2
    assert (cell.kl, cell.top1, cell.nll) == pytest.approx((0.2, 0.5, 2.25))
    assert cell.low == pytest.approx(0.1)
    assert cell.high == pytest.approx(0.3)


def test_recovered_shares() -> None:
    found = recovered(summarise(record(*ROWS)), KEY)
    assert found == pytest.approx((0.75, 0.75))


def test_recovered_is_undefined_without_the_other_arms() -> None:
    found = recovered(summarise(record(*ROWS[1:])), KEY)
    assert math.isnan(found.gap)
    assert math.isnan(found.context)


def test_the_interval_is_that_of_a_mean_and_always_the_same() -> None:
    values = np.random.default_rng(3).normal(5, 2, size=400).tolist()
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values)
    mean, error = np.mean(values), np.std(values) / 20
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.03)
