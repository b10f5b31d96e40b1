"""A part of a pair: some source layers onto some target layers, a smaller pair of its own.

What is fitted of it counts the pool's layers from 0; here it gets back the numbers of the pair.
"""

from dataclasses import replace
from typing import NamedTuple

from mappers.cache import KVCache
from mappers.geometry import Geometry
from mappers.mapper import Heads, LayerMap


class Part(NamedTuple):
    """The layers that it has of either side, ascending."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]

    def geometry(self, whole: Geometry) -> Geometry:
        """The shapes of this part of a pair of the shapes ``whole``."""
        counts = {"source_layers": len(self.sources), "target_layers": len(self.targets)}
        return replace(whole, **counts)

    def caches(self, source: KVCache, target: KVCache) -> tuple[KVCache, KVCache]:
        """Its layers of both models' caches, as views."""
        return _layers(source, self.sources), _layers(target, self.targets)

    def whole_numbers(self, layer: LayerMap, whole: Geometry) -> LayerMap:
        """A map that was fitted of this part as one of the pair: the same weights."""
        sources = tuple(self.sources[place] for place in layer.sources)
        if layer.heads is None:
            return replace(layer, sources=sources)
        keys, values = (self._heads(heads, whole) for heads in layer.heads)
        return replace(
            layer,
            sources=sources,
            keys=replace(layer.keys, heads=keys),
            values=replace(layer.values, heads=values),
        )

    def _heads(self, heads: Heads, whole: Geometry) -> Heads:
        """Layers stay in their order, so reads stay ascending and weights as they are."""
        return tuple(tuple(self._number(read, whole) for read in reads) for reads in heads)

    def _number(self, read: int, whole: Geometry) -> int:
        layer, head = divmod(read, whole.source_heads)
        kinds, place = divmod(layer, len(self.sources))
        return (kinds * whole.source_layers + self.sources[place]) * whole.source_heads + head


def _layers(cache: KVCache, layers: tuple[int, ...]) -> KVCache:
    keys, values = (tuple(side[i] for i in layers) for side in (cache.keys, cache.values))
    return KVCache(keys, values, cache.positions)
