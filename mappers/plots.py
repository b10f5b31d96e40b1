"""How the report's plots look: one style, drawn by matplotlib, as SVG that stands inside the page.

Plots are drawn in placeholder colours, which are then exchanged for variables of the page's style
sheet, so that they follow light and dark. No text that somebody chose gets into a drawing but as
its title and description. The same figure gives the same bytes.
"""

import re
from collections.abc import Callable, Iterable
from io import StringIO
from math import isfinite, nan
from typing import Any
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mappers.summary import Cell

INK, SOFT, LINE, GOAL = "#010101", "#020202", "#030303", "#040404"
SERIES = ("#010001", "#010002", "#010003", "#010004", "#010005", "#010006")
MARKERS = ("o", "s", "^", "D", "v", "P")
HALF_INCHES, WHOLE_INCHES = 4.7, 9.6
"""Widths of plots that stand side by side, and of those that take a row of the page."""

_VARIABLES = {INK: "ink", SOFT: "soft", LINE: "line", GOAL: "goal"} | {
    colour: f"series-{number}" for number, colour in enumerate(SERIES, 1)
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "text.color": INK,
    "axes.facecolor": "none",
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "errorbar.capsize": 2,
}
_GOAL = "threshold"
_NAMESPACE = re.compile(r"\{[^}]*\}")
_DECIMALS = re.compile(r"\d+\.\d{3,}")
_REFERENCE = re.compile(r"#([\w-]+)")


def draw(
    name: str,
    title: str,
    description: str,
    paint: Callable[[Figure], None],
    *,
    width: float = HALF_INCHES,
    height: float = 3.4,
) -> Markup:
    """The SVG element of what ``paint`` puts on a figure of this size in inches.

    ``name`` is unique in the page and a valid id; ``title`` and ``description`` are for readers
    who do not see the plot.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own settings are
        matplotlib.rcParams.update({**_STYLE, "svg.hashsalt": name})
        figure = Figure(figsize=(width, height), layout="constrained", frameon=False)
        canvas: Any = FigureCanvasSVG(figure)  # whose methods have no types
        paint(figure)
        written = StringIO()
        # Not savefig, which draws twice. No date, so that the bytes are the same tomorrow.
        canvas.print_svg(written, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    root = ElementTree.fromstring(written.getvalue())
    _tidy(root)
    _describe(root, name, title, description)
    return Markup(_coloured(ElementTree.tostring(root, encoding="unicode")))


def legend(figure: Figure, axes: Axes, *, columns: int = 4) -> None:
    """A legend under all axes for what the given ones show; the threshold comes last."""
    shown = zip(*axes.get_legend_handles_labels(), strict=True)
    handles, labels = zip(*sorted(shown, key=lambda one: one[1].startswith(_GOAL)), strict=True)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def log_axis(axes: Axes, values: Iterable[float], *, side: str = "y") -> None:
    """A logarithmic axis around what is above zero of ``values``, with plain numbers on it.

    Values that are not above zero are drawn at its lower end.
    """
    shown = [value for value in values if isfinite(value) and value > 0] or [0.1, 1.0]
    low, high = max(min(shown), max(shown) * 1e-5) / 1.3, max(shown) * 1.3
    axis = axes.yaxis if side == "y" else axes.xaxis
    scale, limit = (
        (axes.set_yscale, axes.set_ylim) if side == "y" else (axes.set_xscale, axes.set_xlim)
    )
    scale("log", nonpositive="clip")
    limit(low, high)
    steps = (1, 2, 5) if high / low < 300 else (1,)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def error_bars(cells: Iterable[Cell]) -> tuple[list[float], list[list[float]]]:
    """KLs, and how far their intervals reach down and up; nothing is drawn for infinite ones."""
    found = list(cells)
    kls = [cell.kl if isfinite(cell.kl) else nan for cell in found]
    down = [_reach(cell.kl - cell.low) for cell in found]
    return kls, [down, [_reach(cell.high - cell.kl) for cell in found]]


def _reach(length: float) -> float:
    return max(0.0, length) if isfinite(length) else 0.0


def goal(axes: Axes, value: float, *, side: str = "y") -> None:
    """A line at the threshold that is in force."""
    line = axes.axhline if side == "y" else axes.axvline
    line(value, color=GOAL, linewidth=1.2, linestyle=(0, (1, 1.5)), label=f"{_GOAL} {value:g}")


def _tidy(root: ElementTree.Element) -> None:
    """Drop what a page does not need: namespaces, metadata, style, and ids that nobody names."""
    for parent in list(root.iter()):
        for child in list(parent):
            if _NAMESPACE.sub("", child.tag) in {"metadata", "style"}:
                parent.remove(child)
    named = {
        name
        for element in root.iter()
        for value in element.attrib.values()
        for name in _REFERENCE.findall(value)
    }
    for element in root.iter():
        element.tag = _NAMESPACE.sub("", element.tag)
        kept = {_NAMESPACE.sub("", key): value for key, value in element.attrib.items()}
        if kept.get("id") not in named:
            kept.pop("id", None)
        element.attrib.clear()
        element.attrib.update({key: _rounded(kept[key]) for key in kept})


def _describe(root: ElementTree.Element, name: str, title: str, description: str) -> None:
    """Say what is seen; the size is the page's to choose."""
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-desc")
    for at, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(tag, {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(at, element)


def _rounded(value: str) -> str:
    """Coordinates to a hundredth of a point."""
    return _DECIMALS.sub(lambda found: f"{float(found[0]):.2f}", value)


def _coloured(svg: str) -> str:
    for placeholder, variable in _VARIABLES.items():
        svg = svg.replace(placeholder, f"var(--{variable})")
    return svg
