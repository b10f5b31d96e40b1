"""``kvt fit``: two models and text in, an artifact out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError
from rich.console import Console

from service.commands import models
from service.commands.choice import choice_table
from service.commands.exits import Code, Failure, fault_of, say
from service.commands.options import Config, Device
from service.commands.texts import by_domain

if TYPE_CHECKING:
    from mappers.models import ModelSpec

Budget = Literal["paper", "half", "quarter", "eighth"]
Recipe = Literal["full_head", "head_local", "top_heads"]
Method = Literal["top", "greedy"]
Share = Literal["head", "layer"]
RowWeights = Literal["none", "attention"]
_TEXT, _FIT, _EVIDENCE = "Text", "Fit", "Evidence"


@models.pair_options
def fit(
    source: "ModelSpec",
    target: "ModelSpec",
    calibration: Annotated[
        list[Path], typer.Option(help="Text files, folders or jsonl.", rich_help_panel=_TEXT)
    ],
    root: Annotated[Path, typer.Option(help="The artifact becomes a folder in this one.")],
    config: Config = None,
    held_out: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DOMAIN=PATH",
            help="Text to measure on, never fitted on. Without any, the mapper is unproven.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Keep the sums here: resumes, and refits without a pass.")
    ] = None,
    device: Device = "cpu",
    budget: Annotated[
        Budget | None,
        typer.Option(
            help="Choose what is best at the operations of full_head with k, or a part of them.",
            show_default="paper, without --recipe and --k",
            rich_help_panel=_FIT,
        ),
    ] = None,
    recipe: Annotated[
        Recipe | None,
        typer.Option(
            help="Kind of map.", show_default="full_head, with only --k", rich_help_panel=_FIT
        ),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Layers a target layer; top_heads: heads. A budget is measured by it.",
            show_default="4",
            rich_help_panel=_FIT,
        ),
    ] = None,
    selection: Annotated[
        Method | None,
        typer.Option(
            help="The best alone, or one after another.", show_default="top", rich_help_panel=_FIT
        ),
    ] = None,
    lags: Annotated[
        int | None,
        typer.Option(
            min=0, help="Tokens back, 0 to 4 (heads).", show_default="1", rich_help_panel=_FIT
        ),
    ] = None,
    share: Annotated[
        Share | None,
        typer.Option(
            help="One choice of heads for a target layer, or for each target head.",
            show_default="layer",
            rich_help_panel=_FIT,
        ),
    ] = None,
    spread: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="So many times k heads at most, where errors cost more KL.",
            show_default="1",
            rich_help_panel=_FIT,
        ),
    ] = None,
    row_weights: Annotated[
        RowWeights,
        typer.Option(help="Tokens weighted by the target's attention.", rich_help_panel=_FIT),
    ] = "none",
    key_norm: Annotated[
        bool, typer.Option(help="Keys back on the target's norm.", rich_help_panel=_FIT)
    ] = True,
    sums_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Sums that take more are cut, and fitted in as many passes.",
            show_default="16GiB",
            rich_help_panel=_FIT,
        ),
    ] = None,
    ridge: Annotated[
        float, typer.Option(help="Relative to the mean diagonal.", rich_help_panel=_FIT)
    ] = 1e-4,
    windows: Annotated[
        int, typer.Option(min=1, help="Calibration windows.", rich_help_panel=_FIT)
    ] = 200,
    window_tokens: Annotated[
        int, typer.Option(min=16, help="Tokens of a window.", rich_help_panel=_FIT)
    ] = 1024,
    stride: Annotated[
        int, typer.Option(min=1, help="Every n-th row is taken.", rich_help_panel=_FIT)
    ] = 4,
    skip_positions: Annotated[
        int, typer.Option(min=0, help="First rows left out.", rich_help_panel=_FIT)
    ] = 4,
    first_tokens: Annotated[
        int,
        typer.Option(min=0, help="First tokens held exactly, without a BOS.", rich_help_panel=_FIT),
    ] = 256,
    known_texts: Annotated[
        list[str] | None,
        typer.Option(help="Openings held exactly (a chat template's).", rich_help_panel=_FIT),
    ] = None,
    documents: Annotated[
        int, typer.Option(min=1, help="Documents of a domain.", rich_help_panel=_EVIDENCE)
    ] = 64,
    lengths: Annotated[
        list[int] | None,
        typer.Option(
            help="Prompt tokens.",
            show_default="128 256 512 1024",
            rich_help_panel=_EVIDENCE,
        ),
    ] = None,
    native_tails: Annotated[
        list[int] | None,
        typer.Option(help="Native tails.", show_default="1 32 128 512", rich_help_panel=_EVIDENCE),
    ] = None,
    alpha: Annotated[
        float,
        typer.Option(
            help="Share of answers that may exceed a threshold; too few documents fail at once.",
            rich_help_panel=_EVIDENCE,
        ),
    ] = 0.1,
    delta: Annotated[
        float, typer.Option(help="1 - confidence of alpha.", rich_help_panel=_EVIDENCE)
    ] = 0.05,
) -> None:
    """Fit a mapper for a pair of models and measure it on held-out text.

    The best recipe that a budget of operations buys, or one that is named. The folder of the
    artifact is printed when it is done. An interrupted fit resumes.
    """
    from mappers.fit import fit as fit_mapper
    from mappers.plan import FitPlan

    del config
    models.quiet()
    named = {
        "recipe": recipe,
        "k": k,
        "selection": selection,
        "lags": lags,
        "share": share,
        "spread": spread,
        "sums_memory": sums_memory,
    }
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if not given.keys() & {"recipe", "k"}:
        budget = budget or "paper"
    lists = {"lengths": lengths, "native_tails": native_tails}
    try:
        plan = FitPlan(
            source=source,
            target=target,
            calibration=tuple(calibration),
            evaluation=by_domain(held_out or []),
            root=root,
            work=work,
            device=device,
            budget=budget,
            row_weights=row_weights,
            key_norm=key_norm,
            ridge=ridge,
            windows=windows,
            window_tokens=window_tokens,
            stride=stride,
            skip_positions=skip_positions,
            first_tokens=first_tokens,
            known_texts=tuple(known_texts or ()),
            documents=documents,
            alpha=alpha,
            delta=delta,
            **given,
            **{name: tuple(values) for name, values in lists.items() if values},
        )
    except ValidationError as error:
        raise Failure(Code.USAGE, fault_of(error)) from error
    folder = fit_mapper(plan)
    print_choice(folder, budget)
    typer.echo(folder)


def print_choice(folder: Path, budget: Budget | None) -> None:
    """What was tried under a budget, on the error stream."""
    from mappers.artifact import load_manifest

    choice = load_manifest(folder).choice
    if choice is not None:
        Console(stderr=True).print(choice_table(choice))
    elif budget is not None:
        say(f"budget {budget}: the sums are too large to hold at once, so nothing was compared")
