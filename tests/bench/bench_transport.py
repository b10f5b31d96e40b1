"""What moving a cache costs, beside translating it: body, buffers, and two yardsticks.

    python tests/bench/bench_transport.py --geometry demo --tokens 1024 --tokens 4096

One JSON line a row on stdout, a table on stderr. ``path``: ``direct`` is the bare Translator in
this process, ``echo`` a raw ASGI server that takes the source's bytes and sends as many as the
target has, ``body`` and ``buffers`` are ``Client.translate`` against ``kvt serve``. ``over_direct``
and ``over_echo`` are seconds over theirs, ``beyond_direct_seconds`` what is left of the seconds
without ``direct``'s (of a few tokens: the fixed cost of a request), ``moving_over_echo`` the same
over ``echo``'s. ``peak_bytes_over_payload`` is what the first translation made the
server's own memory grow, with the leases where there are any, over the bytes of source and target.

All take turns, round after round, and the medians count, so that what else the machine does meets
all of them alike. Mappers are random, so the service is told to do without evidence.
"""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import httpx
import torch
import typer

from mappers import artifact
from mappers.bench_hardware import hardware, own_bytes
from mappers.bench_pairs import PAIRS, Pair, random_cache, random_mapper
from mappers.bench_rounds import Step, take_turns
from mappers.cache import DTYPES, KVCache
from mappers.identity import ModelIdentity
from mappers.layouts import Layout
from mappers.manifest import ManifestFacts
from mappers.mapper import Mapper
from mappers.translate import Translator
from service.buffer_pair import BufferPair
from service.client import Client, Translated
from service.demo.process import ServerProcess
from service.hf import claim_of
from service.memfd import file_bytes
from service.schemas import TranslateRequest
from service.upload import Upload
from tests.bench.echo import HEADER
from tests.bench.rows import told

TIMEOUT_SECONDS = 600.0
LEAST_SECONDS = 2.0


def main(
    geometry: Annotated[list[str], typer.Option(help="pairs to measure")] = ["demo"],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(help="lengths")] = [128, 1024, 4096],  # noqa: B006
    recipe: Annotated[str, typer.Option()] = "full_head",
    k: Annotated[int, typer.Option(help="source layers a target layer reads")] = 4,
    dtype: Annotated[str, typer.Option(help="of the caches, in and out")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="of one translation")] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, help="measurements behind each median, at least")
    ] = 5,
) -> None:
    """Print four JSON lines for every geometry and length, and a table."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    about = {"recipe": recipe, "k": k, "dtype": dtype, "threads": threads, "rounds": rounds}
    mappers = {name: random_mapper(PAIRS[name], recipe=recipe, k=k) for name in geometry}
    told(
        {"geometry": name, **about, **row, "hardware": hardware("cpu")}
        for name, mapper in mappers.items()
        for length in tokens
        for row in _rows(PAIRS[name], mapper, length, dtype, threads, rounds)
    )


def _rows(
    pair: Pair, mapper: Mapper, tokens: int, dtype: str, threads: int, rounds: int
) -> Iterator[dict[str, object]]:
    cache = random_cache(pair, tokens, DTYPES[dtype], "cpu")
    request = request_of(pair, tokens, dtype)
    payload = cache.nbytes + _target_bytes(mapper.target, tokens, dtype)
    peaks: dict[str, float] = {}
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        artifact.publish(folder / "artifacts", mapper, ManifestFacts(ridge=0.0), None)
        steps: dict[str, Step] = {"direct": _direct(mapper, cache)}
        url, pid = held.enter_context(_echo())
        steps["echo"] = _echoed(held, url, cache, request, payload - cache.nbytes)
        peaks["echo"] = _peak_bytes(pid, steps["echo"])
        for path in ("body", "buffers"):
            served = held.enter_context(_service(folder, path, threads))
            client = held.enter_context(Client(served.url, timeout=TIMEOUT_SECONDS))
            buffers = held.enter_context(client.buffers()) if path == "buffers" else None
            steps[path] = _translated(client, cache, request, buffers)
            leases = file_bytes(cache.nbytes) + file_bytes(payload - cache.nbytes)
            shared = leases if buffers else 0
            peaks[path] = _peak_bytes(served.pid, steps[path]) + shared
        seconds = take_turns(steps, rounds, least_seconds=LEAST_SECONDS)
    for path, spent in seconds.items():
        moving = (spent - seconds["direct"]) / seconds["echo"]
        yield {
            "path": path,
            "tokens": tokens,
            "seconds": round(spent, 5),
            "beyond_direct_seconds": round(spent - seconds["direct"], 5),
            "over_direct": round(spent / seconds["direct"], 3),
            "over_echo": round(spent / seconds["echo"], 3),
            "moving_over_echo": round(moving, 3) if path in ("body", "buffers") else None,
            "payload_bytes": payload,
            "peak_bytes_over_payload": (round(peaks[path] / payload, 3) if path in peaks else None),
        }


def request_of(pair: Pair, tokens: int, dtype: str) -> TranslateRequest:
    source, target = (
        claim_of(side).model_copy(update={"kv_dtype": dtype}) for side in pair.identities()
    )
    return TranslateRequest(source=source, target=target, tokens=tokens, layout=Layout.NHD)


def _target_bytes(target: ModelIdentity, tokens: int, dtype: str) -> int:
    numbers = 2 * target.num_layers * tokens * target.num_kv_heads * target.head_dim
    return numbers * DTYPES[dtype].itemsize


def _direct(mapper: Mapper, cache: KVCache) -> Step:
    translator = Translator(mapper)

    def step() -> None:
        for _ in translator.layers(cache, dtype=cache.dtype):
            pass

    return step


def _service(folder: Path, path: str, threads: int) -> ServerProcess:
    sharing = ["--buffers", str(folder / "socket")] if path == "buffers" else []
    limits = ["--allow-unproven", "--threads", str(threads), "--shadow-rate", "0"]
    return ServerProcess([folder / "artifacts"], *limits, *sharing)


def _translated(
    client: Client, cache: KVCache, request: TranslateRequest, buffers: BufferPair | None
) -> Step:
    def step() -> None:
        outcome = client.translate(cache, request, buffers=buffers, strict=True)
        expected = "body" if buffers is None else "buffers"
        if not isinstance(outcome, Translated) or outcome.transport != expected:
            raise RuntimeError(f"not translated by {expected}: {buffers and buffers.why_not}")

    return step


@contextmanager
def _echo() -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "tests.bench.echo"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None:
                raise RuntimeError("the echo has no output")
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid
        finally:
            process.terminate()


def _echoed(
    held: ExitStack, url: str, cache: KVCache, request: TranslateRequest, answer_bytes: int
) -> Step:
    """The source's bytes out, as the client sends them, the target's in."""
    http = held.enter_context(httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS))
    answer = memoryview(bytearray(answer_bytes))

    def step() -> None:
        upload = Upload.of(cache, request)
        headers = {**upload.headers, HEADER.decode(): str(answer_bytes)}
        with http.stream("POST", "/", content=iter(upload), headers=headers) as response:
            filled = 0
            for chunk in response.iter_bytes():
                answer[filled : filled + len(chunk)] = chunk
                filled += len(chunk)

    return step


def _peak_bytes(pid: int, step: Step) -> int:
    """How far a process's own memory (not what it shares) grows while it serves a step."""
    before, peak, done = own_bytes(pid), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], own_bytes(pid))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    step()
    done.set()
    watcher.join()
    return max(0, peak[0] - before)


if __name__ == "__main__":
    typer.run(main)
