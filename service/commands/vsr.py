"""``kvt export`` and ``kvt import``: the mapper format of vLLM Semantic Router."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from service.commands import models
from service.commands.options import Config

if TYPE_CHECKING:
    from mappers.models import ModelSpec

Format = Annotated[Literal["vsr"], typer.Option(help="vsr: vLLM Semantic Router.")]
Folder = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Its folder.")]


def export(
    artifact: Folder,
    root: Annotated[Path, typer.Argument(help="The exported mapper becomes a folder in this one.")],
    config: Config = None,
    format: Format = "vsr",
    without_prefixes: Annotated[
        bool, typer.Option(help="Leave out the exact first tokens, which vsr cannot hold.")
    ] = False,
) -> None:
    """Write a mapper in another project's format; what that cannot hold is refused."""
    from mappers import artifact as artifacts
    from mappers import vsr

    del config, format
    loaded = artifacts.load(artifact)
    typer.echo(vsr.export_vsr(loaded, root, without_prefixes=without_prefixes))


@models.pair_options
def import_(
    folder: Folder,
    root: Annotated[Path, typer.Argument(help="The artifact becomes a folder in this one.")],
    source: "ModelSpec",
    target: "ModelSpec",
    config: Config = None,
    format: Format = "vsr",
) -> None:
    """Read a mapper in another project's format; it has no evidence until kvt evaluate adds it.

    The two models are loaded, because that format does not say all that must agree.
    """
    from mappers import vsr
    from mappers.models import load_model

    del config, format
    models.quiet()
    small, large = load_model(source), load_model(target)
    typer.echo(vsr.import_vsr(folder, root, small.identity, large.identity))
