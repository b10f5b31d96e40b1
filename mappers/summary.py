"""Evidence as tables for people: means with bootstrap intervals, gap and context recovered.

Intervals are 95 % percentile intervals over documents. They are paired: whatever is compared is
compared on the same resampled documents, so what all arms have in common (an easy text) cancels.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mappers.evidence import Arm, Evidence, EvidenceRow
from mappers.evidence_rows import CurveRow, DriftRow, LayerRow
from mappers.metrics import context_recovered, gap_recovered

RESAMPLES = 2_000
MEASURES = ("kl", "kl_p95", "kl_p99", "kl_max", "top1", "top5", "nll", "agreement")

Interval = tuple[float, float]
Floats = NDArray[np.float64]


class Setting(NamedTuple):
    """What the rows of one cell have in common."""

    domain: str
    length: int
    arm: Arm
    native_tail: int
    prefix_known: bool
    hops: int = 0
    probe_tokens: int = 0


Rows = Mapping[Setting, Sequence[EvidenceRow]]


class Cell(NamedTuple):
    """Means over the documents of one setting; ``low`` and ``high`` are the KL's interval.

    ``intervals`` has one for each measure; a measure that was not taken is NaN. ``kl_p95`` and
    ``kl_p99`` are means over documents of the quantiles over positions, ``kl_worst`` the largest
    KL at any position of any document.
    """

    documents: int
    kl: float
    low: float
    high: float
    top1: float
    nll: float
    top5: float
    kl_p95: float
    kl_p99: float
    kl_max: float
    kl_worst: float
    agreement: float
    intervals: Mapping[str, Interval]


class Recovered(NamedTuple):
    """How much of what reading the prompt gives a translation keeps; 1 is all, NaN undefined."""

    gap: float
    context: float


class Compared(NamedTuple):
    """One setting against another on the same documents: KL minus KL, with its interval."""

    documents: int
    difference: float
    low: float
    high: float


class Point(NamedTuple):
    """A mean with its interval over ``documents`` documents."""

    documents: int
    mean: float
    low: float
    high: float


class Turn(NamedTuple):
    """One turn of a conversation that is translated at every turn, over its documents.

    ``kl`` is the conversation's, ``fresh`` that of translating the other model's own cache of the
    same tokens, ``added`` the first minus the second on the same documents. ``side`` is the model
    that reads, at ``length`` tokens.
    """

    side: str
    length: int
    kl: Point
    fresh: Point
    added: Point


def summarise(evidence: Evidence) -> dict[Setting, Cell]:
    """One cell for each setting, in the order of its fields."""
    rows = by_setting(evidence)
    return {key: _cell(rows[key]) for key in sorted(rows)}


def by_setting(evidence: Evidence) -> dict[Setting, list[EvidenceRow]]:
    """The rows of each setting; arms without a native tail have tail 0 there."""
    grouped: dict[Setting, list[EvidenceRow]] = defaultdict(list)
    for row in evidence.rows:
        read = _tail(row), row.prefix_known, row.hops, row.probe_tokens
        grouped[Setting(row.domain, row.length, row.arm, *read)].append(row)
    return grouped


def recovered(cells: Mapping[Setting, Cell], key: Setting) -> Recovered:
    """Gap and context recovered of one translated setting, against the arms of its length."""
    around = {k.arm: c for k, c in cells.items() if k[:2] == key[:2] and k.arm in _WITHOUT_TAIL}
    if not _NEEDED <= around.keys():
        return Recovered(math.nan, math.nan)
    cell, native = cells[key], around[Arm.NATIVE]
    return Recovered(
        gap_recovered(around[Arm.SOURCE_ALONE].nll, cell.nll, native.nll),
        context_recovered(cell.kl, around[Arm.NO_CONTEXT].kl),
    )


def recovered_intervals(rows: Rows, key: Setting) -> tuple[Interval, Interval]:
    """Intervals of gap and context recovered; NaN where an arm is missing."""
    nothing = (math.nan, math.nan)
    arms = {arm: Setting(key.domain, key.length, arm, 0, False) for arm in _NEEDED}
    if not all(rows.get(setting) for setting in (key, *arms.values())):
        return nothing, nothing
    kls = _paired([rows[key], rows[arms[Arm.NO_CONTEXT]]], "kl")
    order = (arms[Arm.SOURCE_ALONE], key, arms[Arm.NATIVE])
    source, own, native = _resampled(_paired([rows[setting] for setting in order], "nll"))
    kl, none = _resampled(kls)
    with np.errstate(divide="ignore", invalid="ignore"):
        gap = np.where(source > native, (source - own) / (source - native), np.nan)
        context = np.where(none > 0, 1 - kl / none, np.nan)
    return _ends(gap), _ends(context)


def compared(rows: Rows, key: Setting, other: Setting) -> Compared | None:
    """KL of ``key`` minus KL of ``other`` over the documents that have both; None without any."""
    pairs = _paired([rows.get(key, []), rows.get(other, [])], "kl")
    if not pairs.shape[1]:
        return None
    own, against = _resampled(pairs)
    difference = float(pairs[0].mean() - pairs[1].mean())
    return Compared(pairs.shape[1], difference, *_ends(own - against))


def curve_points(rows: Sequence[CurveRow]) -> dict[tuple[str, str, int], Point]:
    """Mean KL by domain, mode and layer."""
    grouped: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for row in rows:
        grouped[row.domain, row.mode, row.layer].append(row.kl)
    return {key: point(kls) for key, kls in grouped.items()}


def drift_points(rows: Sequence[DriftRow]) -> dict[tuple[str, int], Turn]:
    """What was measured at each turn, by domain and turn."""
    grouped: dict[tuple[str, int], list[DriftRow]] = defaultdict(list)
    for row in rows:
        grouped[row.domain, row.turn].append(row)
    return {key: _turn(of_turn) for key, of_turn in grouped.items()}


def layer_means(rows: Sequence[LayerRow]) -> dict[str, dict[str, dict[int, float]]]:
    """Means over heads by domain, measure and layer."""
    grouped: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for row in rows:
        grouped[row.domain][row.measure][row.layer].append(row.value)
    return {
        domain: {
            name: {layer: float(np.mean(values)) for layer, values in layers.items()}
            for name, layers in measures.items()
        }
        for domain, measures in grouped.items()
    }


def point(values: Sequence[float]) -> Point:
    """Mean and interval of one value a document."""
    return Point(len(values), float(np.mean(values)), *bootstrap_interval(values))


def bootstrap_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """The 95 % percentile interval of the mean over resampled documents; the same every time."""
    return _ends(_resampled(np.asarray([values], dtype=np.float64), seed=seed)[0])


_NEEDED = {Arm.NATIVE, Arm.NO_CONTEXT, Arm.SOURCE_ALONE}
_WITHOUT_TAIL = _NEEDED | {Arm.QUANTIZED}


def _turn(rows: Sequence[DriftRow]) -> Turn:
    return Turn(
        side=rows[0].side,
        length=rows[0].length,
        kl=point([row.kl for row in rows]),
        fresh=point([row.kl_fresh for row in rows]),
        added=point([row.kl - row.kl_fresh for row in rows]),
    )


def _tail(row: EvidenceRow) -> int:
    return 0 if row.arm in _WITHOUT_TAIL else row.native_tail


def _resampled(values: Floats, *, seed: int = 0) -> Floats:
    """Means [settings, resamples] of ``values`` [settings, documents], resampled together."""
    means: Floats = values[:, _draws(values.shape[1], seed)].mean(axis=2)
    return means


@lru_cache(maxsize=16)
def _draws(count: int, seed: int) -> NDArray[np.int64]:
    """Which of ``count`` documents each resample has, [resamples, count]."""
    return np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, count))


def _paired(groups: Sequence[Sequence[EvidenceRow]], measure: str) -> Floats:
    """A measure as [settings, documents] over the documents that all settings have."""
    found = [{row.document: getattr(row, measure) for row in rows} for rows in groups]
    shared = sorted(set.intersection(*(set(by_document) for by_document in found)))
    return np.asarray([[one[name] for name in shared] for one in found], dtype=np.float64)


def _ends(means: Floats) -> Interval:
    with np.errstate(invalid="ignore"):  # between infinite means
        low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _cell(rows: Sequence[EvidenceRow]) -> Cell:
    points = {name: _point(rows, name) for name in MEASURES}
    means = {name: found.mean for name, found in points.items()}
    return Cell(
        documents=len(rows),
        low=points["kl"].low,
        high=points["kl"].high,
        kl_worst=max(row.kl_max for row in rows),
        intervals={name: (found.low, found.high) for name, found in points.items()},
        **means,
    )


def _point(rows: Sequence[EvidenceRow], measure: str) -> Point:
    """Over the rows in which the measure was taken; NaN where it was in none."""
    taken = [value for row in rows if (value := getattr(row, measure)) is not None]
    return point(taken) if taken else Point(0, math.nan, math.nan, math.nan)
