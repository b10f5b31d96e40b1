"""Ridge maps over head groups: what ``full_head`` and ``head_local`` have in common.

Within a group g of G, each token's inputs are the group's source heads, source layer by source
layer: ``inputs = k * H_s/G * D_s``. The stored weight is ``[inputs, H_t * D_t]``; block g of its
columns belongs to the target heads of group g and is multiplied with the inputs of group g.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.errors import LayoutError
from mappers.geometry import Geometry, Structure, head_groups
from mappers.mapper import AffineMap, HeadReads, LayerMap, Reads, check_sources
from mappers.recipes.contract import PreparedMap
from mappers.recipes.systems import LayerSums, solved


@dataclass(frozen=True, slots=True)
class RidgeRecipe:
    """A recipe whose maps are centred ridge regressions; ``contract.Recipe`` says the methods."""

    name: str
    structure: Structure

    def columns(self, reads: Reads, geometry: Geometry) -> tuple[Tensor, Tensor]:
        if isinstance(reads, HeadReads):
            raise LayoutError(f"{self.name} reads whole layers, not heads")
        check_sources(tuple(reads), geometry.source_layers, "a target layer")
        groups = head_groups(geometry, self.structure)
        layers = torch.tensor(reads)[None, :, None] * geometry.source_width
        columns = layers + torch.arange(geometry.source_width).view(groups, 1, -1)
        return columns.flatten(1), columns.flatten(1)

    def solve(
        self,
        sums: LayerSums,
        reads: Reads,
        geometry: Geometry,
        ridge: float,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> LayerMap:
        if isinstance(reads, HeadReads):
            raise LayoutError(f"{self.name} reads whole layers, not heads")
        block = self.weight_shape(geometry, 1)[0]
        keys, values = (solved(part, ridge, block=block, dtype=dtype) for part in sums)
        return LayerMap(tuple(reads), keys, values)

    def weight_shape(self, geometry: Geometry, k: int) -> tuple[int, int]:
        groups = head_groups(geometry, self.structure)
        return k * geometry.source_width // groups, geometry.target_width

    def prepare(
        self,
        affine: AffineMap,
        sources: tuple[int, ...],
        geometry: Geometry,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> PreparedMap:
        groups = head_groups(geometry, self.structure)
        weight = _in_order(affine.weight, sources).to(device, dtype)
        weight = weight.reshape(weight.shape[0], groups, -1).transpose(0, 1)
        bias = affine.bias.to(device, torch.float32).reshape(groups, 1, -1)
        return PreparedMap(weight=weight.contiguous(), bias=bias)

    def apply(
        self, prepared: PreparedMap, contents: Sequence[Tensor], out: Tensor
    ) -> Tensor | None:
        groups = prepared.weight.shape[0]
        rows = [by_group(content, groups) for content in contents]
        if rows[0].dtype == out.dtype:
            _multiply(prepared, rows, by_group(out, groups))
            return None
        gathered = rows[0] if len(rows) == 1 else torch.cat(rows, dim=2)
        return multiply_mixed(prepared, gathered, by_group(out, groups))


def _in_order(weight: Tensor, sources: tuple[int, ...]) -> Tensor:
    """A stored weight, whose inputs are by ascending source layer, for inputs in this order."""
    order = [sorted(sources).index(source) for source in sources]
    if order == sorted(order):
        return weight
    return weight.reshape(len(sources), -1, weight.shape[1])[order].flatten(0, 1)


def by_group(tensor: Tensor, groups: int) -> Tensor:
    """``[T, H, D]`` as a view ``[G, T, H/G * D]``; its heads may lie apart where G is H."""
    if groups == tensor.shape[1]:
        return tensor.transpose(0, 1)
    return tensor.view(tensor.shape[0], groups, -1).transpose(0, 1)


def _multiply(prepared: PreparedMap, rows: Sequence[Tensor], out: Tensor) -> None:
    """Add up the products of inputs that do not lie side by side, in place."""
    total: Tensor = prepared.bias
    first = 0
    for x in rows:
        weight = prepared.weight[:, first : first + x.shape[2]]
        first += x.shape[2]
        if out.shape[0] == 1:  # one large product, which unlike a batch of one uses all cores
            torch.addmm(total[0], x[0], weight[0], out=out[0])
        else:
            torch.baddbmm(total, x, weight, out=out)
        total = out


def multiply_mixed(prepared: PreparedMap, gathered: Tensor, out: Tensor) -> Tensor:
    """16-bit inputs ``[G, T, inputs]``, float32 sums (CUDA only): one product, since adding up
    would round k times. Returns the bias, which ``out`` has yet to get."""
    torch.bmm(gathered, prepared.weight, out_dtype=torch.float32, out=out)
    return prepared.bias.flatten()
