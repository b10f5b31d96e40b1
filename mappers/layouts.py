"""Converters between the internal layout ``[T, H, D]`` and every layout that engines use.

A layout is chosen by its declared name, never guessed from a shape: with two kv heads, or as many
tokens as heads, several layouts have the same shape and the wrong reading is silent.

==============  ====================  ==========================================  =================
layout          tensors               shape                                       found in
==============  ====================  ==========================================  =================
``NHD``         layers.{i}.k, .v      [T, H, D]                                   this project
``HND``         layers.{i}.k, .v      [H, T, D]                                   attention kernels
``hf``          layers.{i}.k, .v      [1, H, T, D]                                transformers
``vllm_hn2d``   layers.{i}.kv         [blocks, H, block, 2 D], K then V           vLLM
``vllm_2bnhd``  layers.{i}.kv         [2, blocks, block, H, D], K then V          vLLM
``lmcache``     kv                    [2, L, T, H D], K then V                    LMCache
==============  ====================  ==========================================  =================

Numbers of 8 bits may have scales and zero points (``mappers/quantize.py``), which no layout moves:
``layers.{i}.k_scale`` and ``.v_scale``, ``layers.{i}.k_zero`` and ``.v_zero``.

Blocks are those of one prompt in token order (the engine's block table is already applied); only
the last may be part empty, and its unused rows are written as zeros and never read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from mappers.cache import DTYPES, KVCache, describe
from mappers.errors import LayoutError


class Layout(StrEnum):
    """The names that a request may declare."""

    NHD = "NHD"
    HND = "HND"
    HF = "hf"
    VLLM_HN2D = "vllm_hn2d"
    VLLM_2BNHD = "vllm_2bnhd"
    LMCACHE = "lmcache"


PAGED = (Layout.VLLM_HN2D, Layout.VLLM_2BNHD)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the caller declares: sizes of one cache; ``block_tokens`` for the paged layouts only."""

    layers: int
    tokens: int
    kv_heads: int
    head_dim: int
    block_tokens: int | None = None

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_dim) < 1 or self.tokens < 0:
            raise LayoutError("a geometry needs sizes of 1 or more (tokens: 0 or more)")

    @property
    def blocks(self) -> int:
        """Number of blocks that hold the tokens; raises ``LayoutError`` without a block size."""
        if self.block_tokens is None or self.block_tokens < 1:
            raise LayoutError("a paged layout needs block_tokens of 1 or more")
        return -(-self.tokens // self.block_tokens)


def tensor_names(layout: Layout, layer: int) -> tuple[str, ...]:
    """Names of the tensors that hold one layer: keys then values, or the one that holds both."""
    if layout is Layout.LMCACHE:
        return ("kv",)
    if layout in PAGED:
        return (f"layers.{layer}.kv",)
    return (f"layers.{layer}.k", f"layers.{layer}.v")


def scale_names(layer: int, *, zero_points: bool = False) -> tuple[str, ...]:
    """Names of a layer's scales, keys then values, and of its zero points if it has any."""
    kinds = ("scale", "zero") if zero_points else ("scale",)
    return tuple(f"layers.{layer}.{side}_{kind}" for kind in kinds for side in "kv")


def tensor_shape(layout: Layout, geometry: Geometry) -> tuple[int, ...]:
    """Shape of each tensor of the layout for this geometry."""
    tokens, heads, dim = geometry.tokens, geometry.kv_heads, geometry.head_dim
    match layout:
        case Layout.NHD:
            return (tokens, heads, dim)
        case Layout.HND:
            return (heads, tokens, dim)
        case Layout.HF:
            return (1, heads, tokens, dim)
        case Layout.VLLM_HN2D:
            return (geometry.blocks, heads, _block(geometry), 2 * dim)
        case Layout.VLLM_2BNHD:
            return (2, geometry.blocks, _block(geometry), heads, dim)
        case Layout.LMCACHE:
            return (2, geometry.layers, tokens, heads * dim)


def allocate(
    layout: Layout,
    geometry: Geometry,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    layers: Iterable[int] | None = None,
) -> dict[str, Tensor]:
    """Zeroed tensors of the layout, by name, for all layers or only for those given.

    Zeros and not uninitialised memory: the unused rows of a last block leave the process too.
    """
    wanted = range(geometry.layers) if layers is None else layers
    names = dict.fromkeys(name for layer in wanted for name in tensor_names(layout, layer))
    shape = tensor_shape(layout, geometry)
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name in names}


