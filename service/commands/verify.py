"""``kvt verify``: is this artifact whole, unaltered and usable."""

from pathlib import Path
from typing import Annotated

import typer

from service.commands.options import Config


def verify(
    artifacts: Annotated[
        list[Path], typer.Argument(exists=True, file_okay=False, help="Their folders.")
    ],
    config: Config = None,
) -> None:
    """Check every digest, shape and value of artifacts; nothing is printed but what holds."""
    from mappers import artifact as files

    del config
    for folder in artifacts:
        loaded = files.load(folder)
        evidence = f"{len(loaded.evidence.rows)} rows" if loaded.evidence else "none"
        typer.echo(f"{loaded.manifest.mapper_id}: intact, {loaded.digest}, evidence: {evidence}")
