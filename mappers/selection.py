"""What each target layer should read: which source layers, or which source heads.

``top``, as arXiv 2608.03893 does: every source layer alone predicts every target layer, for keys
(content space) and for values; a target layer reads the k source layers with the highest mean of
the two R2. The probe reads what the recipe will read: all heads for ``all_heads`` moments, the
matched heads for ``per_head`` ones (the paper probes matched heads in either case).

``greedy``: the layers are chosen one after the other, each for what it adds to those before it
(``mappers.forward``), by the mean R2 of the target's heads again.

Where heads are chosen (``joint`` moments), of the token itself and of those before it, the choice
is always greedy: one for each target head, or one that all heads of a target layer share.
``spread`` gives target layers where one more step explains more their steps at the cost of others,
for as many operations in all.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mappers.forward import Path, System, forward, penalised, spread
from mappers.mapper import HeadReads, Heads, Reads, heads_of_a_token
from mappers.moments import Moments, PairMoments
from mappers.recipes.solve import residual_squares

Method = Literal["top", "greedy"]
Share = Literal["head", "layer"]
"""Who shares a choice of heads: all target heads of a layer, or nobody, each having its own."""


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
    uneven: bool = False,
    share: Share = "layer",
    lags: int | None = None,
) -> Selection:
    """What every target layer reads, from the moments alone: k layers, or k heads a target head.

    ``uneven``: k on average. ``share`` and ``lags`` (the farthest that may be read, all that the
    moments have if None) are for moments from which heads are chosen. Layers that tie are taken
    from the lowest up. R2 is on the fitted rows, centred, per target head and then averaged over
    heads; ``ridge`` is as in ``recipes.solve``. Raises ValueError for a k below 1 or above what
    there is, TooFewData and SingularSystem.
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
    # Beside the keys of all layers, where they are inputs together.
    beside = geometry.source_layers if joint else 0
    r2_keys = single_source_r2(moments, moments.keys, ridge)
    r2_values = single_source_r2(moments, moments.values, ridge, beside=beside)
    reads: tuple[Reads, ...]
    if joint:
        reads = _heads(moments, k, ridge, uneven, share, most)
    elif method == "greedy" or uneven:
        reads = _greedy_layers(moments, k, ridge, uneven)
    else:
        # A stable sort, so that ties do not depend on the machine.
        ranked = ((r2_keys + r2_values) / 2).argsort(dim=0, descending=True, stable=True)
        chosen = ranked[:k].sort(dim=0).values
        reads = tuple(tuple(column) for column in chosen.T.tolist())
    return Selection(r2_keys, r2_values, reads)


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


def _greedy_layers(
    moments: PairMoments, k: int, ridge: float, uneven: bool
) -> tuple[tuple[int, ...], ...]:
    geometry = moments.geometry
    m = geometry.source_layers if uneven else k
    grams = [
        [penalised(gram, moments.source_block, ridge) for gram in part.gram]
        for part in (moments.keys, moments.values)
    ]
    paths = []
    for layer in range(geometry.target_layers):
        systems = [
            System(gram, _unit_heads(moments, part, group, layer))
            for part, kind in zip((moments.keys, moments.values), grams, strict=True)
            for group, gram in enumerate(kind)
        ]
        paths.append(forward(systems, m))
    steps = [k] * len(paths)
    if uneven:
        steps = spread([path.gains for path in paths], k * len(paths))
    return tuple(
        tuple(sorted(path.blocks[:count])) for path, count in zip(paths, steps, strict=True)
    )


def _heads(
    moments: PairMoments, m: int, ridge: float, uneven: bool, share: Share, candidates: int
) -> tuple[HeadReads, ...]:
    """Of the first ``candidates`` heads, for keys and values of each target layer."""
    geometry = moments.geometry
    longest = min(2 * m, candidates) if uneven else m
    inputs, groups = candidates * geometry.source_dim, geometry.target_heads
    gram = penalised(moments.keys.gram[0, :inputs, :inputs], geometry.source_dim, ridge)
    paths: list[list[Path]] = []
    for layer in range(geometry.target_layers):
        for part in (moments.keys, moments.values):
            whole = _unit_heads(moments, part, 0, layer)[:inputs]
            wanted = whole.chunk(groups if share == "head" else 1, dim=1)
            paths.append([forward([System(gram, head)], longest) for head in wanted])
    steps = [m] * len(paths)
    if uneven:
        gains = [torch.stack([path.gains for path in heads]).sum(0) for heads in paths]
        steps = spread(gains, m * len(paths))
    chosen = [_cut(heads, count) for heads, count in zip(paths, steps, strict=True)]
    return tuple(HeadReads(*pair) for pair in zip(chosen[::2], chosen[1::2], strict=True))


def _cut(paths: list[Path], steps: int) -> Heads:
    return tuple(tuple(sorted(path.blocks[:steps])) for path in paths)


def _unit_heads(moments: PairMoments, part: Moments, group: int, layer: int) -> Tensor:
    """Cross products of a group's inputs with one target layer, ``[F, O]``, each of its heads
    scaled to a sum of squares of 1, so that what is explained of it is its R2."""
    outputs = slice(layer * moments.target_block, (layer + 1) * moments.target_block)
    squares = part.squares_y[group, outputs].view(-1, moments.geometry.target_dim).sum(1)
    # A head that never changes has no cross products either: any scale will do.
    scale = torch.where(squares > 0, squares, 1.0).rsqrt()
    return part.cross[group, :, outputs] * scale.repeat_interleave(moments.geometry.target_dim)
