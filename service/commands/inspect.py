"""``kvt inspect``: what an artifact is, how good it was measured to be, and what it may serve."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from service.commands.choice import choice_table
from service.commands.options import Config
from service.settings import Settings

if TYPE_CHECKING:
    from mappers.accept import Rule, Verdict
    from mappers.artifact import Artifact
    from mappers.evidence import Evidence
    from mappers.manifest import Manifest
    from mappers.summary import Cell, Setting

_RULE = "Threshold"
_SERVED = Settings.model_fields


def inspect(
    artifact: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Its folder.")],
    config: Config = None,
    max_kl: Annotated[
        float, typer.Option(min=0, help="Nats a token.", rich_help_panel=_RULE)
    ] = _SERVED["max_kl"].default,
    alpha: Annotated[
        float, typer.Option(help="Share of answers that may exceed it.", rich_help_panel=_RULE)
    ] = _SERVED["alpha"].default,
    delta: Annotated[
        float, typer.Option(help="1 - confidence of that.", rich_help_panel=_RULE)
    ] = _SERVED["delta"].default,
    risk: Annotated[
        Literal["exceedance", "mean"],
        typer.Option(
            help="What meets max_kl: all but a share alpha, or the mean.", rich_help_panel=_RULE
        ),
    ] = _SERVED["risk"].default,
    kl_clip: Annotated[
        float, typer.Option(help="Of the mean: a larger KL counts as this.", rich_help_panel=_RULE)
    ] = _SERVED["kl_clip"].default,
) -> None:
    """Show an artifact: pair, recipe, sizes, measured KL, and for which prompts it may be used.

    Of the KL table: the mean over n prompts with a native tail, its certified bound, the KL of
    reading that tail alone and of reading nothing, and how much of what reading brings is kept.
    """
    from mappers import artifact as artifacts
    from mappers.accept import Rule
    from mappers.servable import why_not_servable

    del config
    if not (0 < alpha < 1 and 0 < delta < 1):
        raise typer.BadParameter("alpha and delta lie between 0 and 1")
    if risk == "mean" and not kl_clip > max_kl:
        raise typer.BadParameter("kl_clip must be above max_kl, or any mean meets it")
    loaded = artifacts.load(artifact)
    console = Console()
    console.print(_facts(loaded), _identities(loaded.manifest), sep="\n")
    if loaded.manifest.choice is not None:
        console.print(choice_table(loaded.manifest.choice))
    rule = Rule(max_kl, alpha, delta, risk, kl_clip)
    if loaded.evidence is not None:
        console.print(evidence_tables(loaded.evidence, rule))
    why = why_not_servable(
        loaded.evidence,
        rule,
        rows_an_input=loaded.rows_an_input,
        min_rows_an_input=_SERVED["min_rows_an_input"].default,
    )
    if why is not None:
        console.print(f"[bold]Not servable[/]: {escape(why)}.", soft_wrap=True)


def _facts(artifact: "Artifact") -> Table:
    manifest = artifact.manifest
    table = Table(
        title=manifest.mapper_id,
        show_header=False,
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    rows = {
        "digest": artifact.digest,
        "made": f"{manifest.created_at:%Y-%m-%d %H:%M} UTC, bundle {manifest.bundle_version}",
        "recipe": f"{manifest.recipe}, {_reads(artifact)}, ridge "
        f"{manifest.ridge:g}, first {manifest.skipped_positions} positions left out",
        "fitted on": _calibration(artifact),
        "size": f"{manifest.weight_bytes / 1e6:.1f} MB of {manifest.weights_dtype} weights, "
        f"{manifest.prefix_bytes / 1e6:.2f} MB for {len(artifact.mapper.prefixes)} exact prefixes",
        "work": f"{manifest.flops_per_token / 1e6:.2f} MFLOP a token",
    }
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _reads(artifact: "Artifact") -> str:
    """How much the maps read, and of which tokens."""
    mapper = artifact.mapper
    heads = [choice for layer in mapper.layers for choice in layer.heads or ()]
    if not heads:
        layers = _span(len(layer.sources) for layer in mapper.layers)
        return f"{layers} source layers a target layer"
    whose = "layer" if all(len(choice) == 1 for choice in heads) else "head"
    lags = f", up to {mapper.lags} tokens back" if mapper.lags else ""
    return f"{_span(len(choice[0]) for choice in heads)} source heads a target {whose}{lags}"


def _span(counts: Iterable[int]) -> str:
    found = sorted(counts)
    return f"{found[0]}" if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def _calibration(artifact: "Artifact") -> str:
    facts = artifact.manifest.calibration
    if facts is None:
        return "not said (imported)"
    read = f"{facts.documents:,} documents, {facts.tokens:,} tokens, {facts.rows:,} rows"
    return f"{read}, {artifact.rows_an_input:.1f} an input"


def _identities(manifest: "Manifest") -> Table:
    table = Table(title="Pair", title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column in ("", "source", "target"):
        table.add_column(column, overflow="fold")
    source, target = (side.model_dump(mode="json") for side in (manifest.source, manifest.target))
    for side in (source, target):
        rope = side.pop("rope")
        side.pop("attention")
        side["rope"] = f"{rope['type']}, theta {rope['theta']:,.0f}"
        side["longest context"] = f"{rope['max_position_embeddings']:,} tokens"
    for name in {**source, **target}:
        # Only zero points may be left out: by whoever has none.
        values = (str(side.get(name, False)) for side in (source, target))
        table.add_row(name.replace("_", " "), *values)
    return table


def evidence_tables(evidence: "Evidence", rule: "Rule") -> RenderableType:
    """What was measured, a table for each domain, and what the rule makes of it."""
    from mappers.summary import summarise

    cells = summarise(evidence)
    domains = list(dict.fromkeys(key.domain for key in cells))
    measured = [_measured(evidence, cells, domain, rule) for domain in domains]
    return Group(*measured, *_deep(evidence), _decisions(evidence, domains, rule))


def _deep(evidence: "Evidence") -> Iterator[Table]:
    """Layers and drift, where they were measured: a line for each domain."""
    from mappers.summary import drift_points, layer_means

    if evidence.layers:
        table = Table(title="Layers, mean over heads", title_justify="left", box=box.SIMPLE)
        for column in ("domain", "R2 keys", "R2 values", "attention cosine", "worst layer"):
            table.add_column(column, justify="right")
        for domain, means in layer_means(evidence.layers).items():
            cosines = means["attention_cosine"]
            shown = (mean(means[name].values()) for name in ("r2_keys", "r2_values"))
            worst = min(cosines, key=lambda layer: cosines[layer])
            table.add_row(
                domain,
                *(f"{value:.3f}" for value in shown),
                f"{mean(cosines.values()):.3f}",
                f"{worst} ({cosines[worst]:.3f})",
            )
        yield table
    if evidence.drift:
        table = Table(title="Drift, KL by turn", title_justify="left", box=box.SIMPLE)
        for column in ("domain", "turn", "KL", "more than one translation"):
            table.add_column(column, justify="right")
        for (domain, turn), found in drift_points(evidence.drift).items():
            table.add_row(domain, f"{turn}", f"{found.kl.mean:.4f}", f"{found.added.mean:+.4f}")
        yield table


def _measured(
    evidence: "Evidence", cells: "dict[Setting, Cell]", domain: str, rule: "Rule"
) -> Table:
    from mappers.evidence import Arm
    from mappers.summary import by_setting, recovered

    grouped = by_setting(evidence)
    table = Table(
        title=f"KL, {domain}, first tokens known",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for key, cell in cells.items():
        if key[0] != domain or key[2] != Arm.TRANSLATED or key[4:] != (True, 0, 0):
            continue
        kls = grouped[key]
        alone = cells.get(key._replace(arm=Arm.LAST_TOKENS, prefix_known=False))
        nothing = cells.get(key._replace(arm=Arm.NO_CONTEXT, prefix_known=False, native_tail=0))
        gap, context = recovered(cells, key)
        table.add_row(
            f"{key.length}",
            f"{key.native_tail}",
            f"{cell.documents}",
            f"{cell.kl:.4f}",
            nats(rule.bound([row.kl for row in kls])),
            "-" if alone is None else f"{alone.kl:.3f}",
            "-" if nothing is None else f"{nothing.kl:.3f}",
            f"{cell.top1:.1%}",
            percent(gap),
            percent(context),
        )
    return table


_COLUMNS = (
    "tokens",
    "tail",
    "n",
    "KL",
    "bound",
    "alone",
    "none",
    "top-1",
    "gap",
    "context",
)


def _decisions(evidence: "Evidence", domains: list[str], rule: "Rule") -> Table:
    from mappers.accept import decide

    table = Table(
        title=f"Served: max_kl {rule.max_kl:g}, bounds hold for {_whom(rule)}, "
        f"{1 - rule.delta:.0%} sure",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for column in ("domain", "tokens", "first tokens known", "unknown"):
        table.add_column(column, overflow="fold")
    lengths = sorted({row.length for row in evidence.rows})
    for domain in domains:
        for length in lengths:
            verdicts = [
                decide(
                    evidence,
                    tokens=length,
                    domain=domain,
                    prefix_known=known,
                    rule=rule,
                )
                for known in (True, False)
            ]
            table.add_row(domain, f"{length}", *(_said(verdict) for verdict in verdicts))
    return table


def _whom(rule: "Rule") -> str:
    if rule.risk == "mean":
        return f"the mean, KLs cut at {rule.kl_clip:g}"
    return f"{1 - rule.alpha:.0%} of prompts"


def _said(verdict: "Verdict") -> str:
    if verdict.decision == "reprefill":
        if verdict.reason == "certified_kl_exceeds_threshold":
            return f"no: bound {nats(verdict.kl_bound)}"
        return f"no: {(verdict.reason or '').replace('_', ' ')}"
    return f"tail {verdict.native_tail}, bound {nats(verdict.kl_bound)}"


def nats(kl: float | None) -> str:
    """A KL for people; a dash where there is none."""
    return "-" if kl is None or math.isnan(kl) else f"{kl:.4f}"


def percent(share: float) -> str:
    """A share for people; a dash where it is not defined."""
    return f"{share:.1%}" if math.isfinite(share) else "-"
