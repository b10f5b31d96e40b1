"""A worker's copies between an engine's blocks and a lease, on one rank and on two."""

import os

import pytest
import torch
from torch import Tensor

from mappers.identity import IdentityClaim
from service.memfd import SharedMemory, allocate
from service.vllm.jobs import Export, Jobs, Load, Shared
from service.vllm.layout import BlockLayout, measure
from service.vllm.seal import (
    Sealed,
    common_tokens,
    complete,
    is_of,
    seal_bytes,
    seal_offset,
    write_seal,
)
from service.vllm.worker import RankCache, WorkerSide
from tests.service.live import wait_until

LAYERS, BLOCKS, BLOCK, HEADS, DIM = 2, 8, 4, 4, 8
TOKENS, IDS = 10, list(range(100, 110))
DATA_BYTES = 2 * LAYERS * TOKENS * HEADS * DIM * 4
OFFSET = seal_offset(DATA_BYTES)
CLAIM = IdentityClaim(model="m", version="1", dtype="float32", rope_theta=10_000.0)
SEALED = Sealed(CLAIM, TOKENS, ranks=2, hops=1)


def engine(rank: int, ranks: int) -> RankCache:
    """Empty caches ``[blocks, h, block, 2 D]`` of one rank."""
    heads = HEADS // ranks
    caches = [torch.zeros(BLOCKS, heads, BLOCK, 2 * DIM) for _ in range(LAYERS)]
    return RankCache(caches, [_measured(cache, heads) for cache in caches], rank, HEADS)


def _measured(cache: Tensor, heads: int) -> BlockLayout:
    def write(keys: Tensor, values: Tensor, block: int) -> None:
        cache[block] = torch.cat((keys, values), -1).transpose(0, 1)

    return measure(
        cache, write, num_blocks=BLOCKS, block_tokens=BLOCK, kv_heads=heads, head_dim=DIM
    )


@pytest.fixture
def lease() -> SharedMemory:
    """Memory as the service leases it, sealed with what it is of."""
    memory = allocate(OFFSET + seal_bytes(TOKENS, 2))
    write_seal(memory.data, OFFSET, SEALED, IDS)
    return memory


def shared(memory: SharedMemory) -> Shared:
    return Shared(os.getpid(), memory.descriptor, memory.nbytes)


def contents(memory: SharedMemory) -> Tensor:
    """[layers, 2, T, H, D]."""
    return memory.data[:DATA_BYTES].view(torch.float32).view(LAYERS, 2, TOKENS, HEADS, DIM).clone()


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_copies_its_own_heads_both_ways(lease: SharedMemory, ranks: int) -> None:
    sources = [engine(rank, ranks) for rank in range(ranks)]
    states = torch.randn(LAYERS, 2, 3 * BLOCK, HEADS, DIM)
    blocks = torch.tensor([5, 2, 7])
    for source in sources:
        mine = states[:, :, :, source.rank * (HEADS // ranks) :][:, :, :, : HEADS // ranks]
        for cache, layout, (keys, values) in zip(source.caches, source.layouts, mine, strict=True):
            layout.write(cache, blocks, keys, values)
    export = Export("r", shared(lease), (5, 2, 7), TOKENS, OFFSET)
    for number, source in enumerate(sources):
        assert complete(lease.data, OFFSET, TOKENS, ranks) is False
        assert complete(lease.data, OFFSET, TOKENS, number) is True
        source.export(export)
    assert complete(lease.data, OFFSET, TOKENS, ranks)
    assert torch.equal(contents(lease), states[:, :, :TOKENS])

    load = Load("r", shared(lease), (3,), first_token=BLOCK, tokens=TOKENS)
    for rank in range(ranks):
        target = engine(rank, ranks)
        target.load(load)
        mine = states[:, :, BLOCK : 2 * BLOCK, rank * (HEADS // ranks) :]
        for cache, layout, (keys, values) in zip(target.caches, target.layouts, mine, strict=True):
            read = layout.read(cache, torch.tensor([3]))
            assert torch.equal(read[0], keys[:, : HEADS // ranks])
            assert torch.equal(read[1], values[:, : HEADS // ranks])
            assert not cache[[0, 1, 2, 4, 5, 6, 7]].any()


def test_jobs_end_whatever_becomes_of_them(lease: SharedMemory) -> None:
    side = WorkerSide(engine(0, 1))
    gone = Shared(os.getpid(), lease.descriptor, lease.nbytes + (1 << 20))
    nobody = Shared(os.getpid(), 1 << 20, lease.nbytes)
    loads = [
        Load("good", shared(lease), (1, 2), 0, TOKENS),
        Load("another size", gone, (3,), 0, TOKENS),
        Load("closed", nobody, (4,), 0, TOKENS),
    ]
    exports = [Export("out", shared(lease), (1, 2, 3), TOKENS, OFFSET)]
    side.start(Jobs(exports=exports, loads=loads))
    ended: list[set[str]] = [set(), set(), set()]

    def all_ended() -> bool:
        for known, new in zip(ended, side.finished(), strict=True):
            known |= new
        return len(ended[0]) + len(ended[1]) == 4

    wait_until(all_ended)
    side.close()
    assert ended == [{"out"}, {"good", "another size", "closed"}, {"another size", "closed"}]


def test_the_seal_says_of_which_model_and_which_tokens(lease: SharedMemory) -> None:
    assert is_of(lease.data, OFFSET, SEALED)
    another = CLAIM.model_copy(update={"version": "2"})
    for lie in ({"claim": another}, {"tokens": TOKENS - 1}, {"ranks": 1}, {"hops": 0}):
        assert not is_of(lease.data, OFFSET, SEALED._replace(**lie))
    assert common_tokens(lease.data, OFFSET, TOKENS, [*IDS, 1, 2]) == TOKENS
    assert common_tokens(lease.data, OFFSET, TOKENS, IDS[:3]) == 3
    assert common_tokens(lease.data, OFFSET, TOKENS, [*IDS[:6], 1, *IDS[7:]]) == 6
    assert common_tokens(lease.data, OFFSET, TOKENS, [1, *IDS]) == 0
