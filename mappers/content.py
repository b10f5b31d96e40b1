"""The source layers of one request in content space: each made once, kept while it is read."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mappers.errors import LayoutError
from mappers.rope import RotaryTable

Layer = tuple[Tensor, Tensor]


class SourceContent:
    """Pulls source layers in order, as far as they are asked for, and strips each when first read.

    ``layers`` yields keys (as cached) and values per source layer, each of ``shape``, that is
    ``[T, H_s, D_s]``, any float dtype and device. Only the token rows ``rows`` are converted, and
    ``table``, which also says on which device, is for exactly these; in front of them the first
    stands ``repeats`` times more, where a row before it would be read. ``wanted`` are the layers
    that will be read at all: others are let go at once. ``heads_apart`` is for ``empty``.
    """

    def __init__(
        self,
        layers: Iterator[Layer],
        *,
        shape: tuple[int, int, int],
        table: RotaryTable,
        rows: slice,
        wanted: frozenset[int],
        dtype: torch.dtype,
        chunk_tokens: int,
        heads_apart: bool = False,
        repeats: int = 0,
    ) -> None:
        self._layers, self._pulled = layers, 0
        self._shape, self._table, self._rows, self._wanted = shape, table, rows, wanted
        self._dtype, self._chunk_tokens, self._heads_apart = dtype, chunk_tokens, heads_apart
        self._repeats = repeats
        self._waiting: dict[int, Layer] = {}
        self._content: dict[int, Layer] = {}
        self._free: list[Tensor] = []

    def read(self, layer: int) -> Layer:
        """Keys and values of a source layer, ``[repeats + rows, H_s, D_s]``, laid out by
        ``empty``."""
        if layer not in self._content:
            keys, values = self._pull(layer)
            self._content[layer] = (self._strip(keys), self._convert(values))
        return self._content[layer]

    def drop(self, layer: int) -> None:
        """Let a layer go after its last reader; its memory for keys serves the next layer."""
        keys, _ = self._content.pop(layer)
        self._free.append(keys)

    def _pull(self, layer: int) -> Layer:
        while layer not in self._waiting:
            pulled = next(self._layers, None)
            if pulled is None:
                raise LayoutError(f"the source ended before its layer {layer}")
            # Counted by hand: enumerate would hold on to the layer that it gave out last.
            index, self._pulled = self._pulled, self._pulled + 1
            if index in self._wanted:
                self._waiting[index] = self._checked(index, pulled)
        return self._waiting.pop(layer)

    def _checked(self, index: int, layer: Layer) -> Layer:
        for tensor in layer:
            if tuple(tensor.shape) != self._shape or not tensor.is_floating_point():
                raise LayoutError(
                    f"source layer {index} must be floats {list(self._shape)}, "
                    f"not {tensor.dtype} {list(tensor.shape)}"
                )
        keys, values = layer
        return keys.detach()[self._rows], values.detach()[self._rows]

    def _strip(self, keys: Tensor) -> Tensor:
        device = self._table.cos.device
        content = self._free.pop() if self._free else self._empty(keys)
        stripped = content[self._repeats :]
        for start in range(0, keys.shape[0], self._chunk_tokens):
            stop = min(start + self._chunk_tokens, keys.shape[0])
            chunk = keys[start:stop].to(device, non_blocking=True)
            self._table.slice(start, stop).strip(chunk, out=stripped[start:stop])
        return self._with_repeats(content)

    def _convert(self, values: Tensor) -> Tensor:
        """Values in the compute dtype; the very same memory where that changes nothing."""
        if self._heads_apart or self._repeats:
            content = self._empty(values)
            content[self._repeats :].copy_(values, non_blocking=True)
            return self._with_repeats(content)
        return values.to(self._table.cos.device, self._dtype, non_blocking=True).contiguous()

    def _with_repeats(self, content: Tensor) -> Tensor:
        content[: self._repeats] = content[self._repeats : self._repeats + 1]
        return content

    def _empty(self, like: Tensor) -> Tensor:
        shape = (self._repeats + like.shape[0], *like.shape[1:])
        device = self._table.cos.device
        return empty(shape, dtype=self._dtype, device=device, heads_apart=self._heads_apart)


def empty(
    shape: Sequence[int], *, dtype: torch.dtype, device: torch.device, heads_apart: bool
) -> Tensor:
    """Memory for ``[T, H, D]``: token by token, or with ``heads_apart`` head by head.

    A product over one head alone is faster where that head's rows follow one another: from a row to
    the next of ``H * D`` numbers is often a power of two, which caches and their tags take badly.
    """
    memory = torch.empty(*shape, dtype=dtype, device=device)
    return by_head(memory) if heads_apart else memory


def by_head(memory: Tensor) -> Tensor:
    """Contiguous memory for ``[T, H, D]`` as the same for head after head; what is in it moves."""
    tokens, heads, dim = memory.shape
    return memory.view(heads, tokens, dim).transpose(0, 1)
