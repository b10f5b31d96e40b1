"""What it would bring to compute several short requests of one pair together, and its cost.

    python tests/bench/bench_batch.py --geometry qwen3-0.6b:qwen3-1.7b --tokens 32 --tokens 128

One JSON line a row, a table on stderr; times are processor time, so that a busy machine matters
less. The matrix products of a translation are made over the rows of ``requests`` requests: one
after another (``apart``), in one product (``together``), and for a single request padded to the
``padded_rows`` that every product must have if bits are not to depend on who else is there
(``alone_padded`` against ``alone``). ``bits_as_alone``: whether a request's rows come out of the
common product as they do on their own; ``bits_by_place``: whether in a product of ``padded_rows``
they are the same at any place, whatever lies beside them.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Annotated

import torch
import typer
from torch import Tensor

from mappers.bench_pairs import PAIRS, random_mapper
from mappers.mapper import Mapper
from mappers.recipes import recipe_of
from tests.bench.rows import Row, told

PADDED_ROWS = 256
GEOMETRIES = ["demo", "smollm2-135m", "qwen3-0.6b:qwen3-1.7b"]


def main(
    geometry: Annotated[list[str], typer.Option(help="pairs to measure")] = GEOMETRIES,
    tokens: Annotated[list[int], typer.Option(help="rows of a request")] = [32, 64, 128, 256],  # noqa: B006
    recipe: Annotated[list[str], typer.Option()] = ["full_head", "head_local"],  # noqa: B006
    k: Annotated[int, typer.Option(help="source layers a target layer reads")] = 4,
    requests: Annotated[int, typer.Option(min=2, help="that come at once")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="measurements behind each median")] = 5,
) -> None:
    """Print a JSON line for every geometry, recipe and length, and a table."""
    torch.manual_seed(0)

    def measured() -> Iterator[Row]:
        for name in geometry:
            for one in recipe:
                products = Products(random_mapper(PAIRS[name], recipe=one, k=k))
                for rows in tokens:
                    found = products.measured(rows, requests, rounds)
                    yield {"geometry": name, "recipe": one, "k": k, **found}

    told(measured())


class Products:
    """All matrix products of one mapper, weights ``[G, inputs, outputs]`` each, on the CPU."""

    def __init__(self, mapper: Mapper) -> None:
        recipe = recipe_of(mapper)
        self._weights = [
            recipe.prepare(
                affine,
                layer.sources,
                mapper.geometry,
                device=torch.device("cpu"),
                dtype=torch.float32,
            ).weight
            for layer in mapper.layers
            for affine in (layer.keys, layer.values)
        ]
        self._groups, self._inputs, self._outputs = self._weights[0].shape

    def measured(self, rows: int, requests: int, rounds: int) -> dict[str, object]:
        """Median seconds of each way, and whether bits agree."""
        parts = [self._rows(rows) for _ in range(requests)]
        joined, padded = torch.cat(parts, dim=1), max(rows, PADDED_ROWS)
        filled = torch.cat([parts[0], self._rows(padded - rows)], dim=1)
        moved = torch.cat([self._rows(padded - rows), parts[0]], dim=1)
        ways: dict[str, Callable[[], None]] = {
            "apart_seconds": lambda: self._all(*parts),
            "together_seconds": lambda: self._all(joined),
            "alone_seconds": lambda: self._all(parts[0]),
            "alone_padded_seconds": lambda: self._all(filled),
        }
        seconds = _take_turns(ways, rounds)
        alone = self._first(parts[0])
        first, last = self._first(filled)[:, :rows], self._first(moved)[:, padded - rows :]
        return {
            "tokens": rows,
            "requests": requests,
            "padded_rows": padded,
            **{name: round(value, 5) for name, value in seconds.items()},
            "apart_over_together": round(seconds["apart_seconds"] / seconds["together_seconds"], 2),
            "padded_over_alone": round(
                seconds["alone_padded_seconds"] / seconds["alone_seconds"], 2
            ),
            "bits_as_alone": torch.equal(self._first(joined)[:, :rows], alone),
            "bits_by_place": torch.equal(first, last),
            "threads": torch.get_num_threads(),
            "rounds": rounds,
        }

    def _rows(self, rows: int) -> Tensor:
        return torch.randn(self._groups, rows, self._inputs)

    def _all(self, *requests: Tensor) -> None:
        for x in requests:
            out = torch.empty(self._groups, x.shape[1], self._outputs)
            for weight in self._weights:
                _multiply(x, weight, out)

    def _first(self, x: Tensor) -> Tensor:
        return _multiply(x, self._weights[0], torch.empty(*x.shape[:2], self._outputs))


def _multiply(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    if out.shape[0] == 1:
        torch.mm(x[0], weight[0], out=out[0])
    else:
        torch.bmm(x, weight, out=out)
    return out


def _take_turns(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            started = time.process_time()
            way()
            if turn:
                seconds[name].append(time.process_time() - started)
    return {name: median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    typer.run(main)
