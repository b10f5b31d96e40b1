"""What a recipe is: how the maps of one target layer are fitted, shaped and applied.

Legend: G head groups, k source layers read, T tokens, H kv heads, D head dim; ``_s`` source,
``_t`` target. Keys are in content space throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mappers.geometry import Geometry, Structure
from mappers.mapper import AffineMap, LayerMap, Reads
from mappers.recipes.systems import LayerSums


class Read(NamedTuple):
    """One source head: which of the contents it is in, which head there, how many tokens back."""

    content: int
    head: int
    lag: int


@dataclass(frozen=True, slots=True, eq=False)
class PreparedMap:
    """An affine map laid out for multiplication, made once when a Translator is built.

    weight: ``[G, inputs, outputs of a group]`` in the compute dtype, contiguous. bias: ``[G, 1,
    outputs of a group]``, float32. reads: per group, for recipes that choose heads.
    """

    weight: Tensor
    bias: Tensor
    reads: tuple[tuple[Read, ...], ...] = ()


class Recipe(Protocol):
    """One way to fit and apply the maps of a target layer; it holds no data of its own."""

    @property
    def name(self) -> str:
        """As artifacts, the command line and metrics call it."""

    @property
    def structure(self) -> Structure:
        """The head structure that its moments must have."""

    def columns(self, reads: Reads, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Which numbers of a source token each of the G groups of target heads reads, for keys and
        for values: int64 ``[G, inputs]``, as ``systems.cut`` counts them.

        Raises LayoutError for reads that are not there.
        """

    def solve(
        self,
        sums: LayerSums,
        reads: Reads,
        geometry: Geometry,
        ridge: float,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> LayerMap:
        """The maps of one target layer from sums over just what it reads, weights in ``dtype``.

        Raises TooFewData, SingularSystem, and ValueError for a negative ridge.
        """

    def weight_shape(self, geometry: Geometry, k: int) -> tuple[int, int]:
        """``[inputs, outputs]`` of a weight that reads k layers, or k heads a target head."""

    def prepare(
        self,
        affine: AffineMap,
        sources: tuple[int, ...],
        geometry: Geometry,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> PreparedMap:
        """Convert a map of a layer for ``apply`` on this device, with contents in the order of
        ``sources``: the layers that it reads."""

    def apply(
        self, prepared: PreparedMap, contents: Sequence[Tensor], out: Tensor
    ) -> Tensor | None:
        """Map tokens: ``contents``, per source layer ``[T, H_s, D_s]`` in the compute dtype, of the
        kind that is mapped, or with ``joint`` moments all keys and then all values; in front of
        these as many rows more as the mapper reads tokens back. Source layers that lie side by side
        may come as one, ``[T, G, inputs]``. Every element of ``out``, float32 ``[T, H_t, D_t]``, is
        overwritten; it lies head by head where G is H_t (``content_memory.by_head``).

        Returns the bias, float32 ``[H_t * D_t]``, where it is left to who goes over ``out`` next
        anyway; None where ``out`` has it."""
