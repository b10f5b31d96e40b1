"""Which source layers each target layer should read.

As arXiv 2608.03893 does: every source layer alone predicts every target layer, for keys (content
space) and for values; a target layer reads the k source layers with the highest mean of the two R2.
The probe reads what the recipe will read: all heads for ``all_heads`` moments, the matched heads
for ``per_head`` ones (the paper probes matched heads in either case).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.moments import Moments, PairMoments
from mappers.recipes.solve import residual_squares


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """r2_keys, r2_values: float64 ``[L_s, L_t]``. sources: per target layer, ascending."""

    r2_keys: Tensor
    r2_values: Tensor
    sources: tuple[tuple[int, ...], ...]


def select(moments: PairMoments, k: int, ridge: float) -> Selection:
    """The k best source layers of every target layer, from the moments alone.

    Layers that tie are taken from the lowest up. R2 is on the fitted rows, centred, per target head
    and then averaged over heads; ``ridge`` is as in ``recipes.solve``. Raises ValueError unless
    1 <= k <= L_s, TooFewData and SingularSystem.
    """
    layers = moments.geometry.source_layers
    if not 1 <= k <= layers:
        raise ValueError(f"k must be 1 to {layers}, the source's layers, not {k}")
    r2_keys = single_source_r2(moments, moments.keys, ridge)
    r2_values = single_source_r2(moments, moments.values, ridge)
    # A stable sort, so that ties do not depend on the machine.
    ranked = ((r2_keys + r2_values) / 2).argsort(dim=0, descending=True, stable=True)
    chosen = ranked[:k].sort(dim=0).values
    return Selection(r2_keys, r2_values, tuple(tuple(column) for column in chosen.T.tolist()))


def single_source_r2(moments: PairMoments, kind: Moments, ridge: float) -> Tensor:
    """R2 of each source layer alone against each target layer, float64 ``[L_s, L_t]``."""
    rows = [
        _r2_of_layer(moments, kind, layer, ridge) for layer in range(moments.geometry.source_layers)
    ]
    return torch.stack(rows)


def _r2_of_layer(moments: PairMoments, kind: Moments, layer: int, ridge: float) -> Tensor:
    block = slice(layer * moments.source_block, (layer + 1) * moments.source_block)
    residuals = [
        residual_squares(gram[block, block], cross[block], squares, rows=kind.count, ridge=ridge)
        for gram, cross, squares in zip(kind.gram, kind.cross, kind.squares_y, strict=True)
    ]
    return _mean_over_heads(moments, torch.stack(residuals), kind.squares_y)


def _mean_over_heads(moments: PairMoments, residuals: Tensor, squares: Tensor) -> Tensor:
    """``[G, O]`` sums of squares to ``[L_t]``: R2 of each head over its dims, then their mean."""
    shape = (moments.groups, moments.geometry.target_layers, -1, moments.geometry.target_dim)
    left = residuals.view(shape).sum(dim=3)
    total = squares.view(shape).sum(dim=3)
    # A head that never changes is predicted exactly by its bias, whatever the source layer.
    r2 = torch.where(total > 0, 1 - left / total, 1.0)
    return r2.mean(dim=(0, 2))
