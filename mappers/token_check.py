"""Whether a cache belongs to the token ids that are said to be its own.

A cache of another text is a perfectly good cache: nothing in it is wrong. But the values of the
first layer depend on nothing but the token itself (its embedding, normalised and projected; no
attention, no rotation), so a small table says what they must be. The table holds the tokens that
the calibration text had, each by a random projection of its first-layer values.

It does not see what the first layer does not show: keys, other layers, and whether the rows in
between belong to the same text.

Legend: T tokens, H kv heads, D head dim, N known tokens, P projected numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mappers.cache import KVCache, Readable
from mappers.errors import LayoutError

PROJECTED = 8
TOLERANCE = 0.1
"""Of the mean square distance of two tokens. Storage in float8 costs a 50th of it."""
KNOWN_AT_LEAST = 4
"""Rows without which nothing is said."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """ids: int64 ``[N]``, ascending; values: float32 ``[N, P]``, by ``directions [H * D, P]``."""

    ids: Tensor
    values: Tensor
    directions: Tensor

    def strangers(self, cache: Readable, rows: Tensor, ids: Tensor) -> float | None:
        """The share of ``rows`` (int64 ``[n]``) of a source cache that are not of token ``ids``.

        Rows whose token is not in the table do not count; None when fewer than 4 do.
        """
        place = torch.searchsorted(self.ids, ids).clamp_max(len(self.ids) - 1)
        known = self.ids[place] == ids
        if int(known.sum()) < KNOWN_AT_LEAST:
            return None
        _, first_layer = next(cache.layers())
        found = project(first_layer[rows[known].to(first_layer.device)], self.directions)
        apart = (found - self.values[place[known]]).square().sum(-1)
        return float((~(apart <= TOLERANCE * self._between())).float().mean())

    def _between(self) -> Tensor:
        """Mean square distance of two tokens."""
        return 2 * self.values.var(0).sum()

    def tensors(self) -> dict[str, Tensor]:
        """For safetensors."""
        return {f"tokens.{f.name}": getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], width: int) -> "TokenTable":
        """The inverse of ``tensors``, for a source of ``width`` H * D.

        Raises LayoutError for what is no such table.
        """
        if tensors.keys() != {f"tokens.{f.name}" for f in fields(cls)}:
            raise LayoutError("token table: other tensors than it has")
        table = cls(**{name.removeprefix("tokens."): t for name, t in tensors.items()})
        _check_ids(table.ids)
        for name, shape in (("values", len(table.ids)), ("directions", width)):
            tensor = getattr(table, name)
            if tensor.dtype != torch.float32 or tuple(tensor.shape) != (shape, PROJECTED):
                raise LayoutError(f"token table: {name} must be float32 {[shape, PROJECTED]}")
            if not bool(tensor.isfinite().all()):
                raise LayoutError(f"token table: {name} has values that are not finite")
        return table


class TokenTableBuilder:
    """Gathers what each token's first-layer values are; the first time counts."""

    def __init__(self, width: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.directions = torch.randn(width, PROJECTED, generator=generator)
        self.ids = torch.empty(0, dtype=torch.int64)
        self.values = torch.empty(0, PROJECTED)

    def add(self, ids: Tensor, cache: KVCache) -> None:
        """One text: token ids ``[T]`` and its source cache."""
        given = torch.cat((self.ids, ids.cpu()))
        values = torch.cat((self.values, project(cache.values[0], self.directions)))
        self.ids, inverse = torch.unique(given, return_inverse=True)
        first = torch.full((len(self.ids),), len(given))
        first.scatter_reduce_(0, inverse, torch.arange(len(given)), "amin")
        self.values = values[first]

    def table(self) -> TokenTable:
        """Of the tokens so far, at least two."""
        return TokenTable(self.ids, self.values, self.directions)


def project(values: Tensor, directions: Tensor) -> Tensor:
    """First-layer values ``[n, H, D]``, any float dtype -> float32 ``[n, P]``, on the CPU."""
    return values.float().cpu().flatten(1) @ directions


def _check_ids(ids: Tensor) -> None:
    if ids.dtype != torch.int64 or ids.ndim != 1 or len(ids) < 2:
        raise LayoutError("token table: ids must be int64, at least two")
    if int(ids[0]) < 0 or bool((ids.diff() < 1).any()):
        raise LayoutError("token table: ids must be ascending and not negative")
