"""Reduced-rank ridge: ``full_head`` maps cut to their best rank, applied as two thin products.

``W V V'`` with V the leading eigenvectors of ``W' (A + lambda I) W = W' C`` has the smallest error
of the ridge regression itself among the maps of that rank (Izenman 1975; Mukherjee and Zhu 2011).
It costs ``rank * (inputs + outputs)`` multiply-adds a token instead of ``inputs * outputs``.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from mappers.geometry import Geometry
from mappers.mapper import AffineMap, LayerMap, Mapper
from mappers.moments import Moments, PairMoments
from mappers.recipes import RECIPES, sums_of
from tests.bench.recipe_bench.candidates import Candidate, Group, fit_plan, needs_of, our_plan
from tests.bench.recipe_bench.fitted import Fitted, Models, of_mapper
from tests.bench.recipe_bench.sums import PairSums

RANKS = (16, 32, 64)
READ = 4


def low_ranks(geometry: Geometry) -> Iterator[Candidate]:
    """One for each rank below that of the map."""
    k = min(READ, geometry.source_layers)
    needs = needs_of(our_plan(recipe="full_head", k=k))
    for rank in RANKS:
        if rank < min(k * geometry.source_width, geometry.target_width):
            name = f"rejected: full_head k={k}, rank {rank}"
            yield Candidate(name, Group.REJECTED, partial(_fit, k=k, rank=rank), needs)


def _fit(models: Models, sums: PairSums, *, k: int, rank: int) -> Fitted:
    plan = our_plan(recipe="full_head", k=k)
    needs = needs_of(plan)
    moments = sums.moments(needs)
    began = time.process_time()
    mapper = cut_to_rank(fit_plan(models, sums.corpus, moments, plan), moments, rank)
    spent = time.process_time() - began
    thin = [rank * sum(affine.weight.shape) for _, affine in mapper.affine_maps()]
    biases = sum(affine.bias.nbytes for _, affine in mapper.affine_maps())
    fitted = of_mapper(mapper, spent + sums.collecting_seconds(needs))
    return replace(fitted, flops_per_token=2 * sum(thin), nbytes=4 * sum(thin) + biases)


def cut_to_rank(mapper: Mapper, moments: PairMoments, rank: int) -> Mapper:
    """Every map of a full_head mapper cut; ``moments`` are those that it was fitted from."""
    layers = []
    for number, layer in enumerate(mapper.layers):
        sums = sums_of(RECIPES["full_head"], moments, number, layer.sources)
        keys, values = (
            _cut(affine, part, rank)
            for affine, part in zip((layer.keys, layer.values), sums, strict=True)
        )
        layers.append(LayerMap(layer.sources, keys, values, layer.key_norm))
    return replace(mapper, layers=tuple(layers))


def _cut(affine: AffineMap, sums: Moments, rank: int) -> AffineMap:
    weight = affine.weight.double()
    explained = weight.T @ sums.cross[0]
    vectors = torch.linalg.eigh((explained + explained.T) / 2).eigenvectors[:, -rank:]
    low = weight @ vectors @ vectors.T
    bias = sums.mean_y[0] - sums.mean_x[0] @ low
    return AffineMap(low.float(), bias.float())
