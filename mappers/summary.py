"""Evidence as tables for people: means with bootstrap intervals, gap and context recovered."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mappers.evidence import Arm, Evidence, EvidenceRow
from mappers.metrics import context_recovered, gap_recovered

RESAMPLES = 2_000


class Setting(NamedTuple):
    """What the rows of one cell have in common."""

    domain: str
    length: int
    arm: Arm
    native_tail: int
    prefix_known: bool


class Cell(NamedTuple):
    """Means over the documents of one setting; ``low`` and ``high`` are the KL's 95 % interval."""

    documents: int
    kl: float
    low: float
    high: float
    top1: float
    nll: float


class Recovered(NamedTuple):
    """How much of what reading the prompt gives a translation keeps; 1 is all, NaN undefined."""

    gap: float
    context: float


def summarise(evidence: Evidence) -> dict[Setting, Cell]:
    """One cell for each domain, length, arm, tail and prefix, in the order of their names."""
    grouped: dict[Setting, list[EvidenceRow]] = defaultdict(list)
    for row in evidence.rows:
        key = Setting(row.domain, row.length, row.arm, _tail(row), row.prefix_known)
        grouped[key].append(row)
    return {key: _cell(grouped[key]) for key in sorted(grouped)}


def recovered(cells: dict[Setting, Cell], key: Setting) -> Recovered:
    """Gap and context recovered of one translated setting, against the arms of its length."""
    around = {k.arm: c for k, c in cells.items() if k[:2] == key[:2] and k.arm in _WITHOUT_TAIL}
    if len(around) < len(_WITHOUT_TAIL):
        return Recovered(math.nan, math.nan)
    cell, native = cells[key], around[Arm.NATIVE]
    return Recovered(
        gap_recovered(around[Arm.SOURCE_ALONE].nll, cell.nll, native.nll),
        context_recovered(cell.kl, around[Arm.NO_CONTEXT].kl),
    )


def bootstrap_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile interval of the mean over resampled documents; the same every time."""
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = data[rng.integers(0, len(data), size=(RESAMPLES, len(data)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


_WITHOUT_TAIL = (Arm.NATIVE, Arm.NO_CONTEXT, Arm.SOURCE_ALONE)


def _tail(row: EvidenceRow) -> int:
    return 0 if row.arm in _WITHOUT_TAIL else row.native_tail


def _cell(rows: Sequence[EvidenceRow]) -> Cell:
    low, high = bootstrap_interval([row.kl for row in rows])
    kl, top1, nll = (
        float(np.mean([getattr(row, name) for row in rows])) for name in ("kl", "top1", "nll")
    )
    return Cell(len(rows), kl, low, high, top1, nll)
