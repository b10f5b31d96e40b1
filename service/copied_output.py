"""A GPU's answers for host memory: a layer is copied while the next is computed.

Each is put into its form on the GPU, and looked at there; what goes to the host are whole pieces of
bytes, so any layout and pinned memory make it DMA. One layer is under way at a time, and nobody
hears of it before it has arrived.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from mappers.lanes import Streams, streams_of
from service.output import Output
from service.side import Side
from service.wire import laid_out


class CopiedOutput(Output):
    """As ``Output``, for host ``memory`` and layers that come from a device with ``streams``."""

    def __init__(self, side: Side, memory: Tensor, device: torch.device, streams: Streams) -> None:
        super().__init__(side, memory)
        one = replace(side, geometry=replace(side.geometry, layers=1))
        self._memory, self._streams = memory, streams
        self._layer = torch.empty(one.nbytes, dtype=torch.uint8, device=device)
        self._layer_output = Output(one, self._layer)
        self._layer_spans = one.spans(0, laid_out(one.tensors)[0])
        self._specs, _ = laid_out(side.tensors)

    def in_place(self, device: torch.device) -> None:
        """No layer: none is computed in host memory."""

    def begin(self, layer: int) -> None:
        """Nothing: the layer before is still being copied from where this one will be poisoned."""

    def end(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Have the layer before arrive, and this one depart; raises NonFinite as ever, before any
        of it does."""
        self.arrive()
        self._layer_output.begin(0)
        self._layer_output.end(0, keys, values)
        self._streams.copies.wait_event(self._streams.compute.record_event())
        with self._streams.copying():
            for there, here in zip(
                self._side.spans(layer, self._specs), self._layer_spans, strict=True
            ):
                self._memory[slice(*there)].copy_(self._layer[slice(*here)], non_blocking=True)
        self.ended_layers = layer + 1

    def arrive(self) -> None:
        """Have the host wait for the copy under way: then the memory at both ends may be used for
        other things."""
        self._streams.copies.synchronize()
        self.ready_layers = self.ended_layers


def output_for(side: Side, memory: Tensor, device: torch.device) -> Output:
    """Where translations on ``device`` leave an answer of form ``side`` in uint8 ``memory``."""
    streams = _streams(device)
    if streams is None or streams.holds(memory):
        return Output(side, memory)
    return CopiedOutput(side, memory, device, streams)


@cache
def _streams(device: torch.device) -> Streams | None:
    """Other ones than those on which source layers come in; torch has few, so not one a request."""
    return streams_of(device)
