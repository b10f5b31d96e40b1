"""The source layers of one request in content space: each made once, kept while it is read."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mappers.content_memory import ContentMemory, Layer
from mappers.errors import LayoutError
from mappers.finish import strip
from mappers.lanes import Lane, Shipment
from mappers.rope import RotaryTable

AHEAD_LAYERS = 2
"""So many layers may be on their way before they are needed."""


class SourceContent:
    """Pulls source layers in order, as far as they are asked for, and strips each when first read.

    ``layers`` yields keys (as cached) and values per source layer, each of ``shape``, that is
    ``[T, H_s, D_s]``, any float dtype and device. Only the token rows ``rows`` are converted, and
    ``table``, which also says on which device, is for exactly these; in front of them the first
    stands ``repeats`` times more, where a row before it would be read. ``wanted`` are the layers
    that will be read at all: others are let go at once. ``memory`` has room for ``repeats`` and
    ``rows``, in ``dtype``; ``block_tokens`` rows are stripped at a time. ``lane`` leads to its
    device, and layers that ``arrived`` says are there may be sent before they are needed.
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
        block_tokens: int,
        memory: ContentMemory,
        lane: Lane,
        arrived: Callable[[int], bool] | None = None,
        repeats: int = 0,
    ) -> None:
        self._layers, self._pulled = layers, 0
        self._shape, self._table, self._rows, self._wanted = shape, table, rows, wanted
        self._dtype, self._block_tokens, self._memory = dtype, block_tokens, memory
        self._lane, self._arrived, self._repeats = lane, arrived, repeats
        self._sent: dict[int, Shipment] = {}
        self._waiting: dict[int, Layer] = {}
        self._content: dict[int, Layer] = {}

    def read_all(self, sources: Sequence[int]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values that a product over these source layers reads, ``repeats + rows`` tokens
        each, as the memory has them side by side."""
        layers = [self.read(source) for source in sources]
        keys, values = zip(*self._memory.side_by_side(sources, layers), strict=True)
        return keys, values

    def read(self, layer: int) -> Layer:
        """Keys and values of a source layer, ``[repeats + rows, H_s, D_s]``."""
        if layer not in self._content:
            sent = self._sent.pop(layer, None) or self._lane.send(self._pull(layer))
            keys, values = self._lane.receive(sent)
            self._content[layer] = (self._strip(layer, keys), self._convert(layer, values))
            self._lane.release(sent)
        return self._content[layer]

    def send_ahead(self, sources: Sequence[int]) -> None:
        """Have layers on their way that will be read next, in this order, if that helps."""
        if self._arrived is None or not self._lane.overlaps:
            return
        unread = [layer for layer in sources if layer not in self._content]
        for layer in unread[:AHEAD_LAYERS]:
            if layer not in self._sent and self._arrived(layer):
                self._sent[layer] = self._lane.send(self._pull(layer))

    def close(self) -> None:
        """No layer is asked for any more: afterwards nothing looks at those that were given."""
        self._lane.close()

    def drop(self, layer: int) -> None:
        """Let a layer go after its last reader; its memory serves the next."""
        self._memory.free(layer, self._content.pop(layer))

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

    def _strip(self, layer: int, keys: Tensor) -> Tensor:
        content = self._memory.keys(layer)
        stripped = content[self._repeats :]
        for start in range(0, keys.shape[0], self._block_tokens):
            stop = min(start + self._block_tokens, keys.shape[0])
            strip(self._table.slice(start, stop), keys[start:stop], stripped[start:stop])
        return self._with_repeats(content)

    def _convert(self, layer: int, values: Tensor) -> Tensor:
        """Values in the compute dtype; the very same memory where that changes nothing and no other
        layer will come through it."""
        content = self._memory.values(layer)
        if content is None:
            return values.to(self._dtype, copy=self._lane.overlaps).contiguous()
        content[self._repeats :].copy_(values)
        return self._with_repeats(content)

    def _with_repeats(self, content: Tensor) -> Tensor:
        content[: self._repeats] = content[self._repeats : self._repeats + 1]
        return content
