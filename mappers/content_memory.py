"""Where the content of source layers lies: each layer in memory of its own, or in adjacent slots.

Legend: G head groups, n rows (tokens), H kv heads, D head dim.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mappers.slots import Slots

Layer = tuple[Tensor, Tensor]


class ContentMemory(Protocol):
    """Room for the content of the source layers of one request."""

    def keys(self, source: int) -> Tensor:
        """Where to put the keys of a source layer: ``[n, H, D]``, not yet written."""

    def values(self, source: int) -> Tensor | None:
        """The same for its values; None where they may stay as and where they are."""

    def free(self, source: int, layer: Layer) -> None:
        """No target layer reads this source layer any more."""

    def side_by_side(self, sources: Sequence[int], layers: Sequence[Layer]) -> list[Layer]:
        """These layers for a product, ``[n, H, inputs]`` each or ``[n, 1, inputs]``, in order."""


class Apart:
    """Each layer in a tensor of its own: token by token, or head by head.

    A product over one head alone is faster where that head's rows follow one another: from a row to
    the next of ``H * D`` numbers is often a power of two, which caches and their tags take badly.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        heads_apart: bool,
    ) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._heads_apart = heads_apart
        self._spare: list[Tensor] = []

    def keys(self, source: int) -> Tensor:
        return self._spare.pop() if self._spare else self._new()

    def values(self, source: int) -> Tensor | None:
        return self._new() if self._heads_apart else None

    def free(self, source: int, layer: Layer) -> None:
        self._spare.append(layer[0])

    def side_by_side(self, sources: Sequence[int], layers: Sequence[Layer]) -> list[Layer]:
        return list(layers)

    def _new(self) -> Tensor:
        memory = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return by_head(memory) if self._heads_apart else memory


class InSlots:
    """All layers in one memory ``[G, n, slots, H/G * D]``, with G = 1 or H."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        slots: Slots,
        groups: int,
    ) -> None:
        rows, heads, dim = shape
        self._shape, self._slots = shape, slots
        room = (groups, rows, slots.count, heads // groups * dim)
        self._keys, self._values = (torch.empty(room, dtype=dtype, device=device) for _ in range(2))

    def keys(self, source: int) -> Tensor:
        return self._slot(self._keys, source)

    def values(self, source: int) -> Tensor | None:
        return self._slot(self._values, source)

    def free(self, source: int, layer: Layer) -> None:
        """Nothing to do: the plan of the slots says which layer comes next."""

    def side_by_side(self, sources: Sequence[int], layers: Sequence[Layer]) -> list[Layer]:
        runs = self._slots.runs(sources)
        return [(_run(self._keys, run), _run(self._values, run)) for run in runs]

    def _slot(self, memory: Tensor, source: int) -> Tensor:
        slot = memory[:, :, self._slots.of_source[source]].transpose(0, 1)
        return slot.view(self._shape)


def by_head(memory: Tensor) -> Tensor:
    """Contiguous memory for ``[n, H, D]`` as the same for head after head; what is in it moves."""
    rows, heads, dim = memory.shape
    return memory.view(heads, rows, dim).transpose(0, 1)


def _run(memory: Tensor, run: slice) -> Tensor:
    return memory[:, :, run].flatten(2).transpose(0, 1)
