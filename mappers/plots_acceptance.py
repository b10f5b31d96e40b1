"""How much of a prompt is translated, by threshold: a stair for each prompt length."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from mappers.plots import SERIES, draw, goal, legend, log_axis


def acceptance(
    name: str,
    domain: str,
    thresholds: Sequence[float],
    shares: Mapping[int, Sequence[float]],
    max_kl: float,
) -> Markup:
    """The translated share of prompts by length at each threshold; 0 is a re-prefill."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        log_axis(axes, thresholds, side="x")
        for number, (length, share) in enumerate(shares.items()):
            colour = SERIES[number % 6]
            label = f"{length} tokens"
            axes.step(thresholds, share, where="post", color=colour, label=label, alpha=0.9)
        goal(axes, max_kl, side="x")
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("KL threshold (nats per token)")
        axes.set_ylabel("share of the prompt translated")
        legend(figure, axes, columns=3)

    return draw(
        name,
        f"Acceptance by threshold, {domain}",
        "Share of a prompt that is translated at each threshold, for each prompt length; what is "
        "left is read natively, and at 0 all of it is. Dotted: the threshold in force.",
        paint,
        height=3.7,
    )
