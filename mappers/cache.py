"""KVCache: the keys and values of one prompt in the project's one internal layout.

Per layer, keys and values are each ``[T, H, D]`` (T tokens, H kv heads, D head dim). Keys are as
the model caches them: after any k-norm and the rotary embedding at the absolute positions given.
Every other layout is converted at the edge, in ``mappers/layouts.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import Cache, DynamicLayer

from mappers.errors import LayoutError, UnsupportedModel

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
"""What a tensor of a cache may hold; int8 only with scales (``mappers/stored.py``)."""

Layer = tuple[Tensor, Tensor]
"""Keys and values of one layer."""


class Readable(Protocol):
    """A cache that is read a layer at a time, or a few rows of all layers."""

    @property
    def positions(self) -> Tensor:
        """int64 ``[T]``."""
        ...

    @property
    def num_layers(self) -> int:
        """L."""
        ...

    @property
    def tokens(self) -> int:
        """T."""
        ...

    def layers(self) -> Iterator[Layer]:
        """Keys and values ``[T, H, D]`` of each layer in order, any float dtype."""
        ...

    def take(self, rows: Tensor) -> "KVCache":
        """The tokens ``rows`` (int64 ``[n]``), copied; their absolute positions stay theirs."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of all layers, each ``[T, H, D]``, and the tokens' absolute positions.

    ``keys`` and ``values`` hold one tensor per layer, contiguous or a view, all of one shape and
    float dtype of ``DTYPES``; ``positions`` is int64 ``[T]``. Raises ``LayoutError`` otherwise.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    positions: Tensor

    def __post_init__(self) -> None:
        if not self.keys or len(self.keys) != len(self.values):
            raise LayoutError(
                f"{len(self.keys)} key layers and {len(self.values)} value layers: "
                "expected the same number, at least one"
            )
        _check_positions(self.positions)
        first = self.keys[0]
        known = first.is_floating_point() and first.dtype in DTYPES.values()
        if first.ndim != 3 or not known:
            raise LayoutError(f"expected float [tokens, heads, dim], got {describe(first)}")
        for tensor in (*self.keys, *self.values):
            if tensor.shape != first.shape or tensor.dtype != first.dtype:
                raise LayoutError(f"layers differ: {describe(first)} and {describe(tensor)}")
        if first.shape[0] != self.positions.shape[0]:
            raise LayoutError(f"{first.shape[0]} tokens but {self.positions.shape[0]} positions")

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.keys)

    @property
    def tokens(self) -> int:
        """T."""
        return self.keys[0].shape[0]

    @property
    def num_kv_heads(self) -> int:
        """H."""
        return self.keys[0].shape[1]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.keys[0].shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Storage dtype of every layer."""
        return self.keys[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, positions not counted."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))

    def layers(self) -> Iterator[Layer]:
        """Keys and values of each layer in order."""
        return zip(self.keys, self.values, strict=True)

    def take(self, rows: Tensor) -> "KVCache":
        """The tokens ``rows`` (int64 ``[n]``), copied; their absolute positions stay theirs."""
        chosen = rows.to(self.positions.device)
        return KVCache(
            tuple(keys[chosen] for keys in self.keys),
            tuple(values[chosen] for values in self.values),
            self.positions[chosen],
        )

    def slice(self, start: int, stop: int) -> "KVCache":
        """The tokens ``start <= t < stop`` as views of the same memory; Python's slice rules."""
        return KVCache(
            tuple(tensor[start:stop] for tensor in self.keys),
            tuple(tensor[start:stop] for tensor in self.values),
            self.positions[start:stop],
        )


def consecutive(tokens: int, start_position: int = 0) -> Tensor:
    """Absolute positions ``start_position, start_position + 1, ...``, int64 ``[T]``."""
    if start_position < 0:
        raise LayoutError(f"start_position {start_position}: expected 0 or more")
    return torch.arange(start_position, start_position + tokens, dtype=torch.int64)


def describe(tensor: Tensor) -> str:
    """Shape and dtype in a form that is safe in any message."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def from_hf(cache: Cache, *, start_position: int = 0) -> KVCache:
    """The contents of a transformers ``DynamicCache`` of batch 1, as views of its tensors.

    ``start_position`` is the absolute position of its first token. Raises ``UnsupportedModel`` for
    any layer that is not plain full attention and ``LayoutError`` for an empty cache or a batch.
    """
    if isinstance(cache, EncoderDecoderCache):
        raise UnsupportedModel("encoder_decoder", "an encoder-decoder cache cannot be translated")
    keys, values = [], []
    for index, found in enumerate(cache.layers):
        layer = _full_attention(index, found)
        keys.append(_unbatch(index, layer.keys))
        values.append(_unbatch(index, layer.values))
    if not keys:
        raise LayoutError("the cache has no layers")
    positions = consecutive(keys[0].shape[0], start_position).to(keys[0].device)
    return KVCache(tuple(keys), tuple(values), positions)


def to_hf(cache: KVCache) -> DynamicCache:
    """A ``DynamicCache`` of batch 1 with a copy of the contents, layers ``[1, H, T, D]``."""
    converted = DynamicCache()
    for index, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        converted.update(_batched(keys), _batched(values), index)
    return converted


def _check_positions(positions: Tensor) -> None:
    if positions.ndim != 1 or positions.dtype != torch.int64:
        raise LayoutError(f"positions: expected int64 [tokens], got {describe(positions)}")


_LAYER_REASONS = (("Sliding", "sliding_window"), ("Linear", "linear_attention"))


def _full_attention(index: int, layer: object) -> DynamicLayer:
    # Exactly this class: its subclasses keep only a window, or extra state, of the prompt.
    if type(layer) is DynamicLayer:
        return layer
    name = type(layer).__name__
    reason = next((word for part, word in _LAYER_REASONS if part in name), "unsupported_cache")
    raise UnsupportedModel(reason, f"layer {index} is a {name}: only full attention is supported")


def _unbatch(index: int, states: Tensor | None) -> Tensor:
    if states is None or states.ndim != 4 or states.shape[0] != 1:
        given = "nothing" if states is None else describe(states)
        raise LayoutError(f"layer {index}: expected [1, heads, tokens, dim], got {given}")
    return states[0].transpose(0, 1)


def _batched(states: Tensor) -> Tensor:
    return states.transpose(0, 1).unsqueeze(0)
