"""top_heads: what a target layer reads are single source heads, wherever they predict it best.

Of the keys and values that all source layers have of a token, and of the tokens before it (lags),
M are read (``mappers.selection``): by each target head its own choice, or one choice by all heads
of a target layer. Either way a target head has ``M * D_s`` inputs, so with ``M = k * H_s`` a map
costs what ``full_head`` costs with k layers. One choice for all makes a single product of it; the
fewer heads are read, the more does it help if each target head may choose its own. That keys and
values also follow from the token before: attention of one layer can fetch what the other model
fetches elsewhere, or not at all. Lambda is relative to the mean diagonal of each head read, so
that a head of small numbers is not shrunk for standing beside one of large numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.errors import LayoutError
from mappers.geometry import Geometry, Structure
from mappers.mapper import (
    AffineMap,
    HeadReads,
    LayerMap,
    Reads,
    check_heads,
    heads_of_a_token,
    layers_of,
)
from mappers.recipes.contract import PreparedMap, Read
from mappers.recipes.ridge import by_group, multiply_mixed
from mappers.recipes.systems import LayerSums, solved


@dataclass(frozen=True, slots=True)
class TopHeads:
    """Centred ridge regression on chosen source heads, of each target head or of all together."""

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
        heads = affine.heads or ()
        groups, weight = len(heads), affine.weight.to(device, dtype)
        weight = weight.reshape(weight.shape[0], groups, -1).transpose(0, 1).contiguous()
        bias = affine.bias.to(device, torch.float32).reshape(groups, 1, -1)
        reads = tuple(
            tuple(_located(number, sources, geometry) for number in numbers) for numbers in heads
        )
        return PreparedMap(weight, bias, reads)

    def apply(
        self, prepared: PreparedMap, contents: Sequence[Tensor], out: Tensor
    ) -> Tensor | None:
        own_choices = len(prepared.reads) > 1
        if own_choices and out.dtype == contents[0].dtype and out.device.type == "cpu":
            _multiply(prepared, contents, out)
            return None
        return multiply_gathered(prepared, contents, out)


TOP_HEADS = TopHeads()


def _located(number: int, sources: tuple[int, ...], geometry: Geometry) -> Read:
    """Where among the contents (the sources' keys, then their values) a source head is."""
    lag, number = divmod(number, heads_of_a_token(geometry))
    layer, head = divmod(number, geometry.source_heads)
    kind, layer = divmod(layer, geometry.source_layers)
    return Read(kind * len(sources) + sources.index(layer), head, lag)


def _rows(read: Read, contents: Sequence[Tensor], tokens: int) -> Tensor:
    """The inputs ``[T, D_s]`` that one read gives, as a view: a lag is so many rows earlier."""
    content = contents[read.content]
    first = len(content) - tokens - read.lag
    return content[first : first + tokens, read.head]


def _multiply(prepared: PreparedMap, contents: Sequence[Tensor], out: Tensor) -> None:
    """Read by read in place: of inputs that one target head reads, gathering costs more."""
    groups = by_group(out, len(prepared.reads))
    for group, reads in enumerate(prepared.reads):
        total, block = prepared.bias[group], prepared.weight.shape[1] // len(reads)
        for index, read in enumerate(reads):
            weight = prepared.weight[group, index * block : (index + 1) * block]
            torch.addmm(total, _rows(read, contents, len(out)), weight, out=groups[group])
            total = groups[group]


def multiply_gathered(
    prepared: PreparedMap, contents: Sequence[Tensor], out: Tensor
) -> Tensor | None:
    """One product for all groups, with float32 sums: on CUDA, and of inputs that all heads read.
    Returns the bias where ``out`` has yet to get it."""
    rows = [_rows(read, contents, len(out)) for reads in prepared.reads for read in reads]
    picked, groups = torch.stack(rows, dim=1), len(prepared.reads)
    gathered = picked.view(len(out), groups, -1).transpose(0, 1)
    outputs = by_group(out, groups)
    if gathered.dtype != out.dtype:
        return multiply_mixed(prepared, gathered, outputs)
    torch.baddbmm(prepared.bias, gathered, prepared.weight, out=outputs)
    return None
