"""What a recipe is: how the maps of one target layer are fitted, shaped and applied.

Legend: G head groups, k source layers read, T tokens, H kv heads, D head dim; ``_s`` source,
``_t`` target. Keys are in content space throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mappers.geometry import Geometry, Structure
from mappers.mapper import AffineMap, LayerMap
from mappers.moments import PairMoments


@dataclass(frozen=True, slots=True, eq=False)
class PreparedMap:
    """An affine map laid out for multiplication, made once when a Translator is built.

    weight: ``[G, inputs, outputs of a group]`` in the compute dtype, contiguous. bias: ``[G, 1,
    outputs of a group]``, float32.
    """

    weight: Tensor
    bias: Tensor


class Recipe(Protocol):
    """One way to fit and apply the maps of a target layer; it holds no data of its own."""

    @property
    def name(self) -> str:
        """As artifacts, the command line and metrics call it."""

    @property
    def structure(self) -> Structure:
        """The head structure that its moments must have."""

    def fit(
        self,
        moments: PairMoments,
        target_layer: int,
        sources: Sequence[int],
        ridge: float,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> LayerMap:
        """Fit one target layer on the source layers ``sources`` (ascending), weights in ``dtype``.

        Raises LayoutError for moments of another structure or sources that are not there,
        TooFewData, SingularSystem, and ValueError for a negative ridge.
        """

    def weight_shape(self, geometry: Geometry, k: int) -> tuple[int, int]:
        """``[inputs, outputs]`` of each of the two weights of a layer that reads k layers."""

    def flops_per_token(self, geometry: Geometry, k: int) -> int:
        """Of one target layer that reads k layers, keys and values together."""

    def prepare(
        self, affine: AffineMap, geometry: Geometry, *, device: torch.device, dtype: torch.dtype
    ) -> PreparedMap:
        """Convert a map for ``apply`` on this device in this compute dtype."""

    def apply(self, prepared: PreparedMap, contents: Sequence[Tensor], out: Tensor) -> None:
        """Map tokens: ``contents``, per source layer ``[T, H_s, D_s]`` in the compute dtype;
        every element of ``out``, float32 ``[T, H_t, D_t]``, is overwritten. Both lie token by
        token, or head by head where each head is regressed alone (``content.empty``)."""
