"""How fast a cache is translated, beside two yardsticks of the same machine in the same run.

    python tests/bench/bench_translate.py --geometry smollm2-135m --tokens 1024 --tokens 4096

One JSON line a row on stdout, progress on stderr. ``gemm`` is the bare matrix multiplies: the
same weights, shapes and floating point operations, over inputs that lie ready in memory;
``prefill`` is the target's own prefill by transformers (sdpa, the last token's logits only), with
random weights. All take turns, round after round, and the medians count, so that what else
the machine does meets all of them alike.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

from mappers.cache import DTYPES, KVCache
from mappers.mapper import Mapper
from mappers.recipes import recipe_of
from mappers.translate import Translator
from tests.bench.geometries import PAIRS, Pair, random_cache, random_mapper

Step = Callable[[], None]

TOKENS = {
    "demo": [128, 512, 1024, 2048, 4096],
    "smollm2-135m": [128, 512, 1024, 2048, 4096],
    "qwen3-0.6b:qwen3-1.7b": [256, 512, 1024],
}


def main(
    geometry: Annotated[list[str], typer.Option(help="pairs to measure")] = [*PAIRS],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(help="lengths; default: by geometry")] = [],  # noqa: B006
    recipe: Annotated[list[str], typer.Option()] = ["full_head", "head_local"],  # noqa: B006
    k: Annotated[list[int], typer.Option(help="source layers a target layer reads")] = [4, 8],  # noqa: B006
    device: Annotated[str, typer.Option()] = "cpu",
    dtype: Annotated[str, typer.Option(help="of the caches, in and out")] = "float32",
    threads: Annotated[int | None, typer.Option(min=1, help="default: torch's own choice")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="measurements behind each median")] = 5,
) -> None:
    """Print a JSON line for every geometry, recipe, k and length."""
    torch.manual_seed(0)
    if threads is not None:
        torch.set_num_threads(threads)
    for name in geometry:
        pair = PAIRS[name]
        layers = pair.source.num_hidden_layers
        mappers = {
            (r, n): random_mapper(pair, recipe=r, k=n) for r in recipe for n in k if n <= layers
        }
        prefill = _target(pair, device)
        for length in tokens or TOKENS[name]:
            for row in _rows(pair, mappers, prefill, length, device, DTYPES[dtype], rounds):
                sys.stdout.write(json.dumps({"geometry": name, **row}) + "\n")
                sys.stdout.flush()


def _rows(
    pair: Pair,
    mappers: dict[tuple[str, int], Mapper],
    prefill: Callable[[int], Step],
    tokens: int,
    device: str,
    dtype: torch.dtype,
    rounds: int,
) -> Iterator[dict[str, object]]:
    cache = random_cache(pair, tokens, dtype, device)
    steps: dict[str, Step] = {"prefill": prefill(tokens)}
    for (recipe, k), mapper in mappers.items():
        steps[f"translate {recipe} {k}"] = _translation(mapper, cache, device)
        for way, step in _multiplies(mapper, tokens, device).items():
            steps[f"gemm {recipe} {k} {way}"] = step
    seconds = _take_turns(steps, rounds, device)
    for recipe, k in mappers:
        translate = tokens / seconds[f"translate {recipe} {k}"]
        gemm = tokens / min(s for n, s in seconds.items() if n.startswith(f"gemm {recipe} {k} "))
        own = tokens / seconds["prefill"]
        yield {
            "recipe": recipe,
            "k": k,
            "tokens": tokens,
            "translate_tokens_per_second": round(translate, 1),
            "gemm_tokens_per_second": round(gemm, 1),
            "prefill_tokens_per_second": round(own, 1),
            "translate_over_gemm": round(translate / gemm, 3),
            "translate_over_prefill": round(translate / own, 2),
            "device": device,
            "threads": torch.get_num_threads(),
            "cache_dtype": str(dtype).removeprefix("torch."),
            "rounds": rounds,
        }


def _take_turns(steps: dict[str, Step], rounds: int, device: str) -> dict[str, float]:
    """Median seconds of each step, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            _progress(f"{name}, round {turn} of {rounds}")
            elapsed = _timed(step, device)
            if turn:
                seconds[name].append(elapsed)
    _progress("")
    return {name: median(values) for name, values in seconds.items()}


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")


def _timed(step: Step, device: str) -> float:
    start = time.perf_counter()
    step()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _translation(mapper: Mapper, cache: KVCache, device: str) -> Step:
    translator = Translator(mapper, device=device)

    def step() -> None:
        for _ in translator.layers(cache, dtype=cache.dtype):
            pass

    return step


def _multiplies(mapper: Mapper, tokens: int, device: str) -> dict[str, Step]:
    """The products of ``Translator`` and nothing else, into a ready output, in two ways.

    One product a map and head group, or one batched product a map: which of them is faster depends
    on shapes and machine, and only the faster is a yardstick.
    """
    recipe, dtype = recipe_of(mapper), _compute_dtype(device)
    where: Any = {"device": torch.device(device), "dtype": dtype}
    weights = [
        recipe.prepare(affine, layer.sources, mapper.geometry, **where).weight
        for layer in mapper.layers
        for affine in (layer.keys, layer.values)
    ]
    groups, inputs, outputs = weights[0].shape
    x = torch.randn(groups, tokens, inputs, device=device, dtype=dtype)
    y = torch.empty(groups, tokens, outputs, device=device, dtype=dtype)

    def single() -> None:
        for weight in weights:
            for group in range(groups):
                torch.mm(x[group], weight[group], out=y[group])

    def batched() -> None:
        for weight in weights:
            torch.bmm(x, weight, out=y)

    return {"single": single, "batched": batched} if groups > 1 else {"single": single}


def _compute_dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


def _target(pair: Pair, device: str) -> Callable[[int], Step]:
    """The target with random weights; gives the prefill of a prompt of so many tokens."""
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        pair.target, attn_implementation="sdpa", dtype=_compute_dtype(device)
    )
    model = model.eval().to(device)

    def prefill(tokens: int) -> Step:
        ids = torch.randint(0, pair.target.vocab_size, (1, tokens), device=device)

        def step() -> None:
            with torch.inference_mode():
                model(ids, use_cache=True, logits_to_keep=1)

        return step

    return prefill


if __name__ == "__main__":
    typer.run(main)
