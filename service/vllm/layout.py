"""How an engine's attention backend lays KV out inside a block, measured and not assumed.

Engines change it between releases, and a backend may pack blocks in an order of its own; read with
the wrong one, a cache is fluent nonsense. So a block is filled with a code, through the engine's
own cache-write op: every element of K and V gets another number. Where each number then lies in the
raw block is the layout. A write that loses an element, changes a value or puts it elsewhere is no
bijection, and such a layout is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.errors import LayoutError

WriteBlock = Callable[[Tensor, Tensor, int], None]
"""The engine's cache-write op: keys and values ``[N, H, D]`` of all tokens of one block, its id."""

# Digits 1 to 128 are exact in every float type down to 8 bits of mantissa; 0 marks "not written".
_BASE = 128


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Where the elements of a block lie. N tokens a block, H kv heads (of this rank), D head dim.

    ``places`` is int64 ``[2, N, H, D]``, keys then values: the index of each element in the block's
    raw elements, flattened. ``block_dim`` is the dimension of the cache tensor that counts blocks.
    """

    places: Tensor
    block_dim: int

    @property
    def block_tokens(self) -> int:
        """N."""
        return self.places.shape[1]

    def read(self, cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[len(blocks) * N, H, D]``, copied out of an engine's cache tensor."""
        raw = cache.index_select(self.block_dim, blocks).movedim(self.block_dim, 0).flatten(1)
        found = raw[:, self.places.flatten()].view(-1, *self.places.shape)
        keys, values = found.transpose(0, 1).flatten(1, 2)
        return keys, values

    def write(self, cache: Tensor, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values ``[len(blocks) * N, H, D]`` into those blocks, all of each."""
        states = torch.stack((keys, values)).view(2, len(blocks), *self.places.shape[1:])
        raw = torch.empty((len(blocks), self.places.numel()), dtype=cache.dtype)
        raw[:, self.places.flatten()] = states.transpose(0, 1).flatten(1).to(raw)
        shape = cache.select(self.block_dim, 0).shape
        shaped = raw.to(cache.device).view(-1, *shape).movedim(0, self.block_dim)
        cache.index_copy_(self.block_dim, blocks, shaped)


def block_dim_of(shape: torch.Size, num_blocks: int) -> int:
    """Which dimension counts the blocks: the first in ``[blocks, ...]``, the second in
    ``[2, blocks, ...]``. Raises LayoutError for any other shape."""
    if shape[0] == num_blocks:
        return 0
    if len(shape) > 1 and shape[0] == 2 and shape[1] == num_blocks:
        return 1
    raise LayoutError(
        f"a cache tensor of {list(shape)} for {num_blocks} blocks: expected [{num_blocks}, ...] "
        f"or [2, {num_blocks}, ...]"
    )


def measure(
    cache: Tensor,
    write_block: WriteBlock,
    *,
    num_blocks: int,
    block_tokens: int,
    kv_heads: int,
    head_dim: int,
) -> BlockLayout:
    """The layout of one layer's cache tensor, which is overwritten in two blocks and then zeroed.

    Raises LayoutError unless both blocks hold every code exactly once and in the same places.
    """
    dim = block_dim_of(cache.shape, num_blocks)
    shape = (2, block_tokens, kv_heads, head_dim)
    # Engines keep block 0 for padding.
    first, last = (_places(cache, write_block, dim, block, shape) for block in (1, num_blocks - 1))
    if not torch.equal(first, last):
        raise LayoutError("the engine lays two blocks of one cache out differently")
    return BlockLayout(first.to(cache.device), dim)


def _places(
    cache: Tensor, write_block: WriteBlock, dim: int, block: int, shape: tuple[int, ...]
) -> Tensor:
    elements = torch.Size(shape).numel()
    raw = cache.select(dim, block)
    if raw.numel() != elements:
        raise LayoutError(
            f"a block of the engine's cache has {raw.numel()} elements, K and V of "
            f"{list(shape[1:])} [tokens, kv heads, head dim] have {elements}"
        )
    codes, place = torch.zeros(elements, dtype=torch.int64), 1
    while place < elements:
        codes += place * _digits(cache, write_block, dim, block, shape, place)
        place *= _BASE
    seen = torch.bincount(codes.clamp(0, elements), minlength=elements)
    if not bool((seen[:elements] == 1).all()):
        raise LayoutError("the engine's cache-write op does not keep each element exactly once")
    places = torch.empty(elements, dtype=torch.int64)
    places[codes] = torch.arange(elements)
    return places.view(shape)


def _digits(
    cache: Tensor,
    write_block: WriteBlock,
    dim: int,
    block: int,
    shape: tuple[int, ...],
    place: int,
) -> Tensor:
    """One digit of the code of each raw element: written, read back and wiped."""
    index = torch.arange(torch.Size(shape).numel())
    code = (index // place % _BASE + 1).to(cache.dtype).to(cache.device).view(shape)
    raw = cache.select(dim, block)
    raw.zero_()
    write_block(code[0].contiguous(), code[1].contiguous(), block)
    found = raw.flatten().double().cpu()
    raw.zero_()
    digits = found.nan_to_num(0.0)
    if not bool(((digits == digits.round()) & (digits >= 1) & (digits <= _BASE)).all()):
        raise LayoutError("the engine's cache-write op changes values or leaves some unwritten")
    return digits.long() - 1
