"""Options that several commands share.

Where an option comes from, first match wins: the command line, the environment
(``KVT_<COMMAND>_<OPTION>``; ``KVT_<OPTION>`` for ``serve``), the YAML file of ``--config``, the
default.
"""

import re
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml


def check_device(name: str) -> str:
    """A device that is there. torch is imported only to look for a GPU."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise typer.BadParameter("a device is cpu, cuda or cuda:N")
    if name != "cpu":
        from torch import cuda

        if int(name.partition(":")[2] or 0) >= cuda.device_count():
            raise typer.BadParameter(f"there are {cuda.device_count()} CUDA devices here")
    return name


Device = Annotated[str, typer.Option(callback=check_device, help="cpu, cuda or cuda:N.")]


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; option names may be written with ``-`` or ``_``."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise typer.BadParameter("the file is not YAML") from error
    if not isinstance(values, dict):
        raise typer.BadParameter("the file must hold a mapping of options to values")
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def use_config(context: typer.Context, path: Path | None) -> Path | None:
    """Values of the file become the defaults of this command; an unknown one is an error."""
    if path is None:
        return None
    values = read_yaml(path)
    known = {p.name for p in context.command.params} - {"config"}
    if unknown := sorted(set(values) - known):
        raise typer.BadParameter(f"no such option: {', '.join(unknown)}")
    context.default_map = {**(context.default_map or {}), **values}
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        is_eager=True,
        callback=use_config,
        help="YAML file with values for any of these options.",
        rich_help_panel="Configuration",
    ),
]
