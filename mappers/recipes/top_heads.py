"""top_heads: each target head reads the few source heads that predict it best, wherever they are.

Between ``full_head``, where a target head reads all heads of k layers, and ``head_local``, where it
reads the matched ones: here it has M of the 2 * L_s * H_s keys and values that a source token has,
chosen for it alone (``mappers.head_selection``). A map of M heads costs what ``head_local`` costs
with k = M. Lambda is relative to the mean diagonal of each head read, so that a head of small
numbers is not shrunk for standing beside one of large numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.errors import LayoutError
from mappers.geometry import Geometry, Structure
from mappers.mapper import AffineMap, HeadReads, LayerMap, Reads, check_heads, layers_of
from mappers.recipes.contract import PreparedMap
from mappers.recipes.systems import LayerSums, solved


@dataclass(frozen=True, slots=True)
class TopHeads:
    """Centred ridge regression of each target head on its own choice of source heads."""

    name: str = "top_heads"
    structure: Structure = "joint"

    def columns(self, reads: Reads, geometry: Geometry) -> tuple[Tensor, Tensor]:
        if not isinstance(reads, HeadReads):
            raise LayoutError(f"{self.name} reads heads, not whole layers")
        for heads in reads:
            check_heads(heads, geometry, "a target layer")
        keys, values = (
            torch.tensor(heads)[:, :, None] * geometry.source_dim
            + torch.arange(geometry.source_dim)
            for heads in reads
        )
        return keys.flatten(1), values.flatten(1)

    def solve(
        self,
        sums: LayerSums,
        reads: Reads,
        geometry: Geometry,
        ridge: float,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> LayerMap:
        if not isinstance(reads, HeadReads):
            raise LayoutError(f"{self.name} reads heads, not whole layers")
        keys, values = (
            solved(part, ridge, block=geometry.source_dim, dtype=dtype, heads=heads)
            for part, heads in zip(sums, reads, strict=True)
        )
        return LayerMap(layers_of(reads, geometry), keys, values)

    def weight_shape(self, geometry: Geometry, k: int) -> tuple[int, int]:
        return k * geometry.source_dim, geometry.target_width

    def prepare(
        self,
        affine: AffineMap,
        sources: tuple[int, ...],
        geometry: Geometry,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> PreparedMap:
        heads, groups = affine.heads or (), geometry.target_heads
        weight = affine.weight.to(device, dtype)
        weight = weight.reshape(weight.shape[0], groups, -1).transpose(0, 1).contiguous()
        bias = affine.bias.to(device, torch.float32).reshape(groups, 1, -1)
        places = {layer: index for index, layer in enumerate(sources)}
        reads = tuple(
            tuple(_place(number, places, geometry) for number in numbers) for numbers in heads
        )
        return PreparedMap(weight, bias, reads)

    def apply(self, prepared: PreparedMap, contents: Sequence[Tensor], out: Tensor) -> None:
        rows = [[contents[place][:, head] for place, head in head] for head in prepared.reads]
        if out.dtype == rows[0][0].dtype and out.device.type == "cpu":
            _multiply(prepared, rows, out)
        else:
            _multiply_gathered(prepared, rows, out)


TOP_HEADS = TopHeads()


def _place(number: int, places: dict[int, int], geometry: Geometry) -> tuple[int, int]:
    """Where among the contents (the sources' keys, then their values) a source head is."""
    layer, head = divmod(number, geometry.source_heads)
    kind, layer = divmod(layer, geometry.source_layers)
    return kind * len(places) + places[layer], head


def _multiply(prepared: PreparedMap, rows: Sequence[Sequence[Tensor]], out: Tensor) -> None:
    """Head by head in place, without gathering the inputs."""
    for head, inputs in enumerate(rows):
        total, block = prepared.bias[head], inputs[0].shape[1]
        for index, x in enumerate(inputs):
            weight = prepared.weight[head, index * block : (index + 1) * block]
            torch.addmm(total, x, weight, out=out[:, head])
            total = out[:, head]


def _multiply_gathered(
    prepared: PreparedMap, rows: Sequence[Sequence[Tensor]], out: Tensor
) -> None:
    """One product for all heads, with float32 sums (CUDA)."""
    picked = torch.stack([x for inputs in rows for x in inputs], dim=1)
    gathered = picked.view(picked.shape[0], len(rows), -1).transpose(0, 1)
    if gathered.dtype == out.dtype:
        product = torch.bmm(gathered, prepared.weight)
    else:
        product = torch.bmm(gathered, prepared.weight, out_dtype=torch.float32)
    torch.add(product, prepared.bias, out=out.transpose(0, 1))
