"""Layers: which source layer predicts which target layer, where errors arise, in which heads."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from mappers.plots import HALF_INCHES, SERIES, WHOLE_INCHES, draw, legend, log_axis
from mappers.summary import Point

NUMBERED_CELLS = 160
"""Up to how many cells a heat map has its numbers written in."""

_LEVELS = np.linspace(0, 1, 11)
_BELOW_ZERO = "#b0405a"


def heat_map(
    name: str, what: str, r2: Sequence[Sequence[float]], read: Sequence[Sequence[int]]
) -> Markup:
    """R2 [L_s][L_t], source layer 0 at the bottom; ``read``: each target layer's source layers.

    Cells that the mapper reads are framed, unless it reads all.
    """
    matrix = np.asarray(r2, dtype=np.float64)
    sources, targets = matrix.shape

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        colours = colormaps["viridis"].with_extremes(under=_BELOW_ZERO, bad=_BELOW_ZERO)
        norm = BoundaryNorm(_LEVELS, colours.N, extend="min")
        mesh = axes.pcolormesh(matrix, cmap=colours, norm=norm)
        axes.grid(False)
        figure.colorbar(
            mesh, ax=axes, label="R\N{SUPERSCRIPT TWO} of this layer alone", ticks=_LEVELS[::2]
        )
        if matrix.size <= NUMBERED_CELLS:
            _write_numbers(axes, matrix)
        if any(len(set(layers)) < sources for layers in read):
            for target, layers in enumerate(read):
                for source in layers:
                    axes.add_patch(_frame(target, source))
        _number_layers(axes, targets, sources)
        axes.set_xlabel("target layer")
        axes.set_ylabel("source layer")

    height = min(6.0, max(2.4, 0.9 + (HALF_INCHES - 1.4) * sources / targets))
    return draw(
        name,
        f"R2 of {what}, source layer by target layer",
        f"How well each of {sources} source layers alone predicts each of {targets} target layers.",
        paint,
        height=height,
    )


def layer_curve(
    name: str, domain: str, one: Mapping[int, Point], up_to: Mapping[int, Point]
) -> Markup:
    """KL by layer: that layer alone translated, and all layers up to it."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        both = [*one.values(), *up_to.values()]
        log_axis(axes, [end for found in both for end in (found.low, found.mean, found.high)])
        for number, (label, line) in enumerate(
            (("this layer alone", one), ("all up to it", up_to))
        ):
            layers = sorted(line)
            means = [line[layer].mean for layer in layers]
            band = ([line[n].low for n in layers], [line[n].high for n in layers])
            axes.fill_between(layers, *band, color=SERIES[number], alpha=0.18, linewidth=0)
            axes.plot(layers, means, color=SERIES[number], marker="os"[number], label=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("target layer")
        axes.set_ylabel("KL (nats per token)")
        legend(figure, axes)

    return draw(
        name,
        f"Layer curve, {domain}",
        "KL where one layer of the native cache is replaced by its translation, and where all "
        "layers from the first to it are; bands are 95 % intervals.",
        paint,
    )


def layer_measures(
    name: str, domain: str, heads: Mapping[str, Mapping[int, Sequence[float]]]
) -> Markup:
    """Measures by layer: a dot for each head, a line for their mean."""

    def paint(figure: Figure) -> None:
        parts = figure.subplots(1, len(_MEASURES))
        for axes, (title, shown) in zip(parts, _MEASURES.items(), strict=True):
            for number, (label, measure) in enumerate(shown.items()):
                _dots(axes, heads.get(measure, {}), SERIES[number], "os^"[number], label)
            axes.set_title(title)
            axes.set_xlabel("target layer")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if len(shown) > 1:
                axes.legend(**_BELOW)
        parts[-1].axhline(1, color=SERIES[5], linewidth=1, linestyle=(0, (4, 2)))

    return draw(
        name,
        f"Layers and heads, {domain}",
        "R2 on held-out tokens of keys and values, cosine of the attention's output, and "
        "concentration of the error, by target layer; a dot is a head, the line their mean.",
        paint,
        width=WHOLE_INCHES,
        height=3.3,
    )


_BELOW: Any = dict(
    loc="upper center", bbox_to_anchor=(0.5, -0.19), ncols=3, handlelength=1.2, columnspacing=1.2
)
_MEASURES = {
    "R\N{SUPERSCRIPT TWO} on held-out tokens": {
        "keys": "r2_keys",
        "keys with RoPE": "r2_keys_cached",
        "values": "r2_values",
    },
    "cosine of the attention's output": {"cosine": "attention_cosine"},
    "error concentration (1: evenly spread)": {
        "keys": "key_concentration",
        "values": "value_concentration",
    },
}


def _dots(
    axes: Axes, layers: Mapping[int, Sequence[float]], colour: str, marker: str, label: str
) -> None:
    places = [layer for layer, values in layers.items() for _ in values]
    every = [value for values in layers.values() for value in values]
    axes.plot(places, every, color=colour, marker=marker, ms=3, alpha=0.45, linestyle="none")
    means = [float(np.mean(values)) for values in layers.values()]
    axes.plot(list(layers), means, color=colour, label=label)


def _write_numbers(axes: Axes, matrix: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> None:
    for (source, target), value in np.ndenumerate(matrix):
        dark = not value > 0.6
        label = f"{value:.2f}".replace("0.", ".", 1) if math.isfinite(value) else "-"
        place = (target + 0.5, source + 0.5)
        colour = "#ffffff" if dark else "#1c2330"
        axes.text(*place, label, color=colour, ha="center", va="center", fontsize=7.5)


def _frame(target: int, source: int) -> Rectangle:
    return Rectangle((target + 0.04, source + 0.04), 0.92, 0.92, fill=False, ec="#ff7a1a", lw=1.4)


def _number_layers(axes: Axes, targets: int, sources: int) -> None:
    for axis, count in ((axes.xaxis, targets), (axes.yaxis, sources)):
        step = max(1, math.ceil(count / 16))
        layers = range(0, count, step)
        axis.set_ticks([layer + 0.5 for layer in layers], [f"{layer}" for layer in layers])
        axis.set_tick_params(length=0)
