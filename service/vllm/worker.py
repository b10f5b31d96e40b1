"""A worker's side: copies between the engine's blocks and leases, on a thread of its own.

A lease holds keys and values ``[T, H, D]`` of each layer, end to end, all heads of the model. A
rank of a tensor-parallel engine has ``h`` of the H heads and copies only those.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.errors import KVTranslatorError
from service.vllm.jobs import Export, Jobs, Load
from service.vllm.layout import BlockLayout
from service.vllm.seal import mark

log = logging.getLogger("vllm.kvt.worker")


@dataclass(frozen=True, eq=False)
class RankCache:
    """The blocks of one rank: a cache tensor and its layout for each layer, and which heads."""

    caches: Sequence[Tensor]
    layouts: Sequence[BlockLayout]
    rank: int
    total_heads: int

    def export(self, job: Export) -> None:
        """Blocks to lease. Raises OSError or KVTranslatorError."""
        memory = job.memory.open()
        blocks = self._ids(job.blocks)
        layers = zip(self.caches, self.layouts, self._views(memory.data, job.tokens), strict=True)
        for cache, layout, (keys, values) in layers:
            read = layout.read(cache, blocks)
            keys.copy_(read[0][: job.tokens])
            values.copy_(read[1][: job.tokens])
        mark(memory.data, job.seal_offset, job.tokens, self.rank)

    def load(self, job: Load) -> None:
        """Lease to blocks, each of which is written whole. Raises as ``export``."""
        memory = job.memory.open()
        blocks = self._ids(job.blocks)
        layers = zip(self.caches, self.layouts, self._views(memory.data, job.tokens), strict=True)
        for cache, layout, (keys, values) in layers:
            rows = slice(job.first_token, job.first_token + len(blocks) * layout.block_tokens)
            layout.write(cache, blocks, keys[rows], values[rows])

    def _ids(self, blocks: tuple[int, ...]) -> Tensor:
        return torch.tensor(blocks, device=self.caches[0].device)

    def _views(self, memory: Tensor, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values ``[T, h, D]`` of this rank's heads in a lease, for each layer."""
        _, _, heads, dim = self.layouts[0].places.shape
        shape = (len(self.caches), 2, tokens, self.total_heads, dim)
        dtype = self.caches[0].dtype
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        mine = slice(self.rank * heads, (self.rank + 1) * heads)
        whole = memory[:nbytes].view(dtype).view(shape)[:, :, :, mine]
        return [(layer[0], layer[1]) for layer in whole]


class WorkerSide:
    """Runs jobs one after another and knows which are done; ``failed`` are among them."""

    def __init__(self, cache: RankCache) -> None:
        self._cache = cache
        self._thread = ThreadPoolExecutor(1, "kvt-copies")
        self._exports: dict[str, Future[None]] = {}
        self._loads: dict[str, Future[None]] = {}

    def start(self, jobs: Jobs) -> None:
        """Take up the jobs of one engine step; nothing waits for them."""
        for export in jobs.exports:
            self._exports[export.request_id] = self._thread.submit(self._cache.export, export)
        for load in jobs.loads:
            self._loads[load.request_id] = self._thread.submit(self._cache.load, load)

    def finished(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose export has ended, whose load has, and those of the latter that failed."""
        exported, _ = _ended(self._exports, "export")
        loaded, failed = _ended(self._loads, "load")
        return exported, loaded, failed

    def close(self) -> None:
        """Wait for the copy under way; the engine ends."""
        self._thread.shutdown(cancel_futures=True)


def _ended(running: dict[str, Future[None]], what: str) -> tuple[set[str], set[str]]:
    ended = {request_id for request_id, future in running.items() if future.done()}
    failed = {request_id for request_id in ended if _failed(running.pop(request_id), what)}
    return ended, failed


def _failed(future: Future[None], what: str) -> bool:
    error = future.exception()
    if error is None:
        return False
    if not isinstance(error, OSError | KVTranslatorError):
        log.error("kvt: %s failed: %s", what, type(error).__name__, exc_info=error)
        return True
    log.warning("kvt: %s failed: %s", what, type(error).__name__)
    return True
