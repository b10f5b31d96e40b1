"""The shapes of a pair, and which of its heads are regressed together."""

from dataclasses import dataclass
from typing import Literal

from mappers.errors import LayoutError
from mappers.identity import ModelIdentity

Structure = Literal["all_heads", "per_head", "joint"]
STRUCTURES: tuple[Structure, ...] = ("all_heads", "per_head", "joint")


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shapes of a pair: layers, kv heads and head dim of either side."""

    source_layers: int
    source_heads: int
    source_dim: int
    target_layers: int
    target_heads: int
    target_dim: int

    @classmethod
    def of(cls, source: ModelIdentity, target: ModelIdentity) -> "Geometry":
        return cls(
            source_layers=source.num_layers,
            source_heads=source.num_kv_heads,
            source_dim=source.head_dim,
            target_layers=target.num_layers,
            target_heads=target.num_kv_heads,
            target_dim=target.head_dim,
        )

    @property
    def source_width(self) -> int:
        """H_s * D_s, the numbers that one token has in one source layer."""
        return self.source_heads * self.source_dim

    @property
    def target_width(self) -> int:
        """H_t * D_t."""
        return self.target_heads * self.target_dim


def head_groups(geometry: Geometry, structure: Structure) -> int:
    """In how many independent groups the heads of a pair are regressed.

    ``all_heads``: one, every source head predicts every target head. ``joint``: one, with the keys
    and the values of every source head predicting both. ``per_head``: min(H_s, H_t);
    group g pairs the source heads ``g * H_s/G ..`` with the target heads ``g * H_t/G ..``, so where
    H_t > H_s one source head is repeated for several target heads, and where H_t < H_s several
    source heads are pooled by letting one target head read all of them side by side (their mean,
    the other way to pool, is one of the maps that this can express). Raises LayoutError unless one
    head count divides the other.
    """
    if structure != "per_head":
        return 1
    few, many = sorted((geometry.source_heads, geometry.target_heads))
    if many % few:
        raise LayoutError(
            f"{geometry.source_heads} source and {geometry.target_heads} target kv heads cannot be "
            "matched: one count must divide the other"
        )
    return few
