"""Mappers that must lose: what a figure means is how far it is from theirs.

- identity: the source's own content, from the layer at the same share of the depth, with the
  target's rotary embedding; only where heads and head size are equal
- mean KV: every token gets the mean key and value of its layer and head
- shuffled pairs: head_local k=4, fitted on rows that do not belong together
- random map: head_local k=4 with random weights, of the target's mean and variance per channel
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mappers.geometry import Geometry
from mappers.mapper import AffineMap, LayerMap
from mappers.moments import Moments, PairMoments
from mappers.recipes import RECIPES, fit_layer
from mappers.selection import select
from tests.bench.recipe_bench.candidates import RIDGE, Candidate, Fit, Group, bare_mapper
from tests.bench.recipe_bench.fitted import Fitted, Models, of_mapper
from tests.bench.recipe_bench.sums import SEEDS, PairSums, Part

READ = 4
MATCHED = frozenset({Part("per_head")})


def controls(geometry: Geometry) -> Iterator[Candidate]:
    """What a seed decides comes once for each."""
    source = (geometry.source_heads, geometry.source_dim)
    if source == (geometry.target_heads, geometry.target_dim):
        yield _control("identity", _identity, frozenset())
    yield _control("mean KV", _mean, MATCHED)
    for seed in SEEDS:
        shuffled = frozenset({Part("per_head", f"shuffled-{seed}")})
        fit = partial(_shuffled, parts=shuffled)
        yield _control(f"shuffled pairs, seed {seed}", fit, shuffled)
        yield _control(f"random map, seed {seed}", partial(_random, seed=seed), MATCHED)


def _control(name: str, fit: Fit, needs: frozenset[Part]) -> Candidate:
    return Candidate(f"control: {name}", Group.CONTROL, fit, needs)


def _identity(models: Models, _: PairSums) -> Fitted:
    g = models.geometry
    weight = torch.eye(g.source_dim).repeat(1, g.target_heads)
    same = AffineMap(weight, torch.zeros(g.target_width))
    step = (g.source_layers - 1) / max(1, g.target_layers - 1)
    layers = [LayerMap((round(n * step),), same, same) for n in range(g.target_layers)]
    return of_mapper(bare_mapper(models, "head_local", layers, skipped=0), 0.0)


def _mean(models: Models, sums: PairSums) -> Fitted:
    moments = sums.moments(MATCHED)
    inputs = moments.source_block

    def mean(kind: Moments, layer: int) -> AffineMap:
        bias = kind.mean_y[:, _outputs(moments, layer)].flatten().float()
        return AffineMap(torch.zeros(inputs, len(bias)), bias)

    layers = [
        LayerMap((0,), mean(moments.keys, n), mean(moments.values, n))
        for n in range(moments.geometry.target_layers)
    ]
    return of_mapper(bare_mapper(models, "head_local", layers, skipped=4), 0.0)


def _shuffled(models: Models, sums: PairSums, *, parts: frozenset[Part]) -> Fitted:
    moments = sums.moments(parts)
    chosen = select(moments, _read(moments), RIDGE).reads
    recipe = RECIPES["head_local"]
    layers = [fit_layer(recipe, moments, n, s, RIDGE) for n, s in enumerate(chosen)]
    return of_mapper(bare_mapper(models, "head_local", layers, skipped=4), 0.0)


def _random(models: Models, sums: PairSums, *, seed: int) -> Fitted:
    moments = sums.moments(MATCHED)
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for layer in range(moments.geometry.target_layers):
        order = torch.randperm(moments.geometry.source_layers, generator=generator)
        sources = tuple(sorted(order[: _read(moments)].tolist()))
        keys, values = (
            _random_map(moments, kind, layer, sources, generator)
            for kind in (moments.keys, moments.values)
        )
        layers.append(LayerMap(sources, keys, values))
    return of_mapper(bare_mapper(models, "head_local", layers, skipped=4), 0.0)


def _random_map(
    moments: PairMoments,
    kind: Moments,
    layer: int,
    sources: tuple[int, ...],
    generator: torch.Generator,
) -> AffineMap:
    """Gaussian directions, scaled to the variance that each channel of the target has."""
    inputs = torch.cat([torch.arange(moments.source_block) + j * moments.source_block
                        for j in sources])  # fmt: skip
    outputs = _outputs(moments, layer)
    parts = list(_random_groups(kind, inputs, outputs, generator))
    weight, bias = (torch.cat(side, dim=-1).float() for side in zip(*parts, strict=True))
    return AffineMap(weight, bias)


def _random_groups(
    kind: Moments, inputs: Tensor, outputs: slice, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    for group, gram in enumerate(kind.gram):
        target = kind.squares_y[group, outputs]
        drawn = torch.randn(len(inputs), len(target), generator=generator, dtype=torch.float64)
        got = (drawn * (gram[inputs][:, inputs] @ drawn)).sum(0)
        weight = drawn * (target / got).sqrt()
        yield weight, kind.mean_y[group, outputs] - kind.mean_x[group, inputs] @ weight


def _outputs(moments: PairMoments, layer: int) -> slice:
    return slice(layer * moments.target_block, (layer + 1) * moments.target_block)


def _read(moments: PairMoments) -> int:
    return min(READ, moments.geometry.source_layers)
