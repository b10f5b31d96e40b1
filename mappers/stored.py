"""StoredCache: the keys and values of one prompt as 8-bit numbers with scales.

It is read a layer at a time, or a few rows of all layers: the whole in float32 would be four times
its size. Without scales an 8-bit cache is a plain ``KVCache``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.cache import DTYPES, KVCache, Layer
from mappers.errors import LayoutError
from mappers.quantize import Storage, Stored, check, dequantize, quantize


@dataclass(frozen=True, slots=True, eq=False)
class StoredCache:
    """Keys and values of all layers, numbers each ``[T, H, D]``; ``positions`` int64 ``[T]``.

    Raises ``LayoutError`` for layers that differ in shape, and for scales or zero points that are
    missing, misshapen, not finite, not positive or out of range.
    """

    storage: Storage
    keys: tuple[Stored, ...]
    values: tuple[Stored, ...]
    positions: Tensor

    def __post_init__(self) -> None:
        if not self.storage.scaled:
            raise LayoutError("a cache without scales is a plain one")
        if not self.keys or len(self.keys) != len(self.values):
            raise LayoutError("expected as many key layers as value layers, at least one")
        shape = (len(self.positions), *self.keys[0].numbers.shape[1:])
        for kind, layers in (("k", self.keys), ("v", self.values)):
            for index, stored in enumerate(layers):
                self._check(f"layer {index}, {kind}", stored, shape)

    def _check(self, where: str, stored: Stored, shape: tuple[int, ...]) -> None:
        if tuple(stored.numbers.shape) != shape:
            raise LayoutError(f"{where}: expected {list(shape)}, got {list(stored.numbers.shape)}")
        try:
            check(stored, self.storage)
        except LayoutError as error:
            raise LayoutError(f"{where}: {error}") from error

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.keys)

    @property
    def tokens(self) -> int:
        """T."""
        return self.positions.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of numbers, scales and zero points."""
        parts = (part for stored in (*self.keys, *self.values) for part in stored)
        return sum(part.nbytes for part in parts if part is not None)

    def layers(self) -> Iterator[Layer]:
        """Keys and values of each layer in order, float32, each made when it is asked for."""
        for keys, values in zip(self.keys, self.values, strict=True):
            yield dequantize(keys), dequantize(values)

    def take(self, rows: slice | Tensor) -> KVCache:
        """What is stored of the tokens ``rows`` (int64 ``[n]`` or a slice), float32."""
        keys, values = (
            tuple(dequantize(stored.rows(rows)) for stored in side)
            for side in (self.keys, self.values)
        )
        return KVCache(keys, values, self.positions[rows])

    def slice(self, start: int, stop: int) -> "StoredCache":
        """The tokens ``start <= t < stop`` as views of the same memory; Python's slice rules."""
        rows = slice(start, stop)
        keys, values = (
            tuple(stored.rows(rows) for stored in side) for side in (self.keys, self.values)
        )
        return StoredCache(self.storage, keys, values, self.positions[rows])


AnyCache = KVCache | StoredCache


def store(cache: KVCache, storage: Storage) -> AnyCache:
    """The cache as it is stored; scales are those of all its tokens.

    Raises ``LayoutError`` for values that are not finite where they become 8-bit numbers.
    """
    keys, values = (
        tuple(_stored(layer, storage) for layer in side) for side in (cache.keys, cache.values)
    )
    if storage.scaled:
        return StoredCache(storage, keys, values, cache.positions)
    plain = [tuple(stored.numbers for stored in side) for side in (keys, values)]
    return KVCache(plain[0], plain[1], cache.positions)


def restored(cache: AnyCache) -> KVCache:
    """The numbers that a cache stands for: float32 where it has scales, else as it is."""
    return cache if isinstance(cache, KVCache) else cache.take(slice(None))


def rounded(cache: KVCache, storage: Storage) -> KVCache:
    """What is read from the cache after it was stored: float32 from 8 bits, else its own dtype.

    What an engine keeps is what its users get, so this is what a map is fitted and measured on.
    """
    found = restored(store(cache, storage))
    dtype = torch.float32 if storage.eight_bits else cache.dtype
    keys, values = (tuple(layer.to(dtype) for layer in side) for side in (found.keys, found.values))
    return KVCache(keys, values, cache.positions)


def _stored(layer: Tensor, storage: Storage) -> Stored:
    if storage.eight_bits:
        return quantize(layer, storage)
    return Stored(layer.to(DTYPES[storage.dtype]))
