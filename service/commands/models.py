"""The options that name a pair of models, and the ``ModelSpec`` of each side."""

import re
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from mappers.models import ModelSpec

Dtype = Literal["float32", "float16", "bfloat16"]


def _side(side: str, what: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(help=what, rich_help_panel=f"{side} model")
    return option


_FOLDER = "Folder of the model, or its id on the hub."
_NAME = "What requests call it (default: the folder's name or the hub id)."
_VERSION = "Immutable version (default: digest of the weights, or the hub's commit)."
_GGUF = "GGUF file inside the folder."
_DROP = "Decoder layers to leave out, such as 10-17 or 3,5."
_DTYPE = "What it computes in."

Source = Annotated[str, _side("Source", _FOLDER)]
SourceName = Annotated[str | None, _side("Source", _NAME)]
SourceVersion = Annotated[str | None, _side("Source", _VERSION)]
SourceGguf = Annotated[str | None, _side("Source", _GGUF)]
SourceDropLayers = Annotated[str | None, _side("Source", _DROP)]
SourceDtype = Annotated[Dtype, _side("Source", _DTYPE)]
Target = Annotated[str, _side("Target", _FOLDER)]
TargetName = Annotated[str | None, _side("Target", _NAME)]
TargetVersion = Annotated[str | None, _side("Target", _VERSION)]
TargetGguf = Annotated[str | None, _side("Target", _GGUF)]
TargetDropLayers = Annotated[str | None, _side("Target", _DROP)]
TargetDtype = Annotated[Dtype, _side("Target", _DTYPE)]


def spec(
    path: str,
    name: str | None,
    version: str | None,
    gguf_file: str | None,
    dropped: str | None,
    dtype: Dtype,
) -> "ModelSpec":
    """The spec that one side's options describe."""
    from mappers.models import ModelSpec

    return ModelSpec(
        path=path,
        name=name,
        version=version,
        gguf_file=gguf_file,
        drop_layers=layer_numbers(dropped) if dropped else (),
        dtype=dtype,
    )


def quiet() -> None:
    """No bar of transformers' own while a model is loaded."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]


def layer_numbers(text: str) -> tuple[int, ...]:
    """``10-12,15`` as (10, 11, 12, 15). Raises BadParameter."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None:
            raise typer.BadParameter("layers are given like 10-17 or 3,5")
        first, last = int(match[1]), int(match[2] or match[1])
        found.extend(range(first, last + 1))
    return tuple(found)
