"""Streaming sufficient statistics of a linear regression: one pass over the data, any fit after it.

What is kept is centred and in float64: the Gram matrix of the inputs, their cross products with
the outputs and the outputs' sums of squares. Windows are added by the pairwise update of Chan,
Golub and LeVeque (1983, "Algorithms for computing the sample variance"), so the result does not
depend on how the rows were cut, nor on how far from zero they lie. Every choice of source layers
and every ridge is a sub-block solve of these sums: the data are never read again.

Legend: G groups, n rows (tokens), F inputs, O outputs; L layers, H kv heads, D head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mappers.cache import KVCache
from mappers.checkpoint import read_checkpoint, write_checkpoint
from mappers.errors import ArtifactError, LayoutError, NonFinite
from mappers.geometry import STRUCTURES, Geometry, Structure, head_groups

FIELDS = ("weight", "mean_x", "mean_y", "gram", "cross", "squares_y")
SCHEMA = "kvt-moments-2"
COLUMNS = 512
"""So many of a Gram matrix are computed at a time."""
_TINY = torch.finfo(torch.float64).tiny


class Moments:
    """Centred second moments of ``x`` against ``y`` for G independent regressions.

    Attributes, float64 on the CPU: ``weight [G]`` (the sum of the rows' weights, 1 for each row
    unless said otherwise), ``mean_x [G, F]``, ``mean_y [G, O]``, ``gram [G, F, F]`` (weighted sum
    over rows of the outer products of ``x - mean_x``), ``cross [G, F, O]``, ``squares_y [G, O]``;
    and ``count``, the rows. Sums are not divided by the weight.
    """

    _gram: Tensor
    _symmetric: bool

    def __init__(self, groups: int, inputs: int, outputs: int) -> None:
        self.count = 0
        self.weight = _zeros(groups)
        self.mean_x = _zeros(groups, inputs)
        self.mean_y = _zeros(groups, outputs)
        self.gram = _zeros(groups, inputs, inputs)
        self.cross = _zeros(groups, inputs, outputs)
        self.squares_y = _zeros(groups, outputs)

    @property
    def gram(self) -> Tensor:
        """Only the blocks from the diagonal to the right are summed, which halves the arithmetic;
        they are copied to the left when somebody looks."""
        if not self._symmetric:
            for gram in self._gram:
                _mirror(gram)
            self._symmetric = True
        return self._gram

    @gram.setter
    def gram(self, gram: Tensor) -> None:
        self._gram, self._symmetric = gram, True

    def add(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        """Add rows ``x [G, n, F]`` and ``y [G, n, O]``, any float dtype.

        ``weights [G, n]``, 0 or more, say how often each row counts; once if None.
        Raises LayoutError for other shapes and NonFinite for a NaN or an infinity; both leave the
        statistics as they were.
        """
        self._check_rows(x, y)
        rows = x.shape[1]
        if rows == 0:
            return
        x, y = x.to(torch.float64), y.to(torch.float64)
        added = torch.full_like(self.weight, rows) if weights is None else weights.double().sum(1)
        mean_x, mean_y = _mean(x, weights), _mean(y, weights)
        # A mean is finite if and only if all its rows are, since 32-bit sums cannot overflow here.
        if not bool(mean_x.isfinite().all()) or not bool(mean_y.isfinite().all()):
            raise NonFinite(f"a window of {rows} rows holds a NaN or an infinity")
        moved_x, moved_y = self._move_means(added, mean_x, mean_y)
        self.count += rows
        centred_x, centred_y = x - mean_x[:, None], y - mean_y[:, None]
        if weights is not None:
            root = weights.to(torch.float64).sqrt().unsqueeze(2)
            centred_x, centred_y = root * centred_x, root * centred_y
        # The shift of the means is one more row of the same products, so each sum is touched once.
        self._accumulate(
            torch.cat([centred_x, moved_x[:, None]], dim=1),
            torch.cat([centred_y, moved_y[:, None]], dim=1),
        )

    def merge(self, other: "Moments") -> None:
        """Add the rows that another pass has seen; the order of merging does not matter."""
        self._check_same_shape(other)
        if other.count == 0:
            return
        moved_x, moved_y = self._move_means(other.weight, other.mean_x, other.mean_y)
        self.count += other.count
        self.gram += other.gram
        self.cross += other.cross
        self.squares_y += other.squares_y
        self._accumulate(moved_x[:, None], moved_y[:, None])

    def of_outputs(self, chosen: slice) -> "Moments":
        """The moments of some of the outputs, as views: to be read, not added to."""
        part = Moments(0, 0, 0)
        part.count, part.weight = self.count, self.weight
        part.mean_x, part.gram = self.mean_x, self.gram
        part.mean_y, part.squares_y = self.mean_y[:, chosen], self.squares_y[:, chosen]
        part.cross = self.cross[:, :, chosen]
        return part

    def blocks(self, groups: Sequence[int], inputs: Tensor, outputs: Tensor) -> "Moments":
        """Copies of sub-blocks: regression i of the result is group ``groups[i]``'s with the
        inputs ``inputs[i]`` (int64 ``[len(groups), F]``) and outputs ``outputs[i]``."""
        part = Moments(0, 0, 0)
        part.count = self.count
        of = torch.tensor(groups)
        part.weight = self.weight[of]
        part.mean_x = self.mean_x[of].gather(1, inputs)
        part.mean_y = self.mean_y[of].gather(1, outputs)
        part.squares_y = self.squares_y[of].gather(1, outputs)
        wanted = list(zip(groups, inputs, outputs, strict=True))
        # Rows and columns at once: whole rows of a large matrix are not copied for a few columns.
        part.gram = torch.stack([self.gram[g][i[:, None], i] for g, i, _ in wanted])
        part.cross = torch.stack([self.cross[g][i[:, None], o] for g, i, o in wanted])
        return part

    def scaled(self, factor: Tensor) -> "Moments":
        """As if every row of group g had counted ``factor[g]`` times as often."""
        part = Moments(0, 0, 0)
        part.count, part.mean_x, part.mean_y = self.count, self.mean_x.clone(), self.mean_y.clone()
        part.weight, part.squares_y = self.weight * factor, self.squares_y * factor[:, None]
        part.gram, part.cross = (s * factor[:, None, None] for s in (self.gram, self.cross))
        return part

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

    def _move_means(self, added: Tensor, mean_x: Tensor, mean_y: Tensor) -> tuple[Tensor, Tensor]:
        """Move means and weight on; return the shifts, scaled as rows of the second moments."""
        total = self.weight + added
        share = (added / total.clamp_min(_TINY)).unsqueeze(1)
        scale = (self.weight.unsqueeze(1) * share).sqrt()
        shift_x, shift_y = mean_x - self.mean_x, mean_y - self.mean_y
        self.mean_x += shift_x * share
        self.mean_y += shift_y * share
        self.weight = total
        return shift_x * scale, shift_y * scale

    def _accumulate(self, x: Tensor, y: Tensor) -> None:
        # Group by group, because one large product uses all cores and a batched one may not.
        for group in range(x.shape[0]):
            _add_upper(self._gram[group], x[group])
            self.cross[group].addmm_(x[group].T, y[group])
        self.squares_y += y.square().sum(dim=1)
        self._symmetric = False

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


def _zeros(*shape: int) -> Tensor:
    """Zeros that take memory only when they are added to: sums that are only there to be replaced,
    by those of a checkpoint, would otherwise take all that a fit may have once more."""
    return torch.from_numpy(np.zeros(shape))


def _add_upper(gram: Tensor, rows: Tensor) -> None:
    """Add ``rows.T @ rows`` of ``rows [n, F]`` to ``gram [F, F]``, but not left of the diagonal."""
    for start in range(0, len(gram), COLUMNS):
        own, on = slice(start, start + COLUMNS), slice(start, None)
        gram[own, on].addmm_(rows[:, own].T, rows[:, on])


def _mirror(gram: Tensor) -> None:
    for start in range(0, len(gram), COLUMNS):
        own, after = slice(start, start + COLUMNS), slice(start + COLUMNS, None)
        gram[after, own] = gram[own, after].T


def _mean(rows: Tensor, weights: Tensor | None) -> Tensor:
    """The mean row of ``[G, n, F]`` under weights ``[G, n]``; of no weight at all, zeros."""
    if weights is None:
        return rows.mean(dim=1)
    shares = weights.double() / weights.double().sum(1, keepdim=True).clamp_min(_TINY)
    return (shares.unsqueeze(1) @ rows).squeeze(1)


class PairMoments:
    """The moments of a pair: all source layers against all target layers, keys and values apart.

    In group g of G the inputs are, source layer by source layer, the heads of the group side by
    side: ``F = L_s * H_s/G * D_s``; the outputs likewise ``O = L_t * H_t/G * D_t``. So a choice of
    source layers is a choice of blocks of ``source_block`` rows and columns. ``windows`` counts the
    windows added, which tells a resumed pass where to go on.

    With the structure ``joint`` the inputs are all layers' keys, then all layers' values; ``keys``
    and ``values`` are views of one set of moments, which differ in the outputs. With ``lags`` (of
    that structure only; otherwise LayoutError) the same of the token before follow, and so on:
    ``F = (lags + 1) * 2 * L_s * H_s * D_s``.
    """

    def __init__(self, geometry: Geometry, structure: Structure, lags: int = 0) -> None:
        if lags < 0 or (lags and structure != "joint"):
            raise LayoutError(f"{structure} moments cannot have {lags} lags")
        self.geometry, self.structure, self.lags = geometry, structure, lags
        self.groups = head_groups(geometry, structure)
        self.source_block = geometry.source_width // self.groups
        self.target_block = geometry.target_width // self.groups
        inputs = geometry.source_layers * self.source_block
        self._outputs_of_a_kind = outputs = geometry.target_layers * self.target_block
        self._parts = {
            name: Moments(self.groups, kinds * (lags + 1) * inputs, kinds * outputs)
            for name, kinds in (
                {"both": 2} if structure == "joint" else dict(keys=1, values=1)
            ).items()
        }
        self.windows = 0

    @property
    def keys(self) -> Moments:
        """What predicts the target's keys."""
        if self.structure == "joint":
            return self._parts["both"].of_outputs(slice(self._outputs_of_a_kind))
        return self._parts["keys"]

    @property
    def values(self) -> Moments:
        """What predicts the target's values."""
        if self.structure == "joint":
            return self._parts["both"].of_outputs(slice(self._outputs_of_a_kind, None))
        return self._parts["values"]

    @property
    def count(self) -> int:
        """Rows (tokens) added so far."""
        return next(iter(self._parts.values())).count

    def add_window(self, source: KVCache, target: KVCache, before: Sequence[KVCache] = ()) -> None:
        """Add the same tokens of both models, keys in content space.

        ``before``: for each lag from 1 up, what the source has that many tokens before them.
        Raises LayoutError when a cache does not fit the geometry or the positions differ, and
        NonFinite for a NaN or an infinity; both leave the statistics as they were.
        """
        self._check_window(source, target, before)
        for name, part in self._parts.items():
            inputs = [layer for cache in (source, *before) for layer in _layers(cache, name)]
            part.add(
                _grouped(inputs, self.groups, self.source_block),
                _grouped(_layers(target, name), self.groups, self.target_block),
            )
        self.windows += 1

    def merge(self, other: "PairMoments") -> None:
        """Add the windows that another pass over other data has seen."""
        if self._kind() != other._kind():
            raise LayoutError(
                "moments of different geometries, structures or lags do not belong together"
            )
        for name, part in self._parts.items():
            part.merge(other._parts[name])
        self.windows += other.windows

    def save(self, path: Path) -> None:
        """Write a safetensors checkpoint, whole or not at all; loading it is bit exact."""
        tensors = {
            f"{part}.{name}": tensor
            for part, moments in self._parts.items()
            for name, tensor in moments.tensors().items()
        }
        facts = {name: str(value) for name, value in asdict(self.geometry).items()}
        facts |= {"schema": SCHEMA, "structure": self.structure, "lags": str(self.lags)}
        facts["windows"] = str(self.windows)
        write_checkpoint(path, tensors, facts)

    @classmethod
    def load(cls, path: Path) -> "PairMoments":
        """Read what ``save`` wrote. Raises ArtifactError for anything else."""
        tensors, facts = read_checkpoint(path, SCHEMA)
        pair = cls(*_declared(facts))
        for part, expected in pair._parts.items():
            stem = f"{part}."
            own = {n.removeprefix(stem): t for n, t in tensors.items() if n.startswith(stem)}
            moments = Moments.from_tensors(own)
            if moments.cross.shape != expected.cross.shape:
                raise ArtifactError("a moments checkpoint does not fit the geometry that it names")
            pair._parts[part] = moments
        pair.windows = int(facts["windows"])
        return pair

    def _kind(self) -> tuple[Geometry, Structure, int]:
        return self.geometry, self.structure, self.lags

    def _check_window(self, source: KVCache, target: KVCache, before: Sequence[KVCache]) -> None:
        g = self.geometry
        expected = (g.source_layers, g.source_heads, g.source_dim)
        if len(before) != self.lags or any(cache.tokens != source.tokens for cache in before):
            raise LayoutError(f"expected {self.lags} caches of the tokens before {source.tokens}")
        for cache in (source, *before):
            _check_cache("source", cache, expected)
        _check_cache("target", target, (g.target_layers, g.target_heads, g.target_dim))
        if not torch.equal(source.positions, target.positions):
            raise LayoutError("source and target must hold the same tokens at the same positions")


