"""The regressions of one target layer: cut out of a pair's moments, and solved.

Every recipe's map is G ridge regressions side by side, one for each group of target heads, and
differs from the others only in which numbers of the source a group reads (``Recipe.columns``).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mappers.errors import LayoutError
from mappers.mapper import AffineMap, Heads
from mappers.moments import Moments, PairMoments
from mappers.recipes.solve import solve


class LayerSums(NamedTuple):
    """The moments that the maps of one target layer follow from; G regressions each."""

    keys: Moments
    values: Moments


def cut(moments: PairMoments, target_layer: int, columns: tuple[Tensor, Tensor]) -> LayerSums:
    """The sums of one target layer, whose G groups read these columns for keys and for values.

    columns: int64 ``[G, inputs]``, numbers of a source token flat: layer, head, dim (keys of all
    layers before values where they are inputs together, and then those of the token before it).
    """
    layers = moments.geometry.target_layers
    if not 0 <= target_layer < layers:
        raise LayoutError(f"target layer {target_layer} of {layers}")
    parts = zip((moments.keys, moments.values), columns, strict=True)
    return LayerSums(*(_cut(moments, part, target_layer, wanted) for part, wanted in parts))


def _cut(moments: PairMoments, part: Moments, layer: int, columns: Tensor) -> Moments:
    geometry = moments.geometry
    source_layer, place = columns // geometry.source_width, columns % geometry.source_width
    inputs = source_layer * moments.source_block + place % moments.source_block
    if int(inputs.max()) >= part.gram.shape[1]:
        raise LayoutError(
            f"target layer {layer} reads tokens further back than moments with {moments.lags} lags"
        )
    outputs = torch.arange(geometry.target_width).view(columns.shape[0], -1)
    groups = outputs[:, 0] // moments.target_block
    if bool((place // moments.source_block != groups[:, None]).any()):
        raise LayoutError(f"{moments.structure} moments do not relate these heads")
    outputs = layer * moments.target_block + outputs % moments.target_block
    return part.blocks(groups.tolist(), inputs, outputs)


def solved(
    sums: Moments,
    ridge: float,
    *,
    block: int,
    dtype: torch.dtype = torch.float32,
    heads: Heads | None = None,
) -> AffineMap:
    """The map of G regressions, their outputs side by side; ``block`` as in ``solve``."""
    weights, biases = [], []
    for group in range(sums.gram.shape[0]):
        system = sums.gram[group], sums.cross[group]
        weight = solve(*system, rows=sums.count, ridge=ridge, block=block).to(dtype)
        # From the rounded weight, so that the mean input still maps to the mean output exactly.
        offset = sums.mean_x[group] @ weight.to(torch.float64)
        weights.append(weight)
        biases.append((sums.mean_y[group] - offset).to(torch.float32))
    return AffineMap(torch.cat(weights, dim=1), torch.cat(biases), heads)
