"""Many clients at once, short requests beside long ones, and what loading and evicting costs.

    python tests/bench/bench_load.py                                  # about five minutes
    python tests/bench/bench_load.py --concurrency 8 --seconds 3 --no-loads --memory-requests 0

One JSON line a row on stdout, a table on stderr. ``case``: ``clients`` are as many clients as
``concurrency``, each with its next request as soon as its last is answered; ``short`` is one client
of short requests, first ``alone``, then ``beside long``, while others send long ones without a
pause (``slower``: over the median of ``alone``). ``errors`` are all answers but a translation, by
``reasons``, and count in no time. ``cold load`` reads an artifact that the system has forgotten,
``warm load`` one that it has just read, ``eviction`` one for which another must leave. ``memory``
is a server that answers one short request after the other: ``bytes_per_request`` is the slope of a
line through its own memory. Mappers are random: the service is told to do without evidence.
"""

import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, median, quantiles
from typing import Annotated

import torch
import typer

from mappers.bench_artifact import publish_random
from mappers.bench_hardware import hardware, own_bytes
from mappers.bench_pairs import PAIRS, Pair, random_cache
from mappers.cache import DTYPES
from service.client import Client, Translated
from service.demo.process import ServerProcess
from service.logs import configure
from service.settings import Settings
from service.store import Store
from tests.bench.bench_transport import request_of
from tests.bench.rows import Row, told