def _layers(cache: KVCache, part: str) -> tuple[Tensor, ...]:
    kinds = {"keys": cache.keys, "values": cache.values, "both": (*cache.keys, *cache.values)}
    return kinds[part]


def _check_cache(side: str, cache: KVCache, expected: tuple[int, int, int]) -> None:
    given = (cache.num_layers, cache.num_kv_heads, cache.head_dim)
    if given != expected:
        raise LayoutError(f"{side} has (layers, kv heads, head dim) {given}, expected {expected}")
    for layer in range(cache.num_layers):
        if not _finite(cache.keys[layer]) or not _finite(cache.values[layer]):
            raise NonFinite(f"{side} layer {layer} holds a NaN or an infinity")


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _grouped(layers: Sequence[Tensor], groups: int, block: int) -> Tensor:
    """``[T, H, D]`` per layer to float64 ``[G, T, L * block]``, group g from its own heads."""
    tokens = layers[0].shape[0]
    rows = torch.empty(groups, tokens, len(layers), block, dtype=torch.float64)
    for index, layer in enumerate(layers):
        rows[:, :, index] = layer.reshape(tokens, groups, block).transpose(0, 1)
    return rows.flatten(2)


def _declared(facts: Mapping[str, str]) -> tuple[Geometry, Structure, int]:
    numbers = {name: facts.get(name, "") for name in Geometry.__dataclass_fields__}
    structures = [known for known in STRUCTURES if known == facts.get("structure")]
    lags = facts.get("lags", "0")  # which older ones do not name
    others = (lags, facts.get("windows", ""))
    legible = all(number.isdecimal() for number in (*numbers.values(), *others))
    if not legible or not structures:
        raise ArtifactError("a moments checkpoint without a legible geometry")
    geometry = Geometry(**{name: int(number) for name, number in numbers.items()})
    return geometry, structures[0], int(lags)
