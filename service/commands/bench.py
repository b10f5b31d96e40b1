"""``kvt bench``: what translating costs on this machine, beside its own matrix multiplies."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.commands.options import Config, Device

if TYPE_CHECKING:
    from mappers.bench_pairs import Pair
    from mappers.bench_speed import Conditions, Prefill
    from service.sizing import Load

Row = dict[str, Any]
TOKENS = [1024, 4096]
MIB = 1 << 20
NOT_HERE = ("peer_tokens_per_second", "translate_shares")


def bench(
    geometry: Annotated[
        list[str], typer.Option(help="Shapes of a pair, with random weights; may be repeated.")
    ] = ["smollm2-135m"],  # noqa: B006
    recipe: Annotated[list[str], typer.Option(help="May be repeated.")] = [  # noqa: B006
        "full_head",
        "head_local",
    ],
    k: Annotated[list[int], typer.Option(min=1, help="Source layers read; may be repeated.")] = [8],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(min=1, help="Prompts' lengths.")] = TOKENS,
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="Of both caches.")] = "bfloat16",
    weights: Annotated[str, typer.Option(help="Dtype of the artifact's weights.")] = "float32",
    threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements behind each median.")] = 5,
    prefill: Annotated[bool, typer.Option(help="Measure the target's own prefill as well.")] = True,
    folder: Annotated[
        Path | None, typer.Option(help="Where the artifact goes meanwhile; default: a temporary.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON line a row, no table.")] = False,
    config: Config = None,
) -> None:
    """Measure translations of these shapes here: tokens a second, and what loading takes.

    An artifact is made of random weights, loaded as the service would, and run. Beside each
    translation: bare matrix multiplies of the same operations and the target's prefill, all in
    turns, medians. What would not fit in memory is refused, or left out where it is the prefill.
    """
    import torch

    from mappers.bench_pairs import PAIRS
    from mappers.bench_speed import Conditions
    from mappers.cache import DTYPES

    del config
    _known("geometry", geometry, _geometries())
    _known("recipe", recipe, _recipes())
    _known("dtype", [dtype], ["float32", "float16", "bfloat16"])
    _known("weights", [weights], ["float32", "bfloat16"])
    layers = min(PAIRS[name].source.num_hidden_layers for name in geometry)
    if max(k) > layers:
        raise typer.BadParameter(f"k is {max(k)}, and a source has {layers} layers")
    if threads is not None:
        torch.set_num_threads(threads)
    conditions = Conditions(device=device, dtype=DTYPES[dtype], rounds=rounds, progress=_progress)
    rows: list[Row] = []
    for name in geometry:
        own = _prefill(PAIRS[name], device) if prefill else None
        for shape in ((r, n) for r in recipe for n in k):
            for row in _rows(name, *shape, tokens, conditions, DTYPES[weights], own, folder):
                rows.append(row)
                if as_json:
                    typer.echo(json.dumps(row))
    if not as_json:
        _show(rows)


def _rows(
    name: str,
    recipe: str,
    k: int,
    lengths: list[int],
    conditions: "Conditions",
    weights: Any,
    prefill: "Prefill | None",
    folder: Path | None,
) -> Iterator[Row]:
    """A row a length. Raises TooLittleMemory before anything is made."""
    import torch

    from mappers.bench_artifact import publish_random
    from mappers.bench_hardware import hardware
    from mappers.bench_pairs import PAIRS
    from mappers.bench_room import check_sizes
    from mappers.bench_speed import measure
    from service.sizing import loaded_artifact

    pair = PAIRS[name]
    with ExitStack() as held:
        root = Path(held.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        disk_bytes = shutil.disk_usage(root).free
        where: Any = {"device": conditions.device, "dtype": conditions.dtype}
        check_sizes(pair, recipe, k, weights, max(lengths), **where, disk_bytes=disk_bytes)
        path = publish_random(name, recipe, k, weights, root)
        loaded, load = held.enter_context(loaded_artifact(path, conditions.device))
        for tokens in lengths:
            speed = measure(pair, loaded.translator, tokens, conditions, prefill=prefill)
            yield {
                "geometry": name,
                "recipe": recipe,
                "k": k,
                **{field: value for field, value in asdict(speed).items() if field not in NOT_HERE},
                **_sizes(load),
                "device": conditions.device,
                "hardware": hardware(conditions.device),
                "threads": torch.get_num_threads(),
                "cache_dtype": str(conditions.dtype).removeprefix("torch."),
                "rounds": conditions.rounds,
            }


def _sizes(load: "Load") -> Row:
    peak = load.peak_bytes
    return {
        "load_seconds": round(load.seconds, 3),
        "artifact_bytes": load.artifact_bytes,
        "load_peak_bytes": peak,
        "load_peak_bytes_over_artifact": None if peak is None else peak - load.artifact_bytes,
    }


def _prefill(pair: "Pair", device: str) -> "Prefill | None":
    from mappers.bench_hardware import free_bytes
    from mappers.bench_room import model_bytes
    from mappers.bench_speed import Prefill

    free = free_bytes(device)
    fits = free is None or model_bytes(pair.target, device) <= free
    return Prefill(pair, device) if fits else None


def _show(rows: list[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(rows[0]["hardware"], highlight=False)
    heads = ("tokens", "tokens/s", "x gemm", "x prefill", "load s", "MiB", "peak MiB")
    for name in dict.fromkeys(row["geometry"] for row in rows):
        table = Table("recipe", box=box.SIMPLE, pad_edge=False, title=name, title_justify="left")
        table.padding = (0, 1, 0, 0)
        for head in heads:
            table.add_column(head, justify="right")
        for row in rows:
            if row["geometry"] == name:
                table.add_row(*_cells(row))
        console.print(table)


def _cells(row: Row) -> list[str]:
    peak, over = row["load_peak_bytes"], row["translate_over_prefill"]
    return [
        f"{row['recipe']} k={row['k']}",
        f"{row['tokens']:,}",
        f"{row['translate_tokens_per_second']:,.0f}",
        f"{row['translate_over_gemm']:.2f}",
        "-" if over is None else f"{over:.1f}",
        f"{row['load_seconds']:.2f}",
        f"{row['artifact_bytes'] / MIB:,.0f}",
        "-" if peak is None else f"{peak / MIB:,.0f}",
    ]


def _known(option: str, given: list[str], known: list[str]) -> None:
    for name in given:
        if name not in known:
            raise typer.BadParameter(f"{option} is one of {', '.join(known)}")


def _geometries() -> list[str]:
    from mappers.bench_pairs import PAIRS

    return list(PAIRS)


def _recipes() -> list[str]:
    from mappers.recipes import RECIPES

    return list(RECIPES)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
