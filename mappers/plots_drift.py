"""The drift curve: KL of a conversation that is translated at every turn, against a fresh start."""

from collections.abc import Mapping

from markupsafe import Markup
from matplotlib.figure import Figure

from mappers.plots import SERIES, draw, legend, log_axis
from mappers.summary import Point, Turn


def drift_curve(name: str, domain: str, turns: Mapping[int, Turn]) -> Markup:
    """KL by turn: of what was translated over and over, and of a native cache translated once."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        numbers = sorted(turns)
        lines: tuple[tuple[str, list[Point]], ...] = (
            ("translated at every turn", [turns[turn].kl for turn in numbers]),
            ("translated once, from a native cache", [turns[turn].fresh for turn in numbers]),
        )
        log_axis(axes, [end for _, line in lines for p in line for end in (p.low, p.mean, p.high)])
        for number, (label, line) in enumerate(lines):
            means, colour = [p.mean for p in line], SERIES[number]
            band = ([p.low for p in line], [p.high for p in line])
            axes.fill_between(numbers, *band, color=colour, alpha=0.18, linewidth=0)
            axes.plot(numbers, means, color=colour, marker="os"[number], label=label)
        axes.set_xticks(numbers, [f"{n}\n{turns[n].side}\n{turns[n].length}" for n in numbers])
        axes.set_xlabel("turn, the model that reads, tokens so far")
        axes.set_ylabel("KL (nats per token)")
        legend(figure, axes, columns=1)

    return draw(
        name,
        f"Drift, {domain}",
        "KL after each turn of a conversation that goes to and fro between the models, translated "
        "each time, against one translation of a native cache; bands are 95 % intervals.",
        paint,
        height=3.8,
    )
