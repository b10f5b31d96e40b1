"""What each target layer should read: which source layers, or which source heads.

``top``, as arXiv 2608.03893 does: every source layer alone predicts every target layer, for keys
(content space) and for values; a target layer reads the k source layers with the highest mean of
the two R2. The probe reads what the recipe will read: all heads for ``all_heads`` moments, the
matched heads for ``per_head`` ones (the paper probes matched heads in either case).

``greedy``: the layers are chosen one after the other, each for what it adds to those before it
(``mappers.forward``), by the mean R2 of the target's heads again.

Where heads are chosen (``joint`` moments), of the token itself and of those before it, the choice
is always greedy (``mappers.head_selection``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mappers.forward import System, forward, penalised
from mappers.head_selection import HeadSearch, unit_heads
from mappers.head_selection import Share as Share
from mappers.mapper import HeadReads, Reads, heads_of_a_token
from mappers.moments import Moments, PairMoments
from mappers.recipes.solve import residual_squares

Method = Literal["top", "greedy"]
Weigh = Callable[[tuple[HeadReads, ...], Tensor], Tensor]
"""What a read is worth, ``[2 * L_t]``, given as many for each and the R2 that these have
(``mappers.sensitivity``)."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """r2_keys, r2_values: float64 ``[L_s, L_t]``. reads: per target layer."""

    r2_keys: Tensor
    r2_values: Tensor
    reads: tuple[Reads, ...]


def select(
    moments: PairMoments,
    k: int,
    ridge: float,
    *,
    method: Method = "top",
    share: Share = "layer",
    lags: int | None = None,
    spread: int = 1,
    weigh: Weigh | None = None,
) -> Selection:
    """What every target layer reads, from the moments alone: k layers, or k heads a target head.

    ``share``, ``lags`` (the farthest that may be read, all that the moments have if None) and
    ``spread`` are for moments from which heads are chosen; given ``weigh``, up to ``spread`` times
    k are read where they are worth more, k on average. Layers that tie are taken from the lowest
    up. R2 is on the fitted rows, centred, per target head and then averaged over heads; ``ridge``
    is as in ``recipes.solve``. Raises ValueError for a k below 1 or above what there is, TooFewData
    and SingularSystem.
    """
    geometry = moments.geometry
    joint, most = moments.structure == "joint", geometry.source_layers
    lags = moments.lags if lags is None else lags
    if not 0 <= lags <= moments.lags:
        raise ValueError(f"lags must be 0 to {moments.lags}, what the moments have, not {lags}")
    if joint:
        most = (lags + 1) * heads_of_a_token(geometry)
    if not 1 <= k <= most:
        raise ValueError(f"k must be 1 to {most}, what the source has, not {k}")
    r2_keys, r2_values = layer_r2(moments, ridge)
    reads: tuple[Reads, ...]
    if joint:
        search = HeadSearch(moments, k, ridge, lags=lags)
        paths = search.paths(share)
        counts = paths.even(k)
        if spread > 1 and weigh is not None:
            worth = weigh(paths.reads(counts), paths.explained(counts))
            paths, counts = search.spread(paths, share, worth, times=spread)
        reads = paths.reads(counts)
    elif method == "greedy":
        reads = _greedy_layers(moments, k, ridge)
    else:
        # A stable sort, so that ties do not depend on the machine.
        ranked = ((r2_keys + r2_values) / 2).argsort(dim=0, descending=True, stable=True)
        chosen = ranked[:k].sort(dim=0).values
        reads = tuple(tuple(column) for column in chosen.T.tolist())
    return Selection(r2_keys, r2_values, reads)


def layer_r2(moments: PairMoments, ridge: float) -> tuple[Tensor, Tensor]:
    """R2 of each source layer alone against each target layer, of keys and of values."""
    # Values come beside the keys of all layers, where they are inputs together.
    beside = moments.geometry.source_layers if moments.structure == "joint" else 0
    keys = single_source_r2(moments, moments.keys, ridge)
    return keys, single_source_r2(moments, moments.values, ridge, beside=beside)


def single_source_r2(
    moments: PairMoments, kind: Moments, ridge: float, *, beside: int = 0
) -> Tensor:
    """R2 of each source layer alone against each target layer, float64 ``[L_s, L_t]``.

    ``beside``: how many layers of inputs come before those that are probed.
    """
    layers = range(beside, beside + moments.geometry.source_layers)
    return torch.stack([_r2_of_layer(moments, kind, layer, ridge) for layer in layers])


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


def _greedy_layers(moments: PairMoments, k: int, ridge: float) -> tuple[tuple[int, ...], ...]:
    grams = [
        [penalised(gram, moments.source_block, ridge) for gram in part.gram]
        for part in (moments.keys, moments.values)
    ]
    reads = []
    for layer in range(moments.geometry.target_layers):
        systems = [
            System(gram, unit_heads(moments, part, group, layer), k)
            for part, kind in zip((moments.keys, moments.values), grams, strict=True)
            for group, gram in enumerate(kind)
        ]
        reads.append(tuple(sorted(forward(systems, k).blocks)))
    return tuple(reads)
