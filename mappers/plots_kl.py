"""KL against the length of the prompt, and the arms beside each other, with 95 % intervals."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from mappers.plots import MARKERS, SERIES, draw, error_bars, goal, legend, log_axis
from mappers.summary import Cell

Lines = Mapping[int, Mapping[int, Cell]]
"""Cells by native tail, then by length."""
Span = Sequence[float]
"""KLs that the axis has room for, so that the panels of all domains have the same."""


def kl_by_length(
    name: str, domain: str, translated: Lines, bare: Lines, *, max_kl: float, span: Span
) -> Markup:
    """A line for each native tail: translated, and dashed the same tail read over nothing."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        log_axis(axes, [max_kl, *span])
        for number, tail in enumerate(sorted(translated)):
            look = {"color": SERIES[number % 6], "marker": MARKERS[number % 6]}
            alone: dict[str, Any] = {"linestyle": (0, (4, 2)), "mfc": "none", "alpha": 0.75}
            _line(axes, bare.get(tail, {}), number, **look, **alone)
            _line(axes, translated[tail], number, **look, label=f"tail {tail}")
        goal(axes, max_kl)
        lengths = sorted({length for line in translated.values() for length in line})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length}" for length in lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("prompt (tokens)")
        axes.set_ylabel("KL (nats per token)")
        legend(figure, axes, columns=3)

    return draw(
        name,
        f"KL by prompt length, {domain}",
        "Mean KL over documents for each native tail, with 95 % intervals. Solid: the translation. "
        "Dashed: the same tail read over nothing. Dotted: the threshold.",
        paint,
        height=3.8,
    )


def arms(
    name: str, domain: str, cells: Sequence[tuple[str, Cell]], *, max_kl: float, span: Span
) -> Markup:
    """A dot and an interval for each arm; the first are at the top, in the first colour."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        log_axis(axes, [max_kl, *span], side="x")
        goal(axes, max_kl, side="x")
        for row, (label, cell) in enumerate(cells):
            colour = SERIES[0] if label.startswith("translated") else SERIES[5]
            kls, error = error_bars([cell])
            axes.errorbar(kls, [row], xerr=error, color=colour, marker="o", linestyle="none")
        axes.set_yticks(range(len(cells)), [label for label, _ in cells])
        axes.set_ylim(len(cells) - 0.5, -0.5)
        axes.set_xlabel("KL (nats per token)")

    return draw(
        name,
        f"KL of every arm, {domain}",
        "Mean KL over documents of each arm, with 95 % intervals. Dotted: the threshold.",
        paint,
        height=1.0 + 0.24 * len(cells),
    )


def ends(cells: Iterable[Cell]) -> Span:
    """Where the intervals of the cells begin and end."""
    return [end for cell in cells for end in (cell.low, cell.high)]


def _line(axes: Axes, line: Mapping[int, Cell], number: int, **look: Any) -> None:
    """Moved a little sideways for each series, so that intervals do not hide each other."""
    lengths = sorted(line)
    kls, error = error_bars(line[length] for length in lengths)
    axes.errorbar([length * 1.035**number for length in lengths], kls, yerr=error, **look)
