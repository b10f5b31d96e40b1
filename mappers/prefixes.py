"""The target's exact KV for first tokens that are known beforehand.

The first token of a prompt is an attention sink: its keys and values lie far from all others, and a
linear map ruins them. They depend on nothing but the tokens themselves, so they can be looked up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mappers.cache import KVCache
from mappers.errors import LayoutError

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixBlock:
    """All known sequences of one length p, stacked.

    ids: int64 ``[N, p]``. keys, values: per target layer ``[N, p, H_t, D_t]``; keys as cached, that
    is with k-norm and rotary embedding at positions 0..p-1.
    """

    ids: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def row(self, index: int, tokens: int) -> KVCache:
        """The first ``tokens`` positions of one sequence, as views."""
        return KVCache(
            keys=tuple(layer[index, :tokens] for layer in self.keys),
            values=tuple(layer[index, :tokens] for layer in self.values),
            positions=torch.arange(tokens),
        )


@dataclass(frozen=True, slots=True, eq=False)
class ExactPrefixes:
    """A table of known token-id sequences and the target's KV for them, longest match first.

    Attention is causal, so every head of a known sequence is known as well.
    Raises LayoutError when the blocks do not fit together.
    """

    blocks: tuple[PrefixBlock, ...] = ()
    _index: dict[TokenIds, tuple[int, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for block in self.blocks:
            _check_block(block, self.blocks[0])
        object.__setattr__(self, "_index", _index_heads(self.blocks))

    @classmethod
    def of(cls, entries: Mapping[TokenIds, KVCache]) -> "ExactPrefixes":
        """Stack entries by length. Each cache holds exactly its ids, at positions 0..p-1."""
        by_length: dict[int, list[TokenIds]] = {}
        for ids, cache in entries.items():
            _check_entry(ids, cache)
            by_length.setdefault(len(ids), []).append(ids)
        return cls(tuple(_stack(sequences, entries) for _, sequences in sorted(by_length.items())))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "ExactPrefixes":
        """The inverse of ``tensors``; any missing, surplus or misshapen tensor is a LayoutError."""
        lengths, layers = _declared(tensors)
        expected = {name for p in lengths for name in _names(p, layers)}
        if expected != set(tensors):
            raise LayoutError(
                f"the prefix table needs exactly {len(expected)} tensors for lengths "
                f"{lengths} and {layers} layers, not {len(tensors)}"
            )
        return cls(tuple(_unpack(tensors, p, layers) for p in lengths))

    def tensors(self) -> dict[str, Tensor]:
        """For safetensors: ``prefix.{p}.ids`` and ``prefix.{p}.{layer}.{k|v}`` by length p."""
        packed: dict[str, Tensor] = {}
        for block in self.blocks:
            stem = f"prefix.{block.ids.shape[1]}"
            packed[f"{stem}.ids"] = block.ids
            for layer, (keys, values) in enumerate(zip(block.keys, block.values, strict=True)):
                packed[f"{stem}.{layer}.k"] = keys
                packed[f"{stem}.{layer}.v"] = values
        return packed

    def longest_match(self, token_ids: Sequence[int]) -> tuple[int, KVCache] | None:
        """The longest head of ``token_ids`` that is known: its length p and its KV, or None."""
        ids = tuple(token_ids)
        longest = max((block.ids.shape[1] for block in self.blocks), default=0)
        for tokens in range(min(longest, len(ids)), 0, -1):
            found = self._index.get(ids[:tokens])
            if found is not None:
                block, row = found
                return tokens, self.blocks[block].row(row, tokens)
        return None

    def __len__(self) -> int:
        """Known sequences, their heads not counted."""
        return sum(block.ids.shape[0] for block in self.blocks)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def check_geometry(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        """LayoutError unless the table, if it holds anything, is for a target of this geometry."""
        for block in self.blocks:
            given = (len(block.keys), *block.keys[0].shape[2:])
            if given != (num_layers, num_kv_heads, head_dim):
                raise LayoutError(
                    f"the prefix table is for (layers, kv heads, head dim) {given}, the target has "
                    f"{(num_layers, num_kv_heads, head_dim)}"
                )


def _index_heads(blocks: tuple[PrefixBlock, ...]) -> dict[TokenIds, tuple[int, int]]:
    index: dict[TokenIds, tuple[int, int]] = {}
    whole: set[TokenIds] = set()
    for number, block in enumerate(blocks):
        for row, ids in enumerate(block.ids.tolist()):
            sequence = tuple(ids)
            if sequence in whole:
                raise LayoutError(f"a prefix of {len(sequence)} tokens is in the table twice")
            whole.add(sequence)
            for tokens in range(1, len(sequence) + 1):
                index.setdefault(sequence[:tokens], (number, row))
    return index


def _check_entry(ids: TokenIds, cache: KVCache) -> None:
    if not ids or cache.tokens != len(ids) or cache.positions.tolist() != list(range(len(ids))):
        raise LayoutError(
            f"the cache of a prefix must hold exactly its {len(ids)} tokens, from position 0; "
            f"it has {cache.tokens}"
        )


def _stack(sequences: list[TokenIds], entries: Mapping[TokenIds, KVCache]) -> PrefixBlock:
    caches = [entries[ids] for ids in sequences]
    if len({cache.num_layers for cache in caches}) > 1:
        raise LayoutError("the caches of the prefixes have different numbers of layers")
    layers = range(caches[0].num_layers)
    return PrefixBlock(
        ids=torch.tensor(sequences, dtype=torch.int64),
        keys=tuple(torch.stack([cache.keys[layer] for cache in caches]) for layer in layers),
        values=tuple(torch.stack([cache.values[layer] for cache in caches]) for layer in layers),
    )


def _names(length: int, layers: int) -> list[str]:
    kinds = [f"{layer}.{kind}" for layer in range(layers) for kind in "kv"]
    return [f"prefix.{length}.{rest}" for rest in ("ids", *kinds)]


def _declared(tensors: Mapping[str, Tensor]) -> tuple[list[int], int]:
    """Lengths, and layers of the first length, that the names speak of."""
    lengths = []
    for name in tensors:
        stem, _, last = name.rpartition(".")
        number = stem.removeprefix("prefix.")
        if last == "ids" and stem.startswith("prefix.") and number.isdecimal():
            lengths.append(int(number))
    first = f"prefix.{min(lengths, default=0)}."
    layers = sum(name.startswith(first) and name.endswith(".k") for name in tensors)
    return sorted(lengths), layers


def _unpack(tensors: Mapping[str, Tensor], length: int, layers: int) -> PrefixBlock:
    stem = f"prefix.{length}"
    ids = tensors[f"{stem}.ids"]
    if ids.ndim != 2 or ids.shape[1] != length:
        raise LayoutError(f"prefixes of {length} tokens have ids of shape {tuple(ids.shape)}")
    return PrefixBlock(
        ids=ids,
        keys=tuple(tensors[f"{stem}.{layer}.k"] for layer in range(layers)),
        values=tuple(tensors[f"{stem}.{layer}.v"] for layer in range(layers)),
    )


def _check_block(block: PrefixBlock, first: PrefixBlock) -> None:
    ids = block.ids
    if ids.ndim != 2 or 0 in ids.shape or ids.dtype != torch.int64 or bool((ids < 0).any()):
        raise LayoutError("prefix ids must be non-negative int64 of shape [sequences, tokens]")
    if not block.keys or len(block.keys) != len(first.keys) or len(block.keys) != len(block.values):
        raise LayoutError("every prefix needs keys and values of every target layer")
    shape = (*ids.shape, *first.keys[0].shape[2:])
    for layer, tensor in enumerate((*block.keys, *block.values)):
        if tuple(tensor.shape) != shape or tensor.ndim != 4:
            raise LayoutError(
                f"prefix KV of layer {layer % len(block.keys)} must be {shape}, "
                f"not {tuple(tensor.shape)}"
            )
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise LayoutError(f"prefix KV of layer {layer % len(block.keys)} must be finite floats")
