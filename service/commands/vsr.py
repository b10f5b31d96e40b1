"""``kvt export`` and ``kvt import``: the mapper format of vLLM Semantic Router."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from service.commands.options import Config

Format = Annotated[Literal["vsr"], typer.Option(help="The other format.")]
Artifact = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Its folder.")]


def export(
    artifact: Artifact,
    folder: Annotated[Path, typer.Argument(help="Where the other format goes.")],
    config: Config = None,
    format: Format = "vsr",
) -> None:
    """Write a mapper in another project's format."""
    from mappers import artifact as artifacts
    from mappers import vsr

    del config, format
    typer.echo(vsr.export_vsr(artifacts.load(artifact), folder))
