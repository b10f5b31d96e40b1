"""How fast a cache is translated, beside yardsticks of the same machine in the same run.

    python tests/bench/bench_translate.py --geometry smollm2-135m --tokens 1024 --tokens 4096
    python tests/bench/bench_translate.py --peer --plots tests/bench/plots

One JSON line a row on stdout, progress and a table on stderr. ``mappers/bench_speed.py`` says what
``gemm``, ``prefill`` and ``copy`` are; ``peer`` is ``translate_cache`` of aither-kvcache 2.4.1 from
PyPI with the same artifact imported (``tests/bench/peer.py``). It knows dense maps only, so rows of
other recipes have none. ``translate_shares`` is where a translation's time goes
(``mappers/bench_profile.py``). What has no row is longer than fits in memory.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from mappers.bench_hardware import check_room, hardware
from mappers.bench_pairs import PAIRS, Pair, random_mapper
from mappers.bench_room import speed_bytes
from mappers.bench_speed import Conditions, Prefill, measure
from mappers.cache import DTYPES
from mappers.errors import TooLittleMemory
from mappers.mapper import Mapper
from mappers.translate import Translator
from tests.bench.peer import Peer
from tests.bench.rows import Row, told
from tests.bench.speed_plots import draw

LEAST_SECONDS = 2.0
TOKENS = {
    "demo": [128, 512, 1024, 2048, 4096, 8192],
    "smollm2-135m": [128, 512, 1024, 2048, 4096, 8192],
    "qwen3-0.6b:qwen3-1.7b": [128, 512, 1024, 2048, 4096],
}


def main(
    geometry: Annotated[list[str], typer.Option(help="pairs to measure")] = [*TOKENS],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(help="lengths; default: by geometry")] = [],  # noqa: B006
    recipe: Annotated[list[str], typer.Option()] = ["full_head", "head_local", "top_heads"],  # noqa: B006
    k: Annotated[list[int], typer.Option(help="source layers a target layer reads")] = [4, 8],  # noqa: B006
    device: Annotated[str, typer.Option()] = "cpu",
    dtype: Annotated[str, typer.Option(help="of the caches, in and out")] = "float32",
    threads: Annotated[int | None, typer.Option(min=1, help="default: torch's own choice")] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="measurements behind each median, at least")
    ] = 5,
    prefill: Annotated[bool, typer.Option(help="measure the target's own prefill")] = True,
    peer: Annotated[bool, typer.Option(help="measure aither-kvcache, installed from PyPI")] = False,
    peer_folder: Annotated[
        Path | None, typer.Option(help="where that is installed already")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="folder for PNG files")] = None,
) -> None:
    """Print a JSON line for every geometry, recipe, k and length, and a table."""
    torch.manual_seed(0)
    if threads is not None:
        torch.set_num_threads(threads)
    conditions = Conditions(
        device=device,
        dtype=DTYPES[dtype],
        rounds=rounds,
        least_seconds=LEAST_SECONDS,
        shares=True,
        progress=_progress,
    )
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        package = peer_folder or (Peer.installed(folder) if peer else None)
        maps = [(r, n) for r in recipe for n in k]
        rows = told(
            row
            for name in geometry
            for row in _rows(name, tokens or TOKENS[name], maps, conditions, prefill, package)
        )
    if plots is not None:
        draw(rows, plots)


def _rows(
    name: str,
    lengths: list[int],
    maps: list[tuple[str, int]],
    conditions: Conditions,
    with_prefill: bool,
    package: Path | None,
) -> Iterator[Row]:
    pair = PAIRS[name]
    prefill = Prefill(pair, conditions.device) if with_prefill else None
    for recipe, k in maps:
        if k <= pair.source.num_hidden_layers:
            mapper = random_mapper(pair, recipe=recipe, k=k)
            about = {"geometry": name, "recipe": recipe, "k": k}
            for row in _lengths(pair, mapper, k, lengths, conditions, prefill, package):
                yield {**about, **row, **_circumstances(conditions)}


def _lengths(
    pair: Pair,
    mapper: Mapper,
    k: int,
    lengths: list[int],
    conditions: Conditions,
    prefill: Prefill | None,
    package: Path | None,
) -> Iterator[Row]:
    translator = Translator(mapper, device=conditions.device)
    with ExitStack() as held:
        dense = mapper.recipe == "full_head" and conditions.device == "cpu"
        peer = held.enter_context(Peer(package, mapper)) if package and dense else None
        for tokens in lengths:
            needed_bytes = speed_bytes(pair, k, tokens, conditions.dtype)
            try:
                check_room(needed_bytes, conditions.device, f"caches of {tokens} tokens")
            except TooLittleMemory as error:
                sys.stderr.write(f"{error}\n")
                return
            speed = measure(
                pair,
                translator,
                tokens,
                conditions,
                prefill=prefill,
                peer=peer.step if peer else None,
            )
            yield asdict(speed)


def _circumstances(conditions: Conditions) -> Row:
    return {
        "device": conditions.device,
        "hardware": hardware(conditions.device),
        "threads": torch.get_num_threads(),
        "cache_dtype": str(conditions.dtype).removeprefix("torch."),
        "rounds": conditions.rounds,
    }


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")


if __name__ == "__main__":
    typer.run(main)