def read_layer(
    layout: Layout, tensors: Mapping[str, Tensor], layer: int, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """Keys and values ``[T, H, D]`` of one layer, as views wherever the layout allows it.

    Raises ``LayoutError`` when a tensor is missing, or has another shape than the declared layout
    and geometry give, or a dtype that no cache has.
    """
    parts = _checked(layout, tensors, layer, geometry)
    if layout in PAGED:
        keys, values = (
            blocks.flatten(0, 1)[: geometry.tokens]
            for blocks in _token_blocks(layout, parts[0], geometry)
        )
        return keys, values
    keys, values = _token_rows(layout, parts, layer, geometry)
    return keys, values


def write_layer(
    layout: Layout,
    tensors: Mapping[str, Tensor],
    layer: int,
    keys: Tensor,
    values: Tensor,
    geometry: Geometry,
) -> None:
    """Write keys and values ``[T, H, D]`` (any strides) into the layer's tensors, in their dtype.

    The tensors are written in place, padding included, so they may be views of a larger buffer.
    Raises ``LayoutError`` as ``read_layer`` does, and when keys or values do not fit the geometry.
    """
    parts = _checked(layout, tensors, layer, geometry)
    for states in (keys, values):
        _expect(states, (geometry.tokens, geometry.kv_heads, geometry.head_dim), "keys and values")
    if layout in PAGED:
        targets = _token_blocks(layout, parts[0], geometry)
        for target, states in zip(targets, (keys, values), strict=True):
            _fill_blocks(target, states)
        return
    rows = _token_rows(layout, parts, layer, geometry)
    for target, states in zip(rows, (keys, values), strict=True):
        target.copy_(states)


def read(
    layout: Layout, tensors: Mapping[str, Tensor], geometry: Geometry, positions: Tensor
) -> KVCache:
    """The whole cache; ``positions`` int64 ``[T]``. Raises ``LayoutError`` as ``read_layer``."""
    pairs = [read_layer(layout, tensors, layer, geometry) for layer in range(geometry.layers)]
    keys, values = zip(*pairs, strict=True)
    return KVCache(keys, values, positions)


def write(layout: Layout, cache: KVCache, *, block_tokens: int | None = None) -> dict[str, Tensor]:
    """The whole cache as new tensors of the layout, by name."""
    geometry = Geometry(
        cache.num_layers, cache.tokens, cache.num_kv_heads, cache.head_dim, block_tokens
    )
    tensors = allocate(layout, geometry, cache.dtype, device=cache.keys[0].device)
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        write_layer(layout, tensors, layer, keys, values, geometry)
    return tensors


def _block(geometry: Geometry) -> int:
    # `blocks` has checked it; the type checker cannot know.
    return geometry.block_tokens or 0


def _expect(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in DTYPES.values():
        raise LayoutError(f"{name}: expected float {list(shape)}, got {describe(tensor)}")


def _checked(
    layout: Layout, tensors: Mapping[str, Tensor], layer: int, geometry: Geometry
) -> list[Tensor]:
    if not 0 <= layer < geometry.layers:
        raise LayoutError(f"layer {layer}: the geometry has {geometry.layers} layers")
    shape = tensor_shape(layout, geometry)
    parts = []
    for name in tensor_names(layout, layer):
        if name not in tensors:
            raise LayoutError(f"layout {layout.value} needs a tensor {name}")
        _expect(tensors[name], shape, name)
        parts.append(tensors[name])
    if len({part.dtype for part in parts}) > 1:
        raise LayoutError(f"layer {layer}: keys and values differ in dtype")
    return parts


def _token_rows(
    layout: Layout, parts: list[Tensor], layer: int, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """Views ``[T, H, D]`` of the keys and of the values of an unpaged layout."""
    if layout is Layout.LMCACHE:
        split = parts[0][:, layer].view(2, geometry.tokens, geometry.kv_heads, geometry.head_dim)
        return split[0], split[1]
    keys, values = parts
    if layout is Layout.HF:
        keys, values = keys[0], values[0]
    if layout is not Layout.NHD:
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    return keys, values


def _token_blocks(layout: Layout, tensor: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Views ``[blocks, block, H, D]`` of the keys and of the values of a paged layout."""
    if layout is Layout.VLLM_2BNHD:
        return tensor[0], tensor[1]
    by_token = tensor.transpose(1, 2)
    return by_token[..., : geometry.head_dim], by_token[..., geometry.head_dim :]


def _fill_blocks(target: Tensor, states: Tensor) -> None:
    block = target.shape[1]
    full, rest = divmod(states.shape[0], block)
    # Splitting one dimension is a view for any strides.
    target[:full].copy_(states[: full * block].view(full, block, *states.shape[1:]))
    if rest:
        target[full, :rest].copy_(states[full * block :])
        target[full, rest:].zero_()
