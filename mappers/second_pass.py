"""A second pass over the text, once it is known what each target layer reads: weighted sums.

A weight for each token, target layer, kind and head makes the Gram matrices of all of these differ.
So only what is read is summed: ``(k * D)^2`` numbers for each group of target heads, which for
``head_local`` and ``top_heads`` is far less than the first pass's one matrix of all inputs.

Legend: G groups of target heads, n rows, H kv heads; ``_t`` target.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mappers.cache import KVCache
from mappers.collect import content, lagged, sampled_positions, source_cache
from mappers.corpus import Corpus
from mappers.geometry import Geometry
from mappers.mapper import Reads, lags_of
from mappers.models import LoadedModel
from mappers.moments import Moments
from mappers.progress import steps
from mappers.queries import read_with_queries
from mappers.recipes.contract import Recipe
from mappers.recipes.systems import LayerSums
from mappers.row_weights import query_positions, row_weights, shrinkage


class WeightedSums:
    """Weighted moments of just what each target layer reads, and the sums of squared weights."""

    def __init__(self, geometry: Geometry, recipe: Recipe, reads: Sequence[Reads]) -> None:
        self.geometry = geometry
        self.joint = recipe.structure == "joint"
        self.columns = [recipe.columns(read, geometry) for read in reads]
        self.lags = max(lags_of(read, geometry) for read in reads)
        self.layers: list[LayerSums] = []
        for layer in self.columns:
            shapes = [(*columns.shape, geometry.target_width // len(columns)) for columns in layer]
            self.layers.append(LayerSums(*(Moments(*shape) for shape in shapes)))
        self.squares = [torch.zeros(2, len(keys), dtype=torch.float64) for keys, _ in self.columns]

    def add_window(
        self,
        source: KVCache,
        target: KVCache,
        weights: Sequence[Tensor],
        before: Sequence[KVCache] = (),
    ) -> None:
        """Add the same n tokens of both models, keys in content space.

        weights: per target layer ``[2, H_t, n]``, for its keys and its values. before: for each lag
        from 1 up that is read, what the source has that many tokens before them.
        """
        inputs = [_flat(source.keys), _flat(source.values)]
        if self.joint:
            inputs = [_flat(*(side for c in (source, *before) for side in (c.keys, c.values)))] * 2
        for layer, sums in enumerate(self.layers):
            outputs = target.keys[layer], target.values[layer]
            for kind in (0, 1):
                columns = self.columns[layer][kind]
                groups = len(columns)
                given = weights[layer][kind]
                given = given.reshape(groups, -1, given.shape[1]).mean(1)
                sums[kind].add(
                    inputs[kind][:, columns].transpose(0, 1),
                    outputs[kind].reshape(len(given[0]), groups, -1).transpose(0, 1),
                    given,
                )
                self.squares[layer][kind] += given.double().square().sum(1)

    def with_plain(self, layer: int, plain: LayerSums) -> LayerSums:
        """The sums of a layer under its weights, drawn towards those of the same rows unweighted
        as far as the number of inputs asks for."""
        return LayerSums(
            *(
                _blend(even, uneven, squares)
                for even, uneven, squares in zip(
                    plain, self.layers[layer], self.squares[layer], strict=True
                )
            )
        )


def _flat(*sides: tuple[Tensor, ...]) -> Tensor:
    """``[n, H, D]`` per layer to ``[n, L * H * D]``, side after side."""
    return torch.cat([layer.flatten(1) for layers in sides for layer in layers], dim=1)


def _blend(even: Moments, uneven: Moments, squares: Tensor) -> Moments:
    share = shrinkage(uneven.weight, squares, rows=uneven.count, inputs=uneven.gram.shape[1])
    blended = even.scaled(1 - share)
    blended.merge(uneven.scaled(share * even.weight / uneven.weight.clamp_min(1e-300)))
    blended.count = even.count
    return blended


def collect_weighted(
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    sums: WeightedSums,
    *,
    stride: int,
    skip_positions: int,
    progress: bool = True,
) -> WeightedSums:
    """Add the rows that ``collect`` took, weighted by the target's attention; returns ``sums``."""
    for index in steps(range(len(corpus.windows)), "weighting", show=progress):
        ids = corpus.windows[index]
        rows = sampled_positions(len(ids), index, stride=stride, skip_positions=skip_positions)
        if not len(rows):
            continue
        read = source_cache(source, ids)
        asked = query_positions(len(ids))
        native, queries, scale = read_with_queries(target.model, ids, asked)
        weights = [
            row_weights(query, keys, values, asked, scale=scale, skip_positions=skip_positions)
            for query, keys, values in zip(queries, native.keys, native.values, strict=True)
        ]
        own, *before = (
            content(cache, source.identity.rope, length=len(ids))
            for cache in lagged(read, rows, sums.lags)
        )
        mapped = content(native.take(rows), target.identity.rope, length=len(ids))
        sums.add_window(own, mapped, [layer[:, :, rows].cpu() for layer in weights], before)
    return sums
