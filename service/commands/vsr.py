"""``kvt export`` and ``kvt import``: the mapper format of vLLM Semantic Router."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from service.commands import models
from service.commands.options import Config

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


def import_(
    folder: Folder,
    root: Annotated[Path, typer.Argument(help="The artifact becomes a folder in this one.")],
    source: models.Source,
    target: models.Target,
    config: Config = None,
    format: Format = "vsr",
    source_name: models.SourceName = None,
    source_version: models.SourceVersion = None,
    source_gguf: models.SourceGguf = None,
    source_drop_layers: models.SourceDropLayers = None,
    source_dtype: models.SourceDtype = "float32",
    target_name: models.TargetName = None,
    target_version: models.TargetVersion = None,
    target_gguf: models.TargetGguf = None,
    target_drop_layers: models.TargetDropLayers = None,
    target_dtype: models.TargetDtype = "float32",
) -> None:
    """Read a mapper in another project's format; it has no evidence until kvt evaluate adds it.

    The two models are loaded, because that format does not say all that must agree.
    """
    from mappers import vsr
    from mappers.models import load_model

    del config, format
    small = load_model(
        models.spec(
            source, source_name, source_version, source_gguf, source_drop_layers, source_dtype
        )
    )
    large = load_model(
        models.spec(
            target, target_name, target_version, target_gguf, target_drop_layers, target_dtype
        )
    )
    typer.echo(vsr.import_vsr(folder, root, small.identity, large.identity))
