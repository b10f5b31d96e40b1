"""How a budget chose a recipe, as a table: every candidate, the best first."""

from typing import TYPE_CHECKING

from rich import box
from rich.table import Column, Table

if TYPE_CHECKING:
    from mappers.manifest import Choice


def choice_table(choice: "Choice") -> Table:
    """KL on windows held out of the fit, nats a token, at native tails of 1 and of 32."""
    table = Table(
        "recipe",
        *(Column(name, justify="right") for name in ("heads", "lags")),
        "share",
        *(Column(name, justify="right") for name in ("spread", "MFLOP", "tail 1", "tail 32")),
        title=f"{choice.budget}: at most {choice.flops_per_token / 1e6:.3g} MFLOP a token; KL on "
        f"{choice.held_out_windows} windows held out, at native tails of 1 and 32",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for tried in choice.candidates:
        table.add_row(
            tried.recipe,
            str(tried.k),
            str(tried.lags),
            tried.share,
            str(tried.spread),
            f"{tried.flops_per_token / 1e6:.3g}",
            f"{tried.kl_tail_1:.4f}",
            f"{tried.kl_tail_32:.4f}",
        )
    return table
