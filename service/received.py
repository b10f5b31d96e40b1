"""A cache where it arrived: each layer is looked at when it is asked for, and may go after that."""

from collections.abc import Iterator, Mapping
from itertools import accumulate

from torch import Tensor

from mappers.cache import KVCache, Layer, consecutive
from mappers.errors import LayoutError
from mappers.quantize import Stored, check, dequantize
from service.errors import Problem
from service.side import Side, tensor_in
from service.wire import TensorSpec


class Received:
    """A ``Readable`` of the tensors ``specs`` in uint8 ``data``, which are those of ``side``.

    Reading a layer raises ``Problem`` 422 for scales or zero points that cannot be used. Layers are
    views where the layout allows it, else a copy of one layer at a time.
    """

    def __init__(
        self, side: Side, data: Tensor, specs: Mapping[str, TensorSpec], start_position: int
    ) -> None:
        self._side, self._data, self._specs = side, data, specs
        self.positions = consecutive(side.geometry.tokens, start_position)
        self.spans = [side.spans(layer, specs) for layer in range(self.num_layers)]
        ends = [max(end for _, end in spans) for spans in self.spans]
        self.needed_bytes = list(accumulate(ends, max))
        """With so many bytes from the front, each layer and all before it are there."""

    @property
    def num_layers(self) -> int:
        """L."""
        return self._side.geometry.layers

    @property
    def tokens(self) -> int:
        """T."""
        return self._side.geometry.tokens

    def layer(self, index: int) -> Layer:
        """Keys and values ``[T, H, D]``, float32 where they have scales."""
        parts = {n: tensor_in(self._data, self._specs[n]) for n in self._side.names(index)}
        keys, values = self._side.layer(parts, index)
        return self._floats(index, "k", keys), self._floats(index, "v", values)

    def layers(self) -> Iterator[Layer]:
        """All of them in order."""
        return map(self.layer, range(self.num_layers))

    def take(self, rows: Tensor) -> KVCache:
        """The tokens ``rows`` (int64 ``[n]``) of all layers, copied."""
        taken = [(keys[rows], values[rows]) for keys, values in self.layers()]
        keys, values = zip(*taken, strict=True)
        return KVCache(keys, values, self.positions[rows])

    def _floats(self, index: int, kind: str, stored: Stored) -> Tensor:
        if not self._side.storage.scaled:
            return stored.numbers
        try:
            check(stored, self._side.storage)
        except LayoutError as error:
            raise Problem("bad_scales", f"layer {index}, {kind}: {error}") from error
        return dequantize(stored)
