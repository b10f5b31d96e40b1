"""What a fitted mapper is: per target layer, which source layers it reads and the two affine maps.

Legend: L layers, T tokens, H kv heads, D head dim; ``_s`` source, ``_t`` target. Everything here is
in content space (keys without their rotary embedding, values as they are).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from mappers.errors import LayoutError
from mappers.geometry import Geometry
from mappers.identity import ModelIdentity
from mappers.prefixes import ExactPrefixes

LAGS_AT_MOST = 4

Heads = tuple[tuple[int, ...], ...]
"""Per target head, the source heads that it reads, ascending and as many for each; or one entry,
which all target heads share. A read is of a source head's keys (kind 0) or values (kind 1), of the
token itself (lag 0) or of the one that many tokens before it, and has the number
``((lag * 2 + kind) * L_s + layer) * H_s + head``. Where a request holds no token so far back, its
first token is read."""


class HeadReads(NamedTuple):
    """What the keys and the values of one target layer read, where single heads are chosen."""

    keys: Heads
    values: Heads


Reads = tuple[int, ...] | HeadReads
"""What one target layer reads: source layers, ascending, or single heads."""


@dataclass(frozen=True, slots=True, eq=False)
class AffineMap:
    """``y = x @ weight + bias``.

    weight: ``[inputs, H_t * D_t]``, float32 or bfloat16. What one row of ``x`` holds, and so
    ``inputs``, is the recipe's business (``Recipe.weight_shape``). bias: ``[H_t * D_t]``, float32.
    heads: which source heads ``x`` is made of, side by side, for recipes that choose them.
    """

    weight: Tensor
    bias: Tensor
    heads: Heads | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.bias.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class LayerMap:
    """One target layer: the source layers that it reads (ascending) and its two maps.

    key_norm: weights ``[D_t]``, float32, of the norm that mapped keys are put back on, if any.
    """

    sources: tuple[int, ...]
    keys: AffineMap
    values: AffineMap
    key_norm: Tensor | None = None

    @property
    def nbytes(self) -> int:
        norm = 0 if self.key_norm is None else self.key_norm.nbytes
        return self.keys.nbytes + self.values.nbytes + norm

    @property
    def heads(self) -> HeadReads | None:
        """The choice of heads, for recipes that choose them."""
        if self.keys.heads is None or self.values.heads is None:
            return None
        return HeadReads(self.keys.heads, self.values.heads)


@dataclass(frozen=True, slots=True, eq=False)
class Mapper:
    """The fitted weights of one pair, target layer by target layer.

    ``skipped_positions`` is how many first positions were left out of the fit: there the maps
    extrapolate, and ``prefixes`` should take their place. Raises LayoutError when the layers do not
    fit the two identities; the weights' shapes are ``mappers.recipes.check_shapes``'s to check.
    """

    source: ModelIdentity
    target: ModelIdentity
    recipe: str
    layers: tuple[LayerMap, ...]
    prefixes: ExactPrefixes
    skipped_positions: int

    def __post_init__(self) -> None:
        if len(self.layers) != self.target.num_layers:
            raise LayoutError(
                f"the target has {self.target.num_layers} layers, the mapper {len(self.layers)}"
            )
        for index, layer in enumerate(self.layers):
            check_layer(layer, self.geometry, f"target layer {index}")

    @property
    def geometry(self) -> Geometry:
        return Geometry.of(self.source, self.target)

    @property
    def lags(self) -> int:
        """How many tokens back a token's maps read at most."""
        return max(lags_of(layer.heads or layer.sources, self.geometry) for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and biases; the prefixes not counted."""
        return sum(layer.nbytes for layer in self.layers)

    def affine_maps(self) -> Iterator[tuple[str, AffineMap]]:
        """``("target.{layer}.{k|v}", map)`` in the order of the layers, keys first."""
        for index, layer in enumerate(self.layers):
            yield f"target.{index}.k", layer.keys
            yield f"target.{index}.v", layer.values


def check_sources(sources: tuple[int, ...], source_layers: int, what: str) -> None:
    """LayoutError unless ``sources`` is a non-empty ascending choice of the source's layers."""
    ascending = all(a < b for a, b in zip(sources, sources[1:], strict=False))
    if not sources or not ascending or sources[0] < 0 or sources[-1] >= source_layers:
        raise LayoutError(
            f"{what} must read some source layers of 0..{source_layers - 1}, each once and in "
            f"ascending order, not {list(sources)}"
        )


def check_layer(layer: LayerMap, geometry: Geometry, what: str) -> None:
    """LayoutError unless a layer's sources, and its heads if it chooses them, are there."""
    check_sources(layer.sources, geometry.source_layers, what)
    if (layer.keys.heads is None) != (layer.values.heads is None):
        raise LayoutError(f"{what} must choose heads for both keys and values or for neither")
    if layer.heads is None:
        return
    for heads in layer.heads:
        check_heads(heads, geometry, what)
    if layers_of(layer.heads, geometry) != layer.sources:
        raise LayoutError(f"{what} must name as sources just the layers whose heads it reads")


def check_heads(heads: Heads, geometry: Geometry, what: str) -> None:
    """LayoutError unless every target head reads as many source heads, each once, ascending."""
    count = (LAGS_AT_MOST + 1) * heads_of_a_token(geometry)
    ascending = all(a < b for read in heads for a, b in zip(read, read[1:], strict=False))
    there = all(read and 0 <= read[0] and read[-1] < count for read in heads)
    if len(heads) not in (1, geometry.target_heads) or len({len(read) for read in heads}) != 1:
        raise LayoutError(
            f"{what} must read as many source heads for each of {geometry.target_heads} target "
            f"heads, or the same for all, not {[len(read) for read in heads]}"
        )
    if not (ascending and there):
        raise LayoutError(
            f"{what} must read source heads of 0..{count - 1} (lag, kind, layer, head), each once, "
            "ascending"
        )


def heads_of_a_token(geometry: Geometry) -> int:
    """2 * L_s * H_s: how many keys and values of source heads can be read at each lag."""
    return 2 * geometry.source_layers * geometry.source_heads


def lags_of(reads: Reads, geometry: Geometry) -> int:
    """How many tokens back a target layer reads at most: 0 where it reads whole layers."""
    if not isinstance(reads, HeadReads):
        return 0
    return max(read[-1] for heads in reads for read in heads) // heads_of_a_token(geometry)


def layers_of(reads: HeadReads, geometry: Geometry) -> tuple[int, ...]:
    """The source layers that hold the heads, ascending."""
    layers = {
        number // geometry.source_heads % geometry.source_layers
        for heads in reads
        for read in heads
        for number in read
    }
    return tuple(sorted(layers))
