"""The few rows of a cache that the content gate looks at, in content space.

Legend: L layers, T tokens, H kv heads, D head dim, m sampled rows.
"""

import torch
from torch import Tensor

from mappers.cache import KVCache, Readable
from mappers.rope import Rope, RotaryTable

SAMPLED_ROWS = 96


def sample_rows(tokens: int, *, start_position: int = 0, skip_positions: int = 0) -> Tensor:
    """At most 96 rows, evenly spread, the first and the last that count among them; int64 [m].

    Equal prompts give equal rows. Absolute positions below ``skip_positions`` do not count: the
    first tokens of a text are unlike all others. A prompt of nothing else gives no rows.
    """
    first = max(0, skip_positions - start_position)
    count = min(SAMPLED_ROWS, max(0, tokens - first))
    if count < 2:
        return torch.arange(first, first + count)
    return torch.linspace(first, tokens - 1, count, dtype=torch.float64).round().to(torch.int64)


def sample(cache: Readable, rope: Rope, rows: Tensor) -> Tensor:
    """Content keys and values of these rows, float32 ``[2, L, H, m, D]``, on the CPU.

    The cache ends with the last token that the model had read.
    """
    return content_of(cache.take(rows), rope, length=int(cache.positions[-1]) + 1)


def content_of(taken: KVCache, rope: Rope, *, length: int) -> Tensor:
    """The same of rows that were taken already, from a prompt of ``length`` tokens."""
    # All layers at once: a prompt's worth of small operations would cost more than they compute.
    keys, values = (
        torch.stack(layers, dim=1).float().cpu() for layers in (taken.keys, taken.values)
    )
    table = RotaryTable.of(rope, taken.positions.cpu(), length=length)
    content = table.strip(keys.flatten(1, 2)).view(keys.shape)
    return torch.stack((content, values)).permute(0, 2, 3, 1, 4)


def largest(cache: Readable) -> Tensor:
    """Largest absolute value that each channel has in any row, as cached: ``[2, L, H, D]``.

    Every element is read. A NaN or an infinity anywhere shows as such.
    """
    return torch.stack([largest_of(*layer) for layer in cache.layers()], dim=1)


def largest_of(keys: Tensor, values: Tensor) -> Tensor:
    """The same of one layer: ``[2, H, D]``, on the CPU."""
    return torch.stack([_largest(keys), _largest(values)]).cpu()


_BITS = {4: (torch.int32, 0x7FFFFFFF), 2: (torch.int16, 0x7FFF), 1: (torch.int8, 0x7F)}
_CHUNK_ROWS = 256


def _largest(layer: Tensor) -> Tensor:
    """``[T, H, D]`` -> ``[H, D]``: without its sign bit a float's bits are in its order."""
    integer, mask = _BITS[layer.element_size()]
    chunks = torch.split(layer.view(integer), _CHUNK_ROWS)
    found = torch.stack([chunk.bitwise_and(mask).amax(0) for chunk in chunks]).amax(0)
    return found.view(layer.dtype).float()
