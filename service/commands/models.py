"""The options that name a pair of models, and the ``ModelSpec`` of each side."""

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError

from service.commands.exits import Code, Failure, fault_of

if TYPE_CHECKING:
    from mappers.models import ModelSpec

Dtype = Literal["float32", "float16", "bfloat16"]
# As in mappers/quantize.py, which a command's help need not wait for.
StorageDtype = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
ScaleScheme = Literal["none", "per_tensor", "per_head", "per_token_head"]
SIDES = ("source", "target")
_OPTIONS: dict[str, tuple[Any, object, str]] = {
    "name": (str | None, None, "What requests call it (default: the folder's name or hub id)."),
    "version": (str | None, None, "Immutable version (default: the weights' digest or commit)."),
    "gguf": (str | None, None, "GGUF file inside the folder."),
    "drop_layers": (str | None, None, "Decoder layers to leave out, such as 10-17 or 3,5."),
    "dtype": (Dtype, "float32", "What it computes in."),
    "kv_dtype": (StorageDtype | None, None, "What its engine stores caches in (default: dtype)."),
    "kv_scales": (ScaleScheme, "none", "Scales of an 8-bit cache."),
    "kv_zero_points": (bool, False, "An int8 cache with zero points."),
}
_ANNOTATED: Any = Annotated


def pair_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes ``source`` and ``target``, each a ModelSpec, options for both."""

    def run(**given: Any) -> None:
        for side in SIDES:
            options = {name: given.pop(f"{side}_{name}") for name in _OPTIONS}
            given[side] = spec(given[side], **options)
        command(**given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        folder = _option(name, "", str, inspect.Parameter.empty, "Folder, or its id on the hub.")
        parameters.append(folder if name in SIDES else _keyword(parameter))
    for side in SIDES:
        parameters += [_option(side, f"_{name}", *what) for name, what in _OPTIONS.items()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _keyword(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def _option(side: str, name: str, kind: Any, default: object, what: str) -> inspect.Parameter:
    info = typer.Option(help=what, rich_help_panel=f"{side.capitalize()} model")
    return inspect.Parameter(
        f"{side}{name}",
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=_ANNOTATED[kind, info],
    )


def spec(
    path: str,
    *,
    name: str | None,
    version: str | None,
    gguf: str | None,
    drop_layers: str | None,
    **rest: Any,
) -> "ModelSpec":
    """The spec that one side's options describe; the others are fields of the same name."""
    from mappers.models import ModelSpec

    try:
        return ModelSpec(
            path=path,
            name=name,
            version=version,
            gguf_file=gguf,
            drop_layers=layer_numbers(drop_layers) if drop_layers else (),
            **rest,
        )
    except ValidationError as error:
        raise Failure(Code.USAGE, fault_of(error)) from error


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
