"""How well what is known at serving time tells good translations from bad: what each signal adds.

The guarantee holds with any signal; how much is accepted, and with what tail, depends on how well
they separate. So each is fitted to the KL on one half of the documents and tested on the other:
alone by a function that never falls, since a signal of trouble should not announce good news
(``isotonic.py``), and all of them together by least squares on the log of the KL.

============ =====================================================================================
score        how unfamiliar the source's cache is (``score.py``)
probe_error  how far the translation is from the target's own first tokens (``probe.py``)
tail_excess  what the target's NLL of the native tail exceeds the source's by, nats a token
together     all of these that were measured
============ =====================================================================================
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mappers.evidence import EvidenceRow
from mappers.isotonic import isotonic

LEAST_KL = 1e-6
"""Nats a token. Below it, float32 logits differ by rounding alone; it keeps the log finite."""
FEWEST = 8
"""Documents in a half: fewer show no order."""

Vector = NDArray[np.float64]
Signal = Callable[[EvidenceRow], float | None]


class Separation(NamedTuple):
    """What a signal says of documents that it was not fitted on.

    ``spearman`` is the rank correlation with the KL, ``explained`` the share of the KL's variance
    that the fit takes away: 0 is what the mean of the other half does, and it may be negative. NaN
    where all KLs, or all values of the signal, are equal.
    """

    signal: str
    documents: int
    spearman: float
    explained: float


def separation(rows: Iterable[EvidenceRow]) -> list[Separation]:
    """A line for each signal that was measured, then all together if they are several.

    ``rows`` are of one kind: one bucket, length and native tail, one row a document. Documents are
    halved by the digest of their names. Empty where a half would have fewer than 8.
    """
    finite = [row for row in rows if math.isfinite(row.kl)]
    names = [name for name, of in SIGNALS.items() if all(_is_number(of(row)) for row in finite)]
    fitted, tested = ([row for row in finite if _half(row) == half] for half in (0, 1))
    if not names or min(len(fitted), len(tested)) < FEWEST:
        return []
    kls = _kls(tested)
    found = []
    for name in names:
        [values] = _values(tested, [name])
        level = isotonic(
            zip(_values(fitted, [name])[0].tolist(), _kls(fitted).tolist(), strict=True)
        )
        forecast = np.array([level(value) for value in values.tolist()])
        found.append(_judged(name, values, forecast, kls, float(_kls(fitted).mean())))
    if len(names) > 1:
        forecast = _least_squares(fitted, names)(tested)
        found.append(_judged("together", forecast, forecast, kls, float(_kls(fitted).mean())))
    return found


def _tail_excess(row: EvidenceRow) -> float | None:
    if row.tail_nll is None or row.source_tail_nll is None:
        return None
    return row.tail_nll - row.source_tail_nll


SIGNALS: Mapping[str, Signal] = {
    "score": lambda row: row.score,
    "probe_error": lambda row: row.probe_error,
    "tail_excess": _tail_excess,
}


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _half(row: EvidenceRow) -> int:
    return hashlib.sha256(row.document.encode()).digest()[0] % 2


def _kls(rows: Sequence[EvidenceRow]) -> Vector:
    return np.array([row.kl for row in rows])


def _values(rows: Sequence[EvidenceRow], names: Sequence[str]) -> Vector:
    """``[signals, documents]``."""
    return np.array([[SIGNALS[name](row) for row in rows] for name in names], dtype=np.float64)


def _least_squares(
    rows: Sequence[EvidenceRow], names: Sequence[str]
) -> Callable[[Sequence[EvidenceRow]], Vector]:
    """The KL as exp of a constant and a multiple of each signal."""

    def design(of: Sequence[EvidenceRow]) -> Vector:
        return np.vstack([np.ones(len(of)), _values(of, names)]).T

    logs = np.log(np.maximum(_kls(rows), LEAST_KL))
    weights = np.linalg.lstsq(design(rows), logs, rcond=None)[0]

    def forecast(of: Sequence[EvidenceRow]) -> Vector:
        levels: Vector = np.exp(design(of) @ weights)
        return levels

    return forecast


def _judged(name: str, values: Vector, forecast: Vector, kls: Vector, mean: float) -> Separation:
    left, whole = float(((kls - forecast) ** 2).sum()), float(((kls - mean) ** 2).sum())
    explained = 1 - left / whole if whole > 0 else math.nan
    return Separation(name, len(kls), spearman(values, kls), explained)


def spearman(x: Vector, y: Vector) -> float:
    """Rank correlation; ties share their mean rank. NaN where either is constant."""
    a, b = (_ranks(v) - (len(v) - 1) / 2 for v in (x, y))
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else math.nan


def _ranks(values: Vector) -> Vector:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum() - 1
    ranks: Vector = (last - (counts - 1) / 2)[inverse]
    return ranks
