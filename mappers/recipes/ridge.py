"""Ridge maps over head groups: what ``full_head`` and ``head_local`` have in common.

Within a group g of G, each token's inputs are the group's source heads, source layer by source
layer: ``inputs = k * H_s/G * D_s``. The stored weight is ``[inputs, H_t * D_t]``; block g of its
columns belongs to the target heads of group g and is multiplied with the inputs of group g.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.errors import LayoutError
from mappers.geometry import Geometry, Structure, head_groups
from mappers.mapper import AffineMap, LayerMap, check_sources
from mappers.moments import Moments, PairMoments
from mappers.recipes.contract import PreparedMap
from mappers.recipes.solve import solve


@dataclass(frozen=True, slots=True)
class RidgeRecipe:
    """A recipe whose maps are centred ridge regressions; ``contract.Recipe`` says the methods."""

    name: str
    structure: Structure

    def fit(
        self,
        moments: PairMoments,
        target_layer: int,
        sources: Sequence[int],
        ridge: float,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> LayerMap:
        geometry, chosen = moments.geometry, tuple(sources)
        if moments.structure != self.structure:
            raise LayoutError(
                f"{self.name} needs {self.structure} moments, not {moments.structure}"
            )
        if not 0 <= target_layer < geometry.target_layers:
            raise LayoutError(f"target layer {target_layer} of {geometry.target_layers}")
        check_sources(chosen, geometry.source_layers, f"target layer {target_layer}")
        inputs = _columns(chosen, moments.source_block)
        outputs = _columns((target_layer,), moments.target_block)
        return LayerMap(
            sources=chosen,
            keys=_fit_affine(moments.keys, inputs, outputs, ridge, dtype),
            values=_fit_affine(moments.values, inputs, outputs, ridge, dtype),
        )

    def weight_shape(self, geometry: Geometry, k: int) -> tuple[int, int]:
        groups = head_groups(geometry, self.structure)
        return k * geometry.source_width // groups, geometry.target_width

    def flops_per_token(self, geometry: Geometry, k: int) -> int:
        inputs, outputs = self.weight_shape(geometry, k)
        return 2 * 2 * inputs * outputs

    def prepare(
        self, affine: AffineMap, geometry: Geometry, *, device: torch.device, dtype: torch.dtype
    ) -> PreparedMap:
        groups = head_groups(geometry, self.structure)
        weight = affine.weight.to(device, dtype)
        weight = weight.reshape(weight.shape[0], groups, -1).transpose(0, 1)
        bias = affine.bias.to(device, torch.float32).reshape(groups, 1, -1)
        return PreparedMap(weight=weight.contiguous(), bias=bias)

    def apply(self, prepared: PreparedMap, contents: Sequence[Tensor], out: Tensor) -> None:
        groups = prepared.weight.shape[0]
        rows = [_by_group(content, groups) for content in contents]
        if rows[0].dtype == out.dtype:
            _multiply(prepared, rows, _by_group(out, groups))
        else:
            _multiply_mixed(prepared, rows, _by_group(out, groups))


def _fit_affine(
    moments: Moments, inputs: Tensor, outputs: Tensor, ridge: float, dtype: torch.dtype
) -> AffineMap:
    weights, biases = zip(*_fit_groups(moments, inputs, outputs, ridge, dtype), strict=True)
    return AffineMap(weight=torch.cat(weights, dim=1), bias=torch.cat(biases))


def _fit_groups(
    moments: Moments, inputs: Tensor, outputs: Tensor, ridge: float, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    for group in range(moments.gram.shape[0]):
        gram = moments.gram[group][inputs][:, inputs]
        cross = moments.cross[group][inputs][:, outputs]
        weight = solve(gram, cross, rows=moments.count, ridge=ridge).to(dtype)
        # From the rounded weight, so that the mean input still maps to the mean output exactly.
        offset = moments.mean_x[group][inputs] @ weight.to(torch.float64)
        yield weight, (moments.mean_y[group][outputs] - offset).to(torch.float32)


def _columns(layers: Sequence[int], block: int) -> Tensor:
    """Where the numbers of these layers lie among those of all layers."""
    return (torch.tensor(layers)[:, None] * block + torch.arange(block)).flatten()


def _by_group(tensor: Tensor, groups: int) -> Tensor:
    """``[T, H, D]`` as a view ``[G, T, H/G * D]``; its heads may lie apart where G is H."""
    if groups == tensor.shape[1]:
        return tensor.transpose(0, 1)
    return tensor.view(tensor.shape[0], groups, -1).transpose(0, 1)


def _multiply(prepared: PreparedMap, rows: Sequence[Tensor], out: Tensor) -> None:
    """Accumulate source layer by source layer, in place and without gathering the inputs."""
    total: Tensor = prepared.bias
    block = rows[0].shape[2]
    for index, x in enumerate(rows):
        weight = prepared.weight[:, index * block : (index + 1) * block]
        if out.shape[0] == 1:  # one large product, which unlike a batch of one uses all cores
            torch.addmm(total[0], x[0], weight[0], out=out[0])
        else:
            torch.baddbmm(total, x, weight, out=out)
        total = out


def _multiply_mixed(prepared: PreparedMap, rows: Sequence[Tensor], out: Tensor) -> None:
    """16-bit inputs, float32 sums (CUDA only): one product, since adding up would round k times."""
    gathered = torch.cat(list(rows), dim=2)
    product = torch.bmm(gathered, prepared.weight, out_dtype=torch.float32)
    torch.add(product, prepared.bias, out=out)
