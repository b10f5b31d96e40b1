"""What a fitted mapper is: per target layer, which source layers it reads and the two affine maps.

Legend: L layers, T tokens, H kv heads, D head dim; ``_s`` source, ``_t`` target. Everything here is
in content space (keys without their rotary embedding, values as they are).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mappers.errors import LayoutError
from mappers.geometry import Geometry
from mappers.identity import ModelIdentity
from mappers.prefixes import ExactPrefixes


@dataclass(frozen=True, slots=True, eq=False)
class AffineMap:
    """``y = x @ weight + bias``.

    weight: ``[inputs, H_t * D_t]``, float32 or bfloat16. What one row of ``x`` holds, and so
    ``inputs``, is the recipe's business (``Recipe.weight_shape``). bias: ``[H_t * D_t]``, float32.
    """

    weight: Tensor
    bias: Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.bias.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class LayerMap:
    """One target layer: the source layers that it reads (ascending) and its two maps."""

    sources: tuple[int, ...]
    keys: AffineMap
    values: AffineMap

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


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
            check_sources(layer.sources, self.source.num_layers, f"target layer {index}")

    @property
    def geometry(self) -> Geometry:
        return Geometry.of(self.source, self.target)

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
