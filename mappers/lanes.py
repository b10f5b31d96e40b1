"""Source layers on their way to a GPU, while it computes with others.

There copies have a stream of their own. A layer is copied into a buffer; whoever computes with it
waits for that copy, by an event, and the next copy into this buffer waits for that computation:
the host waits for neither. On a CPU, and for layers that are on the device already, nothing is
copied and nobody waits.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mappers.content_memory import Layer

RESTING_BUFFERS = 2
"""A buffer is used again only when so many rest: the next copy has the one that rested longest, and
so does not wait for what is computed now."""


class Stream(Protocol):
    """What is queued on it is done in turn; as ``torch.cuda.Stream``."""

    def record_event(self) -> Any:
        """Something to wait for: that all is done which is queued by now."""

    def wait_event(self, event: Any) -> None:
        """Do what is queued from now on after the event."""

    def synchronize(self) -> None:
        """Have the host wait until all is done."""


class Streams(Protocol):
    """The streams of one device."""

    @property
    def copies(self) -> Stream:
        """For copies into the device, or for those out of it."""

    @property
    def compute(self) -> Stream:
        """For all else: the caller's own."""

    def copying(self) -> AbstractContextManager[None]:
        """What is queued within it goes on ``copies``."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is on the device already."""


class CudaStreams:
    """Of a CUDA device; the copies of all its requests share one."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # with its number
        self.copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def compute(self) -> Stream:
        """The current one."""
        return torch.cuda.current_stream(self._device)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Makes ``copies`` the current one."""
        with torch.cuda.stream(self.copies):
            yield

    def holds(self, tensor: Tensor) -> bool:
        """Another GPU's memory is not its own."""
        return tensor.device == self._device


def streams_of(device: torch.device) -> Streams | None:
    """None where nothing can overlap."""
    return CudaStreams(device) if device.type == "cuda" else None


@dataclass(slots=True, eq=False)
class Shipment:
    """A layer under way: what arrives, and, if it is copied, when; the form that was sent."""

    layer: Layer
    form: object = None
    event: Any = None


class Lane:
    """The way of one request's source layers to ``device``; without ``streams`` a short one."""

    def __init__(self, device: torch.device, streams: Streams | None) -> None:
        self._device, self._streams = device, streams
        self._idle: deque[Shipment] = deque()

    @property
    def overlaps(self) -> bool:
        """Whether it helps to send layers before they are needed."""
        return self._streams is not None

    def send(self, layer: Layer) -> Shipment:
        """Begin to copy keys and values, of any form, if they are elsewhere. They must stay as they
        are until what is computed with them is done."""
        streams = self._streams
        if streams is None:
            return Shipment(_on(self._device, layer))
        if all(map(streams.holds, layer)):
            return Shipment(layer)
        buffer = self._buffer(streams, layer)
        streams.copies.wait_event(buffer.event)
        with streams.copying():
            for there, tensor in zip(buffer.layer, layer, strict=True):
                there.copy_(tensor, non_blocking=True)
        buffer.event = streams.copies.record_event()
        return buffer

    def receive(self, shipment: Shipment) -> Layer:
        """The layer on the device, for what is queued from now on until ``release``."""
        if self._streams is not None and shipment.event is not None:
            self._streams.compute.wait_event(shipment.event)
        return shipment.layer

    def release(self, shipment: Shipment) -> None:
        """All is queued that reads this layer; its buffer serves another."""
        if self._streams is not None and shipment.event is not None:
            shipment.event = self._streams.compute.record_event()
            self._idle.append(shipment)

    def close(self) -> None:
        """Have the host wait for copies that nobody received: then the memory at both ends may be
        used for other things."""
        if self._streams is not None:
            self._streams.copies.synchronize()

    def _buffer(self, streams: Streams, layer: Layer) -> Shipment:
        """One that a layer of this form fits; its event is that nothing reads it any more."""
        form = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in layer]
        if len(self._idle) >= RESTING_BUFFERS and self._idle[0].form == form:
            return self._idle.popleft()
        # New memory is that of the compute stream, which may not be done with it.
        keys, values = (torch.empty_like(tensor, device=self._device) for tensor in layer)
        return Shipment((keys, values), form, streams.compute.record_event())


def _on(device: torch.device, layer: Layer) -> Layer:
    keys, values = (tensor.to(device) for tensor in layer)
    return keys, values
