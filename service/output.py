"""An answer where it leaves from: each layer is computed or written there, and looked at there."""

import math

import torch
from torch import Tensor

from mappers.cache import DTYPES, Layer
from mappers.errors import NonFinite
from mappers.layouts import PAGED, Layout, read_layer, tensor_names, write_layer
from mappers.quantize import INT8_LARGEST, in_turn, quantize
from service.side import Side

# Rows that were never written are found: every float dtype reads this byte, repeated, as NaN, and
# int8 the other as a number that is never stored.
POISON, INT8_POISON = 0xFF, 0x80


class Output:
    """The target's cache of form ``side`` in uint8 ``memory``, which is as large as that.

    Of its layers, from the first, ``ended_layers`` were given, looked at and are not touched again;
    ``ready_layers`` of them are in their place."""

    def __init__(self, side: Side, memory: Tensor) -> None:
        self.ended_layers = self.ready_layers = 0
        self._side, forms = side, side.forms
        self._device, self._storage = memory.device.type, memory.untyped_storage().data_ptr()
        pieces = torch.split(memory, [form.nbytes for form in forms.values()])
        self._bytes = dict(zip(forms, pieces, strict=True))
        # Scales stay bytes, which need not be aligned.
        self._parts = {
            name: piece.view(DTYPES[form.dtype]).view(form.shape)
            if form.dtype == side.storage.dtype
            else piece
            for (name, form), piece in zip(forms.items(), pieces, strict=True)
        }

    def in_place(self, device: torch.device) -> list[Layer] | None:
        """Every layer's keys and values ``[T, H, D]`` where they leave from, for who can compute
        them there. None where their form or their device is another one than the translation's."""
        side = self._side
        if side.storage.eight_bits or side.layout in PAGED or self._device != device.type:
            return None
        layers = range(side.geometry.layers)
        return [read_layer(side.layout, self._parts, layer, side.geometry) for layer in layers]

    def begin(self, layer: int) -> None:
        """Poison a layer's memory, before it is written; until then it takes none. Layers come in
        order."""
        shared = self._side.layout is Layout.LMCACHE and layer > 0
        numbers = () if shared else tensor_names(self._side.layout, layer)
        for name in (*numbers, *self._side.scale_names(layer)):
            int8 = self._parts[name].dtype == torch.int8
            self._bytes[name].fill_(INT8_POISON if int8 else POISON)

    def end(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Have a layer in its place, or on its way: keys and values ``[T, H, D]`` of any float
        dtype, which are copied unless they lie there.

        Raises NonFinite when it holds what it must not, or is not complete.
        """
        side, parts = self._side, self._parts
        if side.storage.eight_bits:
            stored = [quantize(states, side.storage) for states in (keys, values)]
            keys, values = (one.numbers for one in stored)
            for name, scale in zip(side.scale_names(layer), in_turn(stored), strict=True):
                parts[name].copy_(scale.view(-1).view(torch.uint8))
        if not self._holds(keys):
            write_layer(side.layout, parts, layer, keys, values, side.geometry)
        scales = [parts[name].clone().view(torch.float32) for name in side.scale_names(layer)]
        written = read_layer(side.layout, parts, layer, side.geometry)
        if not all(map(_sound, (*written, *scales))):
            raise NonFinite(f"target layer {layer} holds values that are not finite")
        self.ended_layers = self.ready_layers = layer + 1

    def arrive(self) -> None:
        """Have every layer ready that was ended; here it is so already."""

    def final_bytes(self, layers: int) -> int:
        """Bytes from the front that are final when so many layers are written."""
        side = self._side
        if side.layout is Layout.LMCACHE and layers < side.geometry.layers:
            return 0  # one tensor, values after all keys
        return side.nbytes * layers // side.geometry.layers

    def _holds(self, keys: Tensor) -> bool:
        """Whether they are in our memory: only what ``in_place`` gave out is."""
        return keys.untyped_storage().data_ptr() == self._storage


def _sound(tensor: Tensor) -> bool:
    """Whether all of it was written and is finite."""
    if tensor.dtype == torch.int8:
        return int(tensor.amin()) >= -INT8_LARGEST
    extremes = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    return all(math.isfinite(float(extreme)) for extreme in extremes)
