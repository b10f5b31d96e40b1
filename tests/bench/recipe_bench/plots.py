"""The benchmark's pictures, as PNG: KL against FLOPs, k and calibration documents."""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, StrMethodFormatter
from PIL import Image

from tests.bench.recipe_bench.candidates import Group
from tests.bench.recipe_bench.results import TableRow

TAIL = 32
INCHES = (7.2, 4.0)
DOTS_PER_INCH = 115
PALETTE = 128
PUBLISHED = {"paper": "X", "CacheBridge": "P", "aither-kvcache": "D"}
"""Each with its marker; of one recipe's variants the better is drawn."""
LINES = {"in_domain": "-", "out_of_domain": "--"}


class Series(NamedTuple):
    """Points by what is on the horizontal axis; series of one ``name`` share a colour.

    ``line`` is matplotlib's style, empty for markers alone.
    """

    name: str
    label: str
    line: str
    marker: str
    points: Sequence[tuple[float, TableRow]]


def draw(rows: Sequence[TableRow], folder: Path) -> list[Path]:
    """All pictures that the rows have points for, one of each kind a pair; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for pair in dict.fromkeys(row.pair for row in rows):
        own = [row for row in rows if row.pair == pair and row.native_tail == TAIL]
        for name, axis, found in (
            ("flops", "MFLOP a token", _by_flops(own)),
            ("k", "k: source layers read, or heads (top_heads)", _by_k(own)),
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
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(s.name for s in series))}
    for one in series:
        _plot(axes, one, colours[one.name])
    for row in rows:
        if row.recipe == "control: only the tail" and row.domain == "in_domain":
            label = "only the tail read, in domain"
            axes.axhline(row.kl, color="grey", linestyle=":", label=label)
    axes.set(xscale="log", yscale="log", xlabel=axis, ylabel="KL, nats a token")
    axes.set_title(f"{pair}: KL with a native tail of {TAIL} tokens", fontsize=10)
    _readable(axes.yaxis, *axes.get_ylim())
    _readable(axes.xaxis, *axes.get_xlim())
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    _save(figure, file)
    return file


def _plot(axes: Axes, series: Series, colour: str) -> None:
    points = sorted(series.points, key=lambda point: point[0])
    rows = [row for _, row in points]
    axes.errorbar(
        [number for number, _ in points],
        [row.kl for row in rows],
        [[row.kl - row.kl_low for row in rows], [row.kl_high - row.kl for row in rows]],
        color=colour,
        linestyle=series.line,
        marker=series.marker,
        markersize=5 if series.line else 9,
        label=series.label,
        linewidth=1.3,
        elinewidth=0.5,
        capsize=1.5,
    )


def _readable(axis: Axis, low: float, high: float) -> None:
    """Plain numbers, more of them where an axis covers little."""
    wide = high / low > 30
    of_decade = (1, 2, 5) if wide else (1, 1.5, 2, 3, 4, 5, 7)
    marks = [mark * 10.0**decade for decade in range(-6, 6) for mark in of_decade]
    axis.set_major_locator(FixedLocator([mark for mark in marks if low <= mark <= high]))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _save(figure: Figure, file: Path) -> None:
    """With few colours: a picture in a repository should be small."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DOTS_PER_INCH)
    picture = Image.open(drawn).convert("RGB")
    picture.quantize(PALETTE, dither=Image.Dither.NONE).save(file, optimize=True)


def _by_flops(rows: Sequence[TableRow]) -> Iterator[Series]:
    """In domain: ours a line a recipe, the published ones as markers, their first token mapped."""
    near = [row for row in rows if row.domain == "in_domain"]
    ours = [row for row in near if row.group in (Group.OURS, Group.CURVE)]
    for name, own in _grouped(ours, lambda row: re.sub(r" k=\d+", "", row.recipe)).items():
        yield Series(name, name, "-", "o", _over_flops(own))
    chosen = [row for row in near if row.group == Group.DEFAULT]
    yield Series("default", "default of kvt fit", "", "*", _over_flops(chosen))
    for name, marker in PUBLISHED.items():
        own = [row for row in near if row.recipe.startswith(name) and row.first_token == "mapped"]
        same = _grouped(own, lambda row: str(row.flops_per_token)).values()
        best = [min(rows, key=lambda row: row.kl) for rows in same]
        yield Series(name, f"{name}, as published", "", marker, _over_flops(best))


def _over_flops(rows: Sequence[TableRow]) -> list[tuple[float, TableRow]]:
    return [(row.flops_per_token / 1e6, row) for row in rows]


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
        label = f"{name}, {'in' if domain == 'in_domain' else 'out of'} domain"
        yield Series(name, label, LINES[domain], "o", points)


def _grouped(rows: Sequence[TableRow], key: Callable[[TableRow], str]) -> dict[str, list[TableRow]]:
    found: dict[str, list[TableRow]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found
