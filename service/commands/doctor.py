"""``kvt doctor``: what of a deployment is as it should be, and what to change."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from service.commands.options import Config
from service.settings import Settings

if TYPE_CHECKING:
    from service.doctor.findings import Finding

_PORT = Settings.model_fields["port"].default
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
_ENGINE = "vLLM"


def doctor(
    url: Annotated[str, typer.Option(help="The service.")] = f"http://127.0.0.1:{_PORT}",
    source: Annotated[
        str | None, typer.Option(help="MODEL or MODEL@VERSION that caches come from.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="MODEL or MODEL@VERSION that is to read them.")
    ] = None,
    config: Config = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="A layout that a client declares.")
    ] = None,
    socket: Annotated[
        str | None, typer.Option(help="The service's socket, if it is mounted elsewhere here.")
    ] = None,
    vllm_config: Annotated[
        str | None,
        typer.Option(
            help="What --kv-transfer-config says: a JSON text, or a file of it.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    vllm_version: Annotated[
        str | None, typer.Option(help="Of the engine (default: here).", rich_help_panel=_ENGINE)
    ] = None,
    cache_salt: Annotated[
        str | None,
        typer.Option(help="Of requests that may load.", rich_help_panel=_ENGINE),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Check a deployment from where a client or an engine runs, and say what to change.

    Nothing is translated. The exit code is that of the first check that failed, or 0.
    """
    from service.doctor.rounds import Asked, examine

    del config
    asked = Asked(
        url=url,
        source=source,
        target=target,
        layouts=tuple(layout or ()),
        socket=socket,
        vllm_config=vllm_config,
        vllm_version=vllm_version,
        cache_salt=cache_salt,
    )
    findings = examine(asked)
    failed = next((finding.code for finding in findings if finding.code is not None), None)
    if as_json:
        checks = [finding.model_dump(mode="json") for finding in findings]
        typer.echo(json.dumps({"ok": failed is None, "checks": checks}, indent=2))
    else:
        _show(findings)
    if failed is not None:
        raise typer.Exit(int(failed))


def _show(findings: "list[Finding]") -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    columns = (Column(name, overflow="fold") for name in ("", "check", "found", "change"))
    table = Table(*columns, box=box.SIMPLE, pad_edge=False)
    for finding in findings:
        verdict = f"[{_STYLES[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(verdict, *map(escape, (finding.check, finding.found, finding.change)))
    Console().print(table)