TIMEOUT_SECONDS = 600.0
MEMORY_TOKENS, MEMORY_SAMPLES = 16, 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What every client does: for so long, with caches of this pair."""

    pair: Pair
    dtype: str
    seconds: float
    buffers: bool


@dataclass(slots=True)
class Tally:
    """Seconds of each translation, and how often there was another answer."""

    seconds: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def row(self, elapsed_seconds: float) -> Row:
        """The figures of one case."""
        some = len(self.seconds) > 1
        return {
            "requests": len(self.seconds),
            "requests_per_second": round(len(self.seconds) / elapsed_seconds, 2),
            "p50_seconds": round(median(self.seconds), 5) if some else None,
            "p99_seconds": round(quantiles(self.seconds, n=100)[98], 5) if some else None,
            "errors": self.reasons.total(),
            "reasons": dict(self.reasons),
        }


def main(
    geometry: Annotated[str, typer.Option(help="pair")] = "demo",
    recipe: Annotated[str, typer.Option()] = "full_head",
    k: Annotated[int, typer.Option(help="source layers a target layer reads")] = 4,
    concurrency: Annotated[list[int], typer.Option()] = [1, 2, 4, 8, 16, 32, 64],  # noqa: B006
    tokens: Annotated[int, typer.Option(help="of a request; the short ones, too")] = 256,
    long_tokens: Annotated[int, typer.Option(help="of a long request")] = 8192,
    long_clients: Annotated[int, typer.Option(min=1)] = 2,
    dtype: Annotated[str, typer.Option(help="of the caches, in and out")] = "bfloat16",
    seconds: Annotated[float, typer.Option(help="of each case")] = 10.0,
    threads: Annotated[int, typer.Option(min=1, help="of one translation")] = 1,
    buffers: Annotated[bool, typer.Option(help="shared memory instead of bodies")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="loads behind each median")] = 5,
    loads: Annotated[bool, typer.Option(help="measure loading as well")] = True,
    memory_requests: Annotated[
        int, typer.Option(min=0, help="short requests, after one another, to see memory over")
    ] = 9000,
) -> None:
    """Print a JSON line for every case, and a table."""
    about = {"geometry": geometry, "recipe": recipe, "k": k, "dtype": dtype}
    about |= {"path": "buffers" if buffers else "body", "hardware": hardware("cpu")}
    load = Load(pair=PAIRS[geometry], dtype=dtype, seconds=seconds, buffers=buffers)

    def rows(folder: Path) -> Iterator[Row]:
        path = publish_random(geometry, recipe, k, torch.float32, folder / "artifacts")
        with _service(folder, threads, max(concurrency) + long_clients) as served:
            for clients in concurrency:
                yield _clients(served.url, load, clients, tokens)
            yield from _fairness(served.url, load, tokens, long_tokens, long_clients)
        if memory_requests:
            with _service(folder, threads, 1) as served:
                yield _memory(served, load, memory_requests)
        if loads:
            other = publish_random(geometry, "head_local", k, torch.float32, folder / "other")
            yield from _loads(path, other, rounds)

    with tempfile.TemporaryDirectory() as name:
        told({**about, **row} for row in rows(Path(name)))


def _service(folder: Path, threads: int, requests: int) -> ServerProcess:
    """One that turns nobody away for the number of those who ask."""
    # A client may have its answer, and ask again, a moment before its place is free.
    limits = ["--queue-requests", str(2 * requests), "--threads", str(threads)]
    sharing = ["--buffers", str(folder / "socket")]
    unproven = ["--allow-unproven", "--shadow-rate", "0"]
    return ServerProcess([folder / "artifacts"], *limits, *sharing, *unproven)


def _clients(url: str, load: Load, clients: int, tokens: int) -> Row:
    tally, elapsed = _together(url, load, [tokens] * clients)
    counted = _sum(tally)
    return {"case": "clients", "concurrency": clients, "tokens": tokens, **counted.row(elapsed)}


def _fairness(
    url: str, load: Load, tokens: int, long_tokens: int, long_clients: int
) -> Iterator[Row]:
    """Short requests alone, then beside long ones, and the long ones."""
    (alone,), elapsed = _together(url, load, [tokens])
    yield {"case": "short, alone", "concurrency": 1, "tokens": tokens, **alone.row(elapsed)}
    together = 1 + long_clients
    (short, *long), elapsed = _together(url, load, [tokens, *[long_tokens] * long_clients])
    row = short.row(elapsed)
    slower = median(short.seconds) / median(alone.seconds) if short.seconds else None
    said = {"slower": slower and round(slower, 2)}
    yield {"case": "short, beside long", "concurrency": together, "tokens": tokens, **row, **said}
    row = _sum(long).row(elapsed)
    yield {"case": "long, beside short", "concurrency": together, "tokens": long_tokens, **row}


def _sum(tallies: list[Tally]) -> Tally:
    reasons: Counter[str] = Counter()
    for tally in tallies:
        reasons += tally.reasons
    return Tally([spent for tally in tallies for spent in tally.seconds], reasons)


def _together(url: str, load: Load, lengths: list[int]) -> tuple[list[Tally], float]:
    """A client for each length, all at once; their tallies, and how long it took."""
    tallies, ready = [Tally() for _ in lengths], threading.Barrier(len(lengths) + 1)
    threads = [
        threading.Thread(target=_ask, args=(url, load, tokens, tally, ready))
        for tokens, tally in zip(lengths, tallies, strict=True)
    ]
    for thread in threads:
        thread.start()
    ready.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    return tallies, time.perf_counter() - started


def _ask(url: str, load: Load, tokens: int, tally: Tally, ready: threading.Barrier) -> None:
    """One client: a request after the other, the first of which only warms up."""
    cache = random_cache(load.pair, tokens, DTYPES[load.dtype], "cpu")
    request = request_of(load.pair, tokens, load.dtype)
    with ExitStack() as held:
        client = held.enter_context(Client(url, timeout=TIMEOUT_SECONDS))
        shared = held.enter_context(client.buffers()) if load.buffers else None
        client.translate(cache, request, buffers=shared)
        ready.wait()
        until = time.perf_counter() + load.seconds
        while (started := time.perf_counter()) < until:
            outcome = client.translate(cache, request, buffers=shared)
            if isinstance(outcome, Translated):
                tally.seconds.append(time.perf_counter() - started)
            else:
                tally.reasons[outcome.reason] += 1


def _memory(served: ServerProcess, load: Load, requests: int) -> Row:
    """What the server's own memory grows by, from request to request."""
    cache = random_cache(load.pair, MEMORY_TOKENS, DTYPES[load.dtype], "cpu")
    request = request_of(load.pair, MEMORY_TOKENS, load.dtype)
    sizes: dict[int, int] = {}
    with ExitStack() as held:
        client = held.enter_context(Client(served.url, timeout=TIMEOUT_SECONDS))
        shared = held.enter_context(client.buffers()) if load.buffers else None
        for number in range(requests):
            client.translate(cache, request, buffers=shared, strict=True)
            if number % (requests // MEMORY_SAMPLES or 1) == 0:
                sizes[number] = own_bytes(served.pid)
    slope = linear_regression(list(sizes), list(sizes.values())).slope
    said = {"tokens": MEMORY_TOKENS, "requests": requests, "bytes_per_request": round(slope, 1)}
    return {"case": "memory", **said, "grown_bytes": max(sizes.values()) - min(sizes.values())}


def _loads(path: Path, other: Path, rounds: int) -> Iterator[Row]:
    """Through the store that a service has, with a budget for either artifact but not for both."""
    sizes = [_files_bytes(folder) for folder in (path, other)]
    budget = sum(sizes) - min(sizes) // 2
    settings = Settings(
        artifacts=(path, other), allow_unproven=True, host_memory=budget, log_level="error"
    )
    configure(settings)
    store = Store(settings, lambda work: work())
    seconds: dict[str, list[float]] = {"cold load": [], "warm load": [], "eviction": []}
    first, second = store.entries
    for _ in range(rounds + 1):  # the first does not count
        _forget(path)
        for case, entry in (("cold load", first), ("warm load", first), ("eviction", second)):
            if case != "eviction":
                store.unload(entry)
            started = time.perf_counter()
            store.load(entry)
            seconds[case].append(time.perf_counter() - started)
        store.unload(second)
    evictions = sum(store.residency.evictions.values())
    store.close()
    for case, spent in seconds.items():
        size = sizes[case == "eviction"]
        row = {"case": case, "seconds": round(median(spent[1:]), 4), "artifact_bytes": size}
        yield {**row, "rounds": rounds, "evictions": evictions if case == "eviction" else 0}


def _files_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _forget(folder: Path) -> None:
    """Have the system drop what it remembers of the files; it has written them by now."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    typer.run(main)
