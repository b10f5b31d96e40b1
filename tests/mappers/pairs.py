"""Pairs without models: identities, random caches and linear families, for tests of the maths."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mappers.cache import KVCache, consecutive
from mappers.geometry import Geometry, Structure
from mappers.identity import ModelIdentity
from mappers.mapper import HeadReads, Reads
from mappers.rope import Rope


def identity(layers: int, heads: int, dim: int, *, theta: float = 10_000.0) -> ModelIdentity:
    """A Qwen3-like identity of this geometry with the default rotary embedding."""
    return ModelIdentity(
        model=f"synthetic-{layers}x{heads}x{dim}",
        version="1",
        architecture="qwen3",
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        rope=Rope(type="default", theta=theta, head_dim=dim, max_position_embeddings=4096),
        dtype="float32",
        kv_dtype="float32",
        k_norm=True,
        tokenizer_digest="none",
        attention=("full",) * layers,
    )


def random_cache(
    layers: int,
    tokens: int,
    heads: int,
    dim: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    start_position: int = 0,
) -> KVCache:
    """Normal numbers, all different."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2 * layers, tokens, heads, dim)
    tensors = torch.randn(shape, generator=generator).to(dtype).unbind()
    return KVCache(tensors[:layers], tensors[layers:], consecutive(tokens, start_position))


def rotate(keys: Tensor, positions: Tensor, theta: float) -> Tensor:
    """The rotary embedding of keys ``[T, H, D]``, half-split, token by token in float64.

    A second route to what ``mappers.rope`` does, written with transformers' ``rotate_half``.
    """
    half = keys.shape[-1] // 2
    frequencies = 1.0 / theta ** (torch.arange(half, dtype=torch.float64) / half)
    rotated = torch.empty(keys.shape, dtype=torch.float64)
    for token, position in enumerate(positions.tolist()):
        angles = (position * frequencies).repeat(2)
        key = keys[token].to(torch.float64)
        turned = torch.cat([-key[:, half:], key[:, :half]], dim=-1)
        rotated[token] = key * angles.cos() + turned * angles.sin()
    return rotated


def stacked(layers: Sequence[Tensor], heads: slice) -> Tensor:
    """Rows of a regression, float64 ``[T, len(layers) * heads * D]``, from ``[T, H, D]`` each."""
    return torch.cat([layer[:, heads].flatten(1).to(torch.float64) for layer in layers], dim=1)


def linear_target(
    source: KVCache, geometry: Geometry, sources: Sequence[int], seed: int
) -> KVCache:
    """A target in content space of which every layer is a random affine read of ``sources``.

    It reads heads as both recipes can: target head h only the source heads that match it.
    """
    generator = torch.Generator().manual_seed(seed)
    kinds = []
    for layers in (source.keys, source.values):
        kinds.append(
            tuple(
                _affine_heads([layers[j] for j in sources], geometry, generator)
                for _ in range(geometry.target_layers)
            )
        )
    return KVCache(kinds[0], kinds[1], source.positions)


def matched_heads(geometry: Geometry, target_head: int) -> slice:
    """The source heads that index-match a target head: repeated or pooled, as head_local says."""
    first = target_head * geometry.source_heads // geometry.target_heads
    return slice(first, first + max(1, geometry.source_heads // geometry.target_heads))


def reads_of_layers(structure: Structure, geometry: Geometry, sources: Sequence[int]) -> Reads:
    """What a recipe is told to read those layers: for ``joint`` single heads, the matched ones."""
    if structure != "joint":
        return tuple(sources)
    kinds = []
    for first in (0, geometry.source_layers):
        heads = []
        for head in range(geometry.target_heads):
            matched = matched_heads(geometry, head)
            read = range(matched.start, matched.stop)
            heads.append(
                tuple((first + j) * geometry.source_heads + h for j in sources for h in read)
            )
        kinds.append(tuple(heads))
    return HeadReads(*kinds)


def _affine_heads(layers: list[Tensor], geometry: Geometry, generator: torch.Generator) -> Tensor:
    heads = []
    for head in range(geometry.target_heads):
        rows = stacked(layers, matched_heads(geometry, head))
        shape = (rows.shape[1], geometry.target_dim)
        weight = torch.randn(shape, generator=generator, dtype=torch.float64)
        bias = torch.randn(geometry.target_dim, generator=generator, dtype=torch.float64)
        heads.append(rows @ weight + bias)
    return torch.stack(heads, dim=1).to(torch.float32)
