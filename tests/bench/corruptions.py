"""What happens to a KV cache between two programs, done on purpose: one function a corruption.

Each takes a good cache, as the model stored it, and returns the spoiled one; ``Context`` gives what
some of them need besides. Used by the tests of the content gate and by ``bench_gate.py``.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.cache import KVCache
from mappers.rope import Rope, RotaryTable

BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
EXPONENT_BITS = {torch.float32: (23, 31), torch.float16: (10, 15), torch.bfloat16: (7, 15)}


@dataclass(frozen=True)
class Context:
    """The source's rope, another text's cache that is at least as long, and a seed."""

    rope: Rope
    other: KVCache
    seed: int = 0

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


Corruption = Callable[[KVCache, Context], KVCache]


def bfloat16_read_as_float16(cache: KVCache, _: Context) -> KVCache:
    """Written in bfloat16, its bytes declared as float16."""
    return _every(cache, lambda t: t.to(torch.bfloat16).view(torch.float16))


def float16_read_as_bfloat16(cache: KVCache, _: Context) -> KVCache:
    """Written in float16, its bytes declared as bfloat16."""
    return _every(cache, lambda t: t.to(torch.float16).view(torch.bfloat16))


def keys_rolled_by_a_token(cache: KVCache, _: Context) -> KVCache:
    """Row t holds the key of row t - 1, with its rotation."""
    return dataclasses.replace(cache, keys=tuple(k.roll(1, 0) for k in cache.keys))


def positions_off_by_one(cache: KVCache, context: Context) -> KVCache:
    """Every key was rotated for the position after its own."""
    later = RotaryTable.of(context.rope, cache.positions + 1)
    return _rerotated(cache, context.rope, later)


def hnd_read_as_nhd(cache: KVCache, _: Context) -> KVCache:
    """Heads before tokens in memory, read as tokens before heads."""
    return _every(cache, lambda t: t.transpose(0, 1).contiguous().view(t.shape))


def keys_and_values_swapped(cache: KVCache, _: Context) -> KVCache:
    """K where V belongs, and the reverse."""
    return KVCache(cache.values, cache.keys, cache.positions)


def layers_reversed(cache: KVCache, _: Context) -> KVCache:
    """The last layer first."""
    return KVCache(cache.keys[::-1], cache.values[::-1], cache.positions)


def two_adjacent_layers_swapped(cache: KVCache, context: Context) -> KVCache:
    """Layers i and i + 1 exchanged."""
    order = list(range(cache.num_layers))
    first = context.seed % (cache.num_layers - 1)
    order[first], order[first + 1] = order[first + 1], order[first]
    return KVCache(
        tuple(cache.keys[i] for i in order), tuple(cache.values[i] for i in order), cache.positions
    )


def two_heads_swapped(cache: KVCache, context: Context) -> KVCache:
    """The first two heads of one layer exchanged, keys and values alike."""
    layer = context.seed % cache.num_layers
    heads = [1, 0, *range(2, cache.num_kv_heads)]
    return _layer(cache, layer, lambda t: t[:, heads])


def theta_far_off(cache: KVCache, context: Context) -> KVCache:
    """The model rotated with 50 times the theta that the request declares, or a 50th of it."""
    factor = 50.0 if context.rope.theta < 100_000 else 0.02
    return _other_theta(cache, context.rope, factor)


def theta_off_by_2_percent(cache: KVCache, context: Context) -> KVCache:
    """The model rotated with 1.02 times the theta that the request declares."""
    return _other_theta(cache, context.rope, 1.02)


def exponent_bit_set(cache: KVCache, context: Context) -> KVCache:
    """The highest exponent bit that is 0, of one number anywhere, became 1."""
    return _flipped(cache, context, lambda zero: zero.index(True))


def exponent_bit_cleared(cache: KVCache, context: Context) -> KVCache:
    """The highest exponent bit that is 1, of one number anywhere, became 0: it is smaller now."""
    return _flipped(cache, context, lambda zero: zero.index(False))


def exponent_bit_flipped(cache: KVCache, context: Context) -> KVCache:
    """Any exponent bit of one number anywhere: half of these make it smaller."""
    return _flipped(cache, context, lambda zero: context.seed % len(zero))


def layer_zeroed(cache: KVCache, context: Context) -> KVCache:
    """One layer never arrived."""
    return _layer(cache, context.seed % cache.num_layers, torch.zeros_like)


def last_quarter_zeroed(cache: KVCache, _: Context) -> KVCache:
    """The last blocks never arrived, in any layer."""
    return _every(cache, _cut)


def another_documents_cache(cache: KVCache, context: Context) -> KVCache:
    """A perfect cache, of another text."""
    return context.other.slice(0, cache.tokens)


CORRUPTIONS: dict[str, Corruption] = {
    corruption.__name__: corruption
    for corruption in (
        bfloat16_read_as_float16,
        float16_read_as_bfloat16,
        keys_rolled_by_a_token,
        positions_off_by_one,
        hnd_read_as_nhd,
        keys_and_values_swapped,
        layers_reversed,
        two_adjacent_layers_swapped,
        two_heads_swapped,
        theta_far_off,
        theta_off_by_2_percent,
        exponent_bit_set,
        exponent_bit_cleared,
        exponent_bit_flipped,
        layer_zeroed,
        last_quarter_zeroed,
        another_documents_cache,
    )
}


def _every(cache: KVCache, spoil: Callable[[Tensor], Tensor]) -> KVCache:
    return KVCache(
        tuple(spoil(k) for k in cache.keys), tuple(spoil(v) for v in cache.values), cache.positions
    )


def _layer(cache: KVCache, layer: int, spoil: Callable[[Tensor], Tensor]) -> KVCache:
    keys, values = list(cache.keys), list(cache.values)
    keys[layer], values[layer] = spoil(keys[layer]), spoil(values[layer])
    return KVCache(tuple(keys), tuple(values), cache.positions)


def _cut(tensor: Tensor) -> Tensor:
    cut = tensor.clone()
    cut[3 * len(cut) // 4 :] = 0
    return cut


def _other_theta(cache: KVCache, rope: Rope, factor: float) -> KVCache:
    other = rope.model_copy(update={"theta": rope.theta * factor})
    return _rerotated(cache, rope, RotaryTable.of(other, cache.positions))


def _rerotated(cache: KVCache, rope: Rope, table: RotaryTable) -> KVCache:
    own = RotaryTable.of(rope, cache.positions)
    keys = tuple(table.apply(own.strip(k)).to(k.dtype) for k in cache.keys)
    return dataclasses.replace(cache, keys=keys)


def _flipped(cache: KVCache, context: Context, choose: Callable[[list[bool]], int]) -> KVCache:
    """``choose`` picks from the exponent's bits, highest first, True where it is 0."""
    low, high = EXPONENT_BITS[cache.dtype]
    layer, kind, at = (
        int(torch.randint(n, (), generator=context.generator.manual_seed(context.seed + 7 * i)))
        for i, n in enumerate((cache.num_layers, 2, cache.keys[0].numel()))
    )
    spoiled = (cache.keys if kind == 0 else cache.values)[layer].clone().contiguous()
    bits = spoiled.view(BITS[cache.dtype]).view(-1)
    number = int(bits[at])
    zero = [not number >> bit & 1 for bit in reversed(range(low, high))]
    bits[at] = number ^ (1 << (high - 1 - choose(zero)))
    kept = list(cache.keys if kind == 0 else cache.values)
    kept[layer] = spoiled
    if kind == 0:
        return dataclasses.replace(cache, keys=tuple(kept))
    return dataclasses.replace(cache, values=tuple(kept))
