"""What is compared: our recipes and the two published ones, each a way to make a mapper from sums.

- the paper's recipe (arXiv 2608.03893): every kv head of the k source layers, chosen by the R2 of
  one layer's matched heads without ridge; one lambda for all, 0.01, once added to X'X as printed
  and once to X'X / N, which its sweeps suggest; the first token fitted and mapped like the rest.
- CacheBridge (arXiv 2609.00891): matched heads alone, the same choice of layers, rows weighted by
  attention; the first token likewise.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mappers.geometry import Geometry, Structure
from mappers.mapper import LayerMap, Mapper
from mappers.models import LoadedModel
from mappers.moments import Moments, PairMoments
from mappers.prefixes import ExactPrefixes
from mappers.recipes import RECIPES, flops_per_token
from mappers.selection import Method, select
from recipe_bench.sums import PairSums

RIDGE = 1e-4
OLS = 1e-10
"""No ridge, but for what rounding needs."""
PAPER_LAMBDA = 0.01


@dataclass(frozen=True)
class Fitted:
    """A mapper with its costs; ``fit_seconds`` are CPU seconds from text to weights."""

    mapper: Mapper
    fit_seconds: float

    @property
    def flops_per_token(self) -> int:
        return flops_per_token(self.mapper)

    @property
    def nbytes(self) -> int:
        return self.mapper.nbytes


@dataclass(frozen=True)
class Models:
    source: LoadedModel
    target: LoadedModel

    def mapper(self, recipe: str, layers: Sequence[LayerMap], *, skipped: int) -> Mapper:
        """Without a table of prefixes: the benchmark puts first tokens in place itself."""
        sides = (self.source.identity, self.target.identity)
        return Mapper(*sides, recipe, tuple(layers), ExactPrefixes(), skipped)


Fit = Callable[[Models, PairSums], Fitted]


def candidates(geometry: Geometry) -> dict[str, Fit]:
    """By name, those of one structure side by side, since their sums are large."""
    source_layers = geometry.source_layers
    ks = [k for k in (4, 8) if k <= source_layers]
    sweep = sorted({k for k in (1, 2, 4, 8, 12, 16) if k <= source_layers} | {source_layers})
    found: dict[str, Fit] = {}
    for recipe in ("full_head", "head_local"):
        for k in sweep:
            found[f"{recipe} k={k}"] = _ridge(recipe, k)
        for k in ks:
            found[f"{recipe} k={k}, greedy"] = _ridge(recipe, k, method="greedy")
            found[f"{recipe} k={k}, greedy, uneven"] = _ridge(recipe, k, uneven=True)
    for m in (2, 4, 8, 12, 24):
        if m <= 2 * geometry.source_layers * geometry.source_heads:
            found[f"top_heads k={m}"] = _ridge("top_heads", m)
            found[f"top_heads k={m}, uneven"] = _ridge("top_heads", m, uneven=True)
    for k in ks:
        found[f"paper k={k}, X'X + 0.01"] = _paper(k, per_row=False)
        found[f"paper k={k}, X'X/N + 0.01"] = _paper(k, per_row=True)
    return found


def _ridge(recipe: str, k: int, *, method: Method = "top", uneven: bool = False) -> Fit:
    def fit(models: Models, sums: PairSums) -> Fitted:
        structure = RECIPES[recipe].structure
        moments = _moments(sums, structure, skip_positions=4)
        began = time.process_time()
        chosen = select(moments, k, RIDGE, method=method, uneven=uneven).reads
        layers = [RECIPES[recipe].fit(moments, n, s, RIDGE) for n, s in enumerate(chosen)]
        seconds = time.process_time() - began + sums.collecting_seconds(structure)
        return Fitted(models.mapper(recipe, layers, skipped=4), seconds)

    return fit


def _paper(k: int, *, per_row: bool) -> Fit:
    def fit(models: Models, sums: PairSums) -> Fitted:
        matched = _moments(sums, "per_head", skip_positions=0)
        began = time.process_time()
        chosen = select(matched, k, OLS).reads
        seconds = time.process_time() - began
        moments = _moments(sums, "all_heads", skip_positions=0)
        shrinkage = PAPER_LAMBDA * (moments.count if per_row else 1)
        began = time.process_time()
        layers = [_one_lambda(moments, n, s, shrinkage) for n, s in enumerate(chosen)]
        seconds += time.process_time() - began + sums.collecting_seconds("all_heads")
        return Fitted(models.mapper("full_head", layers, skipped=0), seconds)

    return fit


def _one_lambda(
    moments: PairMoments, layer: int, sources: Sequence[int], shrinkage: float
) -> LayerMap:
    """Ours is relative to the mean diagonal, so keys and values need another ridge each."""
    recipe = RECIPES["full_head"]
    keys, values = (
        recipe.fit(moments, layer, sources, shrinkage / _mean_diagonal(moments, kind, sources))
        for kind in (moments.keys, moments.values)
    )
    return LayerMap(sources=keys.sources, keys=keys.keys, values=values.values)


def _mean_diagonal(moments: PairMoments, kind: Moments, sources: Sequence[int]) -> float:
    diagonal = kind.gram[0].diagonal().view(-1, moments.source_block)
    return float(diagonal[list(sources)].mean())


_held: dict[tuple[object, ...], PairMoments] = {}


def _moments(sums: PairSums, structure: Structure, *, skip_positions: int) -> PairMoments:
    """The sums last asked for are held: candidates come in the order of their structure."""
    key = (sums.folder, structure, skip_positions)
    if key not in _held:
        _held.clear()
        _held[key] = sums.moments(structure, skip_positions=skip_positions)
    return _held[key]
