"""The benchmark's pictures, as PNG: KL against FLOPs, k and calibration documents."""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter
from PIL import Image

from tests.bench.recipe_bench.candidates import Group
from tests.bench.recipe_bench.results import TableRow

TAIL = 32
INCHES = (7.0, 4.4)
DOTS_PER_INCH = 120
COLOURS = 64
PUBLISHED = {"paper": "X", "CacheBridge": "P", "aither-kvcache": "D"}
"""Each with its marker; of one recipe's variants the better is drawn."""
DOMAINS = {"in_domain": "-", "out_of_domain": "--"}


class Series(NamedTuple):
    """A line, or only markers, and its points by what is on the horizontal axis."""

    label: str
    style: str
    marker: str
    points: list[tuple[float, TableRow]]


def draw(rows: Sequence[TableRow], folder: Path) -> list[Path]:
    """All pictures that the rows have points for, one of each kind a pair; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for pair in dict.fromkeys(row.pair for row in rows):
        own = [row for row in rows if row.pair == pair and row.native_tail == TAIL]
        for name, axis, found in (
            ("flops", "FLOPs a token", _by_flops(own)),
            ("k", "source layers (top_heads: heads) read, k", _by_k(own)),
            ("documents", "calibration documents (128 rows of each are fitted)", _by_count(own)),
        ):
            series = [one for one in found if one.points]
            if any(len(one.points) > 1 for one in series):
                files.append(_drawn(pair, axis, series, own, folder / f"{pair}-{name}.png"))
    return files


def _drawn(
    pair: str, axis: str, series: Sequence[Series], rows: Sequence[TableRow], file: Path
) -> Path:
    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.subplots()
    for one in series:
        _plot(axes, one)
    for row in rows:
        if row.recipe == "control: only the tail" and row.domain == "in_domain":
            label = "only the tail read, in domain"
            axes.axhline(row.kl, color="grey", linestyle=":", label=label)
    axes.set(xscale="log", yscale="log", xlabel=axis, ylabel="KL, nats a token")
    axes.set_title(f"{pair}: KL at a native tail of {TAIL} tokens [95 %]", fontsize=10)
    _readable(axes)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    _save(figure, file)
    return file


def _plot(axes: Axes, series: Series) -> None:
    points = sorted(series.points, key=lambda point: point[0])
    rows = [row for _, row in points]
    axes.errorbar(
        [number for number, _ in points],
        [row.kl for row in rows],
        [[row.kl - row.kl_low for row in rows], [row.kl_high - row.kl for row in rows]],
        linestyle=series.style,
        marker=series.marker,
        markersize=9 if series.marker in ("*", *PUBLISHED.values()) else 5,
        label=series.label,
        linewidth=1.2,
        elinewidth=0.7,
        capsize=2,
    )


def _readable(axes: Axes) -> None:
    """Plain numbers at the marks of the vertical axis, which seldom covers a whole decade."""
    low, high = axes.get_ylim()
    marks = [m * 10.0**e for e in range(-5, 2) for m in (1, 1.5, 2, 3, 4, 5, 7)]
    axes.set_yticks([mark for mark in marks if low <= mark <= high])
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


def _save(figure: Figure, file: Path) -> None:
    """With few colours: a picture in a repository should be small."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DOTS_PER_INCH)
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(file, optimize=True)


def _by_flops(rows: Sequence[TableRow]) -> Iterator[Series]:
    """In domain: ours a line a recipe, the published ones as markers, their first token mapped."""
    near = [row for row in rows if row.domain == "in_domain"]
    ours = [row for row in near if row.group in (Group.OURS, Group.CURVE)]
    for label, own in _grouped(ours, lambda row: re.sub(r" k=\d+", "", row.recipe)).items():
        yield Series(label, "-", "o", [(row.flops_per_token, row) for row in own])
    defaults = [row for row in near if row.group == Group.DEFAULT]
    yield Series("default", "", "*", [(row.flops_per_token, row) for row in defaults])
    for name, marker in PUBLISHED.items():
        own = [row for row in near if row.recipe.startswith(name) and row.first_token == "mapped"]
        best = [
            min(same, key=lambda row: row.kl)
            for same in _grouped(own, lambda row: str(row.flops_per_token)).values()
        ]
        yield Series(
            f"{name}, as published", "", marker, [(row.flops_per_token, row) for row in best]
        )


def _by_k(rows: Sequence[TableRow]) -> Iterator[Series]:
    pattern = re.compile(r"(\w+) k=(\d+)(, lag \d, choice a layer)?")
    ours = [row for row in rows if row.group in (Group.OURS, Group.CURVE)]
    yield from _matching(ours, pattern, lambda match: (match[1] + (match[3] or ""), int(match[2])))


def _by_count(rows: Sequence[TableRow]) -> Iterator[Series]:
    pattern = re.compile(r"(.+), (\d+) documents")
    yield from _matching(rows, pattern, lambda match: (match[1], int(match[2])))


def _matching(
    rows: Sequence[TableRow],
    pattern: "re.Pattern[str]",
    read: Callable[["re.Match[str]"], tuple[str, int]],
) -> Iterator[Series]:
    """The recipes that match as a whole: one series a name and domain, over the number."""
    found: dict[tuple[str, str], list[tuple[float, TableRow]]] = {}
    for row in rows:
        match = pattern.fullmatch(row.recipe)
        if match:
            name, number = read(match)
            found.setdefault((name, row.domain), []).append((number, row))
    for (name, domain), points in found.items():
        yield Series(f"{name}, {domain.replace('_', ' ')}", DOMAINS[domain], "o", points)


def _grouped(rows: Sequence[TableRow], key: Callable[[TableRow], str]) -> dict[str, list[TableRow]]:
    found: dict[str, list[TableRow]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found
