"""The measured layout against simulated engines: both public ones, packed ones, and broken ones.

``tests/vllm/test_backend.py`` measures the real CPU backend.
"""

import pytest
import torch
from torch import Tensor

from mappers.errors import LayoutError
from service.vllm.layout import BlockLayout, WriteBlock, measure

BLOCKS, TOKENS, HEADS, DIM = 5, 8, 3, 16
SIZES = {"num_blocks": BLOCKS, "block_tokens": TOKENS, "kv_heads": HEADS, "head_dim": DIM}


def _since_0_26(cache: Tensor) -> WriteBlock:
    """[blocks, H, block, 2 D]."""

    def write(keys: Tensor, values: Tensor, block: int) -> None:
        cache[block] = torch.cat((keys, values), -1).transpose(0, 1)

    return write


def _before_0_26(cache: Tensor) -> WriteBlock:
    """[2, blocks, block, H, D]."""

    def write(keys: Tensor, values: Tensor, block: int) -> None:
        cache[0, block], cache[1, block] = keys, values

    return write


def _packed(cache: Tensor) -> WriteBlock:
    """[blocks, H, block, 2 D] used as two halves, keys transposed within theirs."""

    def write(keys: Tensor, values: Tensor, block: int) -> None:
        halves = cache[block].view(HEADS, 2, TOKENS * DIM)
        halves[:, 0] = keys.permute(1, 2, 0).flatten(1)
        halves[:, 1] = values.transpose(0, 1).flatten(1)

    return write


NEW, OLD = (BLOCKS, HEADS, TOKENS, 2 * DIM), (2, BLOCKS, TOKENS, HEADS, DIM)
ENGINES = [(NEW, _since_0_26), (OLD, _before_0_26), (NEW, _packed)]


def _states() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn((2, 2 * TOKENS, HEADS, DIM), generator=generator)
    return keys, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "engine"), ENGINES)
def test_what_the_engine_wrote_is_read_and_what_is_written_is_the_engines(
    shape: tuple[int, ...], engine, dtype: torch.dtype
) -> None:
    cache, injected = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    layout = measure(cache, engine(cache), **SIZES)
    assert not cache.any()
    keys, values = (states.to(dtype) for states in _states())
    for block, part in ((3, slice(0, TOKENS)), (1, slice(TOKENS, None))):
        engine(cache)(keys[part], values[part], block)
    blocks = torch.tensor([3, 1])
    read = layout.read(cache, blocks)
    assert torch.equal(read[0], keys)
    assert torch.equal(read[1], values)
    layout.write(injected, blocks, keys, values)
    assert torch.equal(injected, cache)


def test_a_cache_that_is_a_permuted_view() -> None:
    """vLLM's NHD order: the same logical shape over other strides."""
    cache = torch.zeros(BLOCKS, TOKENS, HEADS, 2 * DIM).transpose(1, 2)
    layout = measure(cache, _since_0_26(cache), **SIZES)
    keys, values = _states()
    layout.write(cache, torch.tensor([2, 4]), keys, values)
    assert torch.equal(cache[4].transpose(0, 1)[..., DIM:], values[TOKENS:])


def _losing(cache: Tensor) -> WriteBlock:
    def write(keys: Tensor, values: Tensor, block: int) -> None:
        _since_0_26(cache)(keys, values, block)
        cache[block, 0, 0, 0] = cache[block, 0, 0, 1]

    return write


def _scaling(cache: Tensor) -> WriteBlock:
    return lambda keys, values, block: _since_0_26(cache)(keys * 0.5, values, block)


def _elsewhere(cache: Tensor) -> WriteBlock:
    return lambda keys, values, block: _since_0_26(cache)(keys, values, block - 1)


def _differently(cache: Tensor) -> WriteBlock:
    def write(keys: Tensor, values: Tensor, block: int) -> None:
        turned = keys if block == 1 else keys.flip(0)
        _since_0_26(cache)(turned, values, block)

    return write


def _not_finite(cache: Tensor) -> WriteBlock:
    return lambda keys, values, block: _since_0_26(cache)(keys / 0, values, block)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (_losing, "exactly once"),
        (_scaling, "changes values"),
        (_elsewhere, "unwritten"),
        (_differently, "two blocks"),
        (_not_finite, "changes values"),
    ],
)
def test_what_is_no_bijection_is_refused(engine, said: str) -> None:
    cache = torch.zeros(NEW)
    with pytest.raises(LayoutError, match=said):
        measure(cache, engine(cache), **SIZES)


@pytest.mark.parametrize("shape", [(BLOCKS + 1, HEADS, TOKENS, 2 * DIM), (3, BLOCKS, 1, 1, 1)])
def test_a_shape_without_blocks_is_refused(shape: tuple[int, ...]) -> None:
    cache = torch.zeros(shape)
    with pytest.raises(LayoutError, match="expected"):
        measure(cache, _since_0_26(cache), **SIZES)


def test_a_block_of_another_size_is_refused() -> None:
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM + 4)
    with pytest.raises(LayoutError, match="elements"):
        measure(cache, _since_0_26(cache), **SIZES)


def test_one_rank_measures_its_own_heads() -> None:
    cache = torch.zeros(BLOCKS, 1, TOKENS, 2 * DIM)
    layout = measure(cache, _since_0_26(cache), **(SIZES | {"kv_heads": 1}))
    assert isinstance(layout, BlockLayout)
    assert layout.places.shape == (2, TOKENS, 1, DIM)
