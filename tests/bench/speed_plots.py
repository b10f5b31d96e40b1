"""Pictures of ``bench_translate.py``'s rows, as PNG: speed-up and cost against length."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from tests.bench.rows import Row

INCHES, DOTS_PER_INCH = (6.4, 3.6), 110
TRANSLATE, PREFILL = "translate_tokens_per_second", "prefill_tokens_per_second"
GEMM, PEER = "gemm_tokens_per_second", "peer_tokens_per_second"


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Pictures of each geometry with more than one length; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for geometry in dict.fromkeys(row["geometry"] for row in rows):
        own = [row for row in rows if row["geometry"] == geometry]
        if len({row["tokens"] for row in own}) > 1:
            name = geometry.replace(":", "-")
            if any(row[PREFILL] for row in own):
                files.append(_speed_up(own, folder / f"{name}-speed-up.png"))
            files.append(_cost(own, folder / f"{name}-cost.png"))
    return files


def _speed_up(rows: Sequence[Row], file: Path) -> Path:
    figure, axes = _axes(rows, "times as fast as the target's own prefill")
    for label, own in _maps(rows).items():
        _line(axes, label, own, lambda row: _ratio(row[TRANSLATE], row[PREFILL]))
    return _saved(figure, axes, file)


def _cost(rows: Sequence[Row], file: Path) -> Path:
    figure, axes = _axes(rows, "milliseconds for the whole prompt")
    axes.set_yscale("log")
    _line(
        axes, "prefill", _first_of_each_length(rows), lambda row: _milliseconds(row, PREFILL), "k"
    )
    for label, own in _maps(rows).items():
        _line(axes, label, own, _of(TRANSLATE))
        colour: Any = axes.lines[-1].get_color()
        for yardstick, style in ((GEMM, ":"), (PEER, "--")):
            name = f"{label}, {'bare multiply' if yardstick == GEMM else 'aither-kvcache'}"
            _line(axes, name, own, _of(yardstick), colour, style)
    return _saved(figure, axes, file)


def _of(name: str) -> Callable[[Row], float | None]:
    return lambda row: _milliseconds(row, name)


def _maps(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row['recipe']} k={row['k']}", []).append(row)
    return found


def _first_of_each_length(rows: Sequence[Row]) -> list[Row]:
    return list({row["tokens"]: row for row in reversed(rows)}.values())


def _milliseconds(row: Row, rate: str) -> float | None:
    return 1e3 * row["tokens"] / row[rate] if row[rate] else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def _axes(rows: Sequence[Row], what: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.subplots()
    lengths = sorted({row["tokens"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="tokens", ylabel=what)
    axes.set_title(f"{rows[0]['geometry']}: {rows[0]['hardware']}", fontsize=7)
    return figure, axes


def _line(
    axes: Axes,
    label: str,
    rows: Sequence[Row],
    value: Callable[[Row], float | None],
    colour: str | None = None,
    style: str = "-",
) -> None:
    points = sorted((row["tokens"], found) for row in rows if (found := value(row)) is not None)
    if points:
        axes.plot(
            *zip(*points, strict=True), style, marker="o", ms=3, lw=1.2, color=colour, label=label
        )


def _saved(figure: Figure, axes: Axes, file: Path) -> Path:
    axes.grid(alpha=0.3)
    axes.legend(
        handlelength=3.5, fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False
    )
    figure.savefig(file, dpi=DOTS_PER_INCH)
    return file
