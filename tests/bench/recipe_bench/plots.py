"""The benchmark's pictures, as PNG: KL against FLOPs, source layers and calibration documents."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipe_bench.results import TableRow

TAIL = 32
DOMAINS = (("in_domain", "-", "o"), ("out_of_domain", "--", "s"))


def draw(rows: Sequence[TableRow], folder: Path) -> list[Path]:
    """All pictures that the rows have points for, one of each kind a pair; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for pair in dict.fromkeys(row.pair for row in rows):
        own = [row for row in rows if row.pair == pair and row.native_tail == TAIL]
        for name, plot in (("flops", _flops), ("k", _layers), ("documents", _documents)):
            figure = Figure(figsize=(7, 4.5), layout="constrained")
            axes = figure.subplots()
            if plot(axes, own):
                axes.set(title=f"{pair}: native tail of {TAIL} tokens", ylabel="KL, nats a token")
                axes.set(xscale="log", yscale="log")
                axes.grid(alpha=0.3, which="both")
                axes.legend(fontsize=7)
                file = folder / f"{pair}-{name}.png"
                figure.savefig(file, dpi=130)
                files.append(file)
    return files


def _flops(axes: Axes, rows: Sequence[TableRow]) -> bool:
    """One series a recipe, over k; published ones as they are, the first token mapped."""
    groups: dict[str, list[TableRow]] = {}
    for row in rows:
        recipe = re.sub(r" k=\d+", "", row.recipe)
        published = recipe.startswith(("paper", "CacheBridge", "aither"))
        fits = row.first_token == ("mapped" if published else "exact")
        if row.domain == "in_domain" and row.flops_per_token and fits and "control" not in recipe:
            groups.setdefault(recipe.split(", ")[0] if "documents" in recipe else recipe, [])
            if "documents" not in recipe:
                groups[recipe].append(row)
    for recipe, points in groups.items():
        points.sort(key=lambda row: row.flops_per_token)
        xs = [row.flops_per_token for row in points]
        axes.errorbar(xs, [row.kl for row in points], _whiskers(points), marker="o", label=recipe)
    for row in rows:
        if row.recipe == "control: only the tail" and row.domain == "in_domain":
            axes.axhline(row.kl, color="grey", linestyle=":", label="only the tail read")
    axes.set(xlabel="FLOPs a token (in domain)")
    return bool(groups)


def _layers(axes: Axes, rows: Sequence[TableRow]) -> bool:
    pattern = re.compile(r"(\w+) k=(\d+)")
    axes.set(xlabel="source layers read, k")
    return _series(axes, rows, pattern)


def _documents(axes: Axes, rows: Sequence[TableRow]) -> bool:
    pattern = re.compile(r"(\w+ k=\d+), (\d+) documents")
    axes.set(xlabel="calibration documents (of 128 fitted rows each)")
    return _series(axes, rows, pattern)


def _series(axes: Axes, rows: Iterable[TableRow], pattern: "re.Pattern[str]") -> bool:
    """The recipes that match as a whole: one series a name and domain, over the number."""
    found: dict[tuple[str, str], list[tuple[int, TableRow]]] = {}
    for row in rows:
        match = pattern.fullmatch(row.recipe)
        if match and row.first_token == "exact":
            point = (int(match[2]), row)
            found.setdefault((match[1], row.domain), []).append(point)
    for (name, domain), points in found.items():
        points.sort(key=lambda point: point[0])
        of_domain = [row for _, row in points]
        line, marker = next(style for style in DOMAINS if style[0] == domain)[1:]
        label = f"{name}, {domain.replace('_', ' ')}"
        axes.errorbar(
            [number for number, _ in points],
            [row.kl for row in of_domain],
            _whiskers(of_domain),
            linestyle=line,
            marker=marker,
            label=label,
            capsize=2,
        )
    return any(len(points) > 1 for points in found.values())


def _whiskers(rows: Sequence[TableRow]) -> list[list[float]]:
    return [[row.kl - row.kl_low for row in rows], [row.kl_high - row.kl for row in rows]]
