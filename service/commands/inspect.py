"""``kvt inspect``: what an artifact is, how good it was measured to be, and what it may serve."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table

from service.commands.options import Config

if TYPE_CHECKING:
    from mappers.artifact import Artifact
    from mappers.evidence import Evidence, Verdict
    from mappers.manifest import Manifest
    from mappers.summary import Cell, Setting

_RULE = "Threshold"


def inspect(
    artifact: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Its folder.")],
    config: Config = None,
    max_kl: Annotated[
        float, typer.Option(min=0, help="Nats a token.", rich_help_panel=_RULE)
    ] = 0.05,
    alpha: Annotated[
        float, typer.Option(help="Share of answers that may exceed it.", rich_help_panel=_RULE)
    ] = 0.1,
    delta: Annotated[
        float, typer.Option(help="1 - confidence of that.", rich_help_panel=_RULE)
    ] = 0.05,
) -> None:
    """Show an artifact: pair, recipe, sizes, measured KL, and for which prompts it may be used."""
    from mappers import artifact as artifacts

    del config
    if not (0 < alpha < 1 and 0 < delta < 1):
        raise typer.BadParameter("alpha and delta lie between 0 and 1")
    loaded = artifacts.load(artifact)
    console = Console()
    console.print(_facts(loaded), _identities(loaded.manifest), sep="\n")
    if loaded.evidence is None:
        console.print("[bold]Not servable[/]: it has no evidence. kvt evaluate adds some.")
        return
    console.print(evidence_tables(loaded.evidence, max_kl=max_kl, alpha=alpha, delta=delta))


def _facts(artifact: "Artifact") -> Table:
    manifest = artifact.manifest
    counts = sorted({len(sources) for sources in manifest.sources})
    read = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    table = Table(title=manifest.mapper_id, show_header=False, title_justify="left")
    rows = {
        "digest": artifact.digest,
        "made": f"{manifest.created_at:%Y-%m-%d %H:%M} UTC, bundle {manifest.bundle_version}",
        "recipe": f"{manifest.recipe}, {read} source layers a target layer, ridge "
        f"{manifest.ridge:g}, first {manifest.skipped_positions} positions left out",
        "fitted on": _calibration(manifest),
        "size": f"{manifest.weight_bytes / 1e6:.1f} MB of {manifest.weights_dtype} weights, "
        f"{manifest.prefix_bytes / 1e6:.2f} MB for {len(artifact.mapper.prefixes)} exact prefixes",
        "work": f"{manifest.flops_per_token / 1e6:.2f} MFLOP a token",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _calibration(manifest: "Manifest") -> str:
    facts = manifest.calibration
    if facts is None:
        return "not said (imported)"
    return f"{facts.documents:,} documents, {facts.tokens:,} tokens, {facts.rows:,} rows"


def _identities(manifest: "Manifest") -> Table:
    table = Table("", "source", "target", title="Pair", title_justify="left")
    source, target = (side.model_dump(mode="json") for side in (manifest.source, manifest.target))
    for side in (source, target):
        rope = side.pop("rope")
        side.pop("attention")
        side["rope"] = f"{rope['type']}, theta {rope['theta']:,.0f}"
        side["longest context"] = f"{rope['max_position_embeddings']:,} tokens"
    for name in source:
        table.add_row(name.replace("_", " "), str(source[name]), str(target[name]))
    return table


def evidence_tables(
    evidence: "Evidence", *, max_kl: float, alpha: float, delta: float
) -> RenderableType:
    """A table for each domain: KL by length and tail, its bound, and the verdict of each length."""
    from mappers.summary import summarise

    cells = summarise(evidence)
    domains = dict.fromkeys(key.domain for key in cells)
    rule = f"P(KL > bound) <= {alpha:g} with confidence {1 - delta:g}; threshold {max_kl:g}"
    tables: list[RenderableType] = []
    for domain in domains:
        table = Table(title=f"Evidence, {domain}", caption=rule, title_justify="left")
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "served" else "right")
        for row in _rows(evidence, cells, domain, max_kl, alpha, delta):
            table.add_row(*row)
        tables.append(table)
    return Group(*tables)


_COLUMNS = (
    "tokens",
    "native tail",
    "prompts",
    "KL [95 %]",
    "bound",
    "tail alone",
    "no context",
    "top-1",
    "gap",
    "context",
    "served",
)


def _rows(
    evidence: "Evidence",
    cells: "dict[Setting, Cell]",
    domain: str,
    max_kl: float,
    alpha: float,
    delta: float,
) -> Iterator[list[str]]:
    from mappers.evidence import Arm, decide, kl_bound
    from mappers.summary import recovered

    for key, cell in cells.items():
        if (key.domain, key.arm, key.prefix_known) != (domain, Arm.TRANSLATED, True):
            continue
        kls = [row.kl for row in evidence.rows if _matches(row, key)]
        bound = kl_bound(kls, alpha, delta)
        verdict = decide(
            evidence,
            tokens=key.length,
            domain=domain,
            prefix_known=True,
            max_kl=max_kl,
            alpha=alpha,
            delta=delta,
        )
        alone = cells.get(key._replace(arm=Arm.LAST_TOKENS, prefix_known=False))
        nothing = cells.get(key._replace(arm=Arm.NO_CONTEXT, prefix_known=False, native_tail=0))
        gap, context = recovered(cells, key)
        yield [
            f"{key.length:,}",
            f"{key.native_tail:,}",
            f"{cell.documents}",
            f"{cell.kl:.4f} [{cell.low:.4f}, {cell.high:.4f}]",
            "-" if bound is None else f"{bound:.4f}",
            "-" if alone is None else f"{alone.kl:.4f}",
            "-" if nothing is None else f"{nothing.kl:.4f}",
            f"{cell.top1:.1%}",
            percent(gap),
            percent(context),
            _served(verdict, key.native_tail),
        ]


def _matches(row: object, key: "Setting") -> bool:
    names = ("domain", "length", "arm", "native_tail", "prefix_known")
    return all(getattr(row, name) == getattr(key, name) for name in names)


def _served(verdict: "Verdict", tail: int) -> str:
    if verdict.decision == "reprefill":
        return f"no: {verdict.reason}"
    return "[bold]yes[/]" if verdict.native_tail == tail else f"with tail {verdict.native_tail}"


def percent(share: float) -> str:
    """A share for people; a dash where it is not defined."""
    return f"{share:.1%}" if math.isfinite(share) else "-"
