"""Streaming sufficient statistics of a linear regression: one pass over the data, any fit after it.

What is kept is centred and in float64: the Gram matrix of the inputs, their cross products with
the outputs and the outputs' sums of squares. Windows are added by the pairwise update of Chan,
Golub and LeVeque (1983, "Algorithms for computing the sample variance"), so the result does not
depend on how the rows were cut, nor on how far from zero they lie. Every choice of source layers
and every ridge is a sub-block solve of these sums: the data are never read again.

Legend: G groups, n rows (tokens), F inputs, O outputs; L layers, H kv heads, D head dim.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from mappers.cache import KVCache
from mappers.checkpoint import read_checkpoint, write_checkpoint
from mappers.errors import ArtifactError, LayoutError, NonFinite
from mappers.geometry import STRUCTURES, Geometry, Structure, head_groups

FIELDS = ("mean_x", "mean_y", "gram", "cross", "squares_y")
SCHEMA = "kvt-moments-1"


class Moments:
    """Centred second moments of ``x`` against ``y`` for G independent regressions.

    Attributes, float64 on the CPU: ``mean_x [G, F]``, ``mean_y [G, O]``, ``gram [G, F, F]`` (sum
    over rows of the outer products of ``x - mean_x``), ``cross [G, F, O]``, ``squares_y [G, O]``;
    and ``count``, the rows. Sums are not divided by the count.
    """

    def __init__(self, groups: int, inputs: int, outputs: int) -> None:
        self.count = 0
        self.mean_x = torch.zeros(groups, inputs, dtype=torch.float64)
        self.mean_y = torch.zeros(groups, outputs, dtype=torch.float64)
        self.gram = torch.zeros(groups, inputs, inputs, dtype=torch.float64)
        self.cross = torch.zeros(groups, inputs, outputs, dtype=torch.float64)
        self.squares_y = torch.zeros(groups, outputs, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows ``x [G, n, F]`` and ``y [G, n, O]``, any float dtype.

        Raises LayoutError for other shapes and NonFinite for a NaN or an infinity; both leave the
        statistics as they were.
        """
        self._check_rows(x, y)
        rows = x.shape[1]
        if rows == 0:
            return
        x, y = x.to(torch.float64), y.to(torch.float64)
        mean_x, mean_y = x.mean(dim=1), y.mean(dim=1)
        # A mean is finite if and only if all its rows are, since 32-bit sums cannot overflow here.
        if not bool(mean_x.isfinite().all()) or not bool(mean_y.isfinite().all()):
            raise NonFinite(f"a window of {rows} rows holds a NaN or an infinity")
        moved_x, moved_y = self._move_means(rows, mean_x, mean_y)
        # The shift of the means is one more row of the same products, so each sum is touched once.
        centred_x = torch.cat([x - mean_x[:, None], moved_x[:, None]], dim=1)
        centred_y = torch.cat([y - mean_y[:, None], moved_y[:, None]], dim=1)
        self._accumulate(centred_x, centred_y)

    def merge(self, other: "Moments") -> None:
        """Add the rows that another pass has seen; the order of merging does not matter."""
        self._check_same_shape(other)
        if other.count == 0:
            return
        moved_x, moved_y = self._move_means(other.count, other.mean_x, other.mean_y)
        self.gram += other.gram
        self.cross += other.cross
        self.squares_y += other.squares_y
        self._accumulate(moved_x[:, None], moved_y[:, None])

    def tensors(self) -> dict[str, Tensor]:
        """All state, by name; ``count`` as an int64 scalar."""
        state = {name: getattr(self, name) for name in FIELDS}
        return {**state, "count": torch.tensor(self.count)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Moments":
        """The inverse of ``tensors``. Raises ArtifactError when one is missing or does not fit."""
        if set(tensors) != {*FIELDS, "count"} or tensors["cross"].ndim != 3:
            raise ArtifactError("a moments checkpoint with tensors other than this version's")
        moments = cls(*tensors["cross"].shape)
        for name in FIELDS:
            expected: Tensor = getattr(moments, name)
            given = tensors[name]
            if given.shape != expected.shape or given.dtype != torch.float64:
                raise ArtifactError(f"{name} of a moments checkpoint has a wrong shape or dtype")
            setattr(moments, name, given)
        moments.count = int(tensors["count"])
        return moments

    def save(self, path: Path) -> None:
        """Write a safetensors checkpoint, whole or not at all; loading it is bit exact."""
        write_checkpoint(path, self.tensors(), {"schema": SCHEMA})

    @classmethod
    def load(cls, path: Path) -> "Moments":
        """Read what ``save`` wrote. Raises ArtifactError for anything else."""
        tensors, _ = read_checkpoint(path, SCHEMA)
        return cls.from_tensors(tensors)

    def _move_means(self, rows: int, mean_x: Tensor, mean_y: Tensor) -> tuple[Tensor, Tensor]:
        """Move means and count on; return the shifts, scaled as rows of the second moments."""
        total = self.count + rows
        scale = (self.count * rows / total) ** 0.5
        shift_x, shift_y = mean_x - self.mean_x, mean_y - self.mean_y
        self.mean_x += shift_x * (rows / total)
        self.mean_y += shift_y * (rows / total)
        self.count = total
        return shift_x * scale, shift_y * scale

    def _accumulate(self, x: Tensor, y: Tensor) -> None:
        # Group by group, because one large product uses all cores and a batched one may not.
        for group in range(x.shape[0]):
            self.gram[group].addmm_(x[group].T, x[group])
            self.cross[group].addmm_(x[group].T, y[group])
        self.squares_y += y.square().sum(dim=1)

    def _check_rows(self, x: Tensor, y: Tensor) -> None:
        groups, inputs, outputs = self.cross.shape
        shapes = (groups, x.shape[1] if x.ndim == 3 else -1)
        if tuple(x.shape) != (*shapes, inputs) or tuple(y.shape) != (*shapes, outputs):
            raise LayoutError(
                f"expected x [{groups}, n, {inputs}] and y [{groups}, n, {outputs}], "
                f"not {list(x.shape)} and {list(y.shape)}"
            )

    def _check_same_shape(self, other: "Moments") -> None:
        if self.cross.shape != other.cross.shape:
            raise LayoutError(
                f"moments of shape {list(self.cross.shape)} and {list(other.cross.shape)} "
                "do not belong together"
            )


class PairMoments:
    """The moments of a pair: all source layers against all target layers, keys and values apart.

    In group g of G the inputs are, source layer by source layer, the heads of the group side by
    side: ``F = L_s * H_s/G * D_s``; the outputs likewise ``O = L_t * H_t/G * D_t``. So a choice of
    source layers is a choice of blocks of ``source_block`` rows and columns. ``windows`` counts the
    windows added, which tells a resumed pass where to go on.
    """

    def __init__(self, geometry: Geometry, structure: Structure) -> None:
        self.geometry, self.structure = geometry, structure
        self.groups = head_groups(geometry, structure)
        self.source_block = geometry.source_width // self.groups
        self.target_block = geometry.target_width // self.groups
        inputs = geometry.source_layers * self.source_block
        outputs = geometry.target_layers * self.target_block
        self.keys = Moments(self.groups, inputs, outputs)
        self.values = Moments(self.groups, inputs, outputs)
        self.windows = 0

    @property
    def count(self) -> int:
        """Rows (tokens) added so far."""
        return self.keys.count

    def add_window(self, source: KVCache, target: KVCache) -> None:
        """Add the same tokens of both models, keys in content space.

        Raises LayoutError when a cache does not fit the geometry or the positions differ, and
        NonFinite for a NaN or an infinity; both leave the statistics as they were.
        """
        self._check_window(source, target)
        self.keys.add(self._inputs(source.keys), self._outputs(target.keys))
        self.values.add(self._inputs(source.values), self._outputs(target.values))
        self.windows += 1

    def merge(self, other: "PairMoments") -> None:
        """Add the windows that another pass over other data has seen."""
        if (self.geometry, self.structure) != (other.geometry, other.structure):
            raise LayoutError(
                "moments of different geometries or structures do not belong together"
            )
        self.keys.merge(other.keys)
        self.values.merge(other.values)
        self.windows += other.windows

    def save(self, path: Path) -> None:
        """Write a safetensors checkpoint, whole or not at all; loading it is bit exact."""
        tensors = {
            f"{kind}.{name}": tensor
            for kind, moments in (("keys", self.keys), ("values", self.values))
            for name, tensor in moments.tensors().items()
        }
        facts = {name: str(value) for name, value in asdict(self.geometry).items()}
        facts |= {"schema": SCHEMA, "structure": self.structure, "windows": str(self.windows)}
        write_checkpoint(path, tensors, facts)

    @classmethod
    def load(cls, path: Path) -> "PairMoments":
        """Read what ``save`` wrote. Raises ArtifactError for anything else."""
        tensors, facts = read_checkpoint(path, SCHEMA)
        pair = cls(*_declared(facts))
        for kind in ("keys", "values"):
            stem = f"{kind}."
            own = {n.removeprefix(stem): t for n, t in tensors.items() if n.startswith(stem)}
            moments = Moments.from_tensors(own)
            if moments.cross.shape != pair.keys.cross.shape:
                raise ArtifactError("a moments checkpoint does not fit the geometry that it names")
            setattr(pair, kind, moments)
        pair.windows = int(facts["windows"])
        return pair

    def _inputs(self, layers: tuple[Tensor, ...]) -> Tensor:
        return _grouped(layers, self.groups, self.source_block)

    def _outputs(self, layers: tuple[Tensor, ...]) -> Tensor:
        return _grouped(layers, self.groups, self.target_block)

    def _check_window(self, source: KVCache, target: KVCache) -> None:
        g = self.geometry
        expected = (g.source_layers, g.source_heads, g.source_dim)
        _check_cache("source", source, expected)
        _check_cache("target", target, (g.target_layers, g.target_heads, g.target_dim))
        if not torch.equal(source.positions, target.positions):
            raise LayoutError("source and target must hold the same tokens at the same positions")


def _check_cache(side: str, cache: KVCache, expected: tuple[int, int, int]) -> None:
    given = (cache.num_layers, cache.num_kv_heads, cache.head_dim)
    if given != expected:
        raise LayoutError(f"{side} has (layers, kv heads, head dim) {given}, expected {expected}")
    for layer in range(cache.num_layers):
        if not _finite(cache.keys[layer]) or not _finite(cache.values[layer]):
            raise NonFinite(f"{side} layer {layer} holds a NaN or an infinity")


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _grouped(layers: tuple[Tensor, ...], groups: int, block: int) -> Tensor:
    """``[T, H, D]`` per layer to float64 ``[G, T, L * block]``, group g from its own heads."""
    tokens = layers[0].shape[0]
    rows = torch.empty(groups, tokens, len(layers), block, dtype=torch.float64)
    for index, layer in enumerate(layers):
        rows[:, :, index] = layer.reshape(tokens, groups, block).transpose(0, 1)
    return rows.flatten(2)


def _declared(facts: Mapping[str, str]) -> tuple[Geometry, Structure]:
    numbers = {name: facts.get(name, "") for name in Geometry.__dataclass_fields__}
    structures = [known for known in STRUCTURES if known == facts.get("structure")]
    legible = all(number.isdecimal() for number in (*numbers.values(), facts.get("windows", "")))
    if not legible or not structures:
        raise ArtifactError("a moments checkpoint without a legible geometry")
    return Geometry(**{name: int(number) for name, number in numbers.items()}), structures[0]
