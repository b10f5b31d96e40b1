"""The profile of a source, kept in the artifact: what its caches look like on calibration text.

It answers two questions from a source cache alone. Is this a cache of the model at all, or were
bytes misread, tensors exchanged, keys turned? That is ``deviation``, the largest of all features
(``mappers/features.py``), each in the unit of its own spread. And is the text like the calibration
text? That is ``score`` (``mappers/score.py``). The limit of the first is split conformal (Vovk et
al. 2005): an order statistic of what texts gave that had no part in the moments.

What no cache can show by itself: that it is another text's (``mappers/token_check.py`` sees that),
an error that moves all of it by less than texts differ, and a bit that made a number smaller.

Legend: L layers, H kv heads, D head dim, m sampled rows, F features, N calibration texts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from mappers.cache import KVCache, Readable
from mappers.conformal import conformal
from mappers.errors import LayoutError
from mappers.features import COMPONENTS, FEATURES, RowMoments, measure
from mappers.identity import ModelIdentity
from mappers.mapper import Mapper
from mappers.sample import SAMPLED_ROWS, content_of, largest, sample_rows
from mappers.score import score_of
from mappers.token_check import PROJECTED, TokenTable

MARGIN = 1.5
"""How many times the conformal limit a deviation must be. It costs nothing: what is broken lies
farther out by an order of magnitude, texts of another kind do not."""

TEXTS_AT_MOST, TOKENS_AT_MOST = 1 << 16, 1 << 20
_TOKEN_BYTES = 8 + 4 * PROJECTED


class Finding(NamedTuple):
    """``deviation`` in standard deviations, of feature ``at``; ``score``: how unfamiliar."""

    deviation: float
    at: str
    score: float


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationProfile:
    """Float32: moments of rows; center and spread ``[F]`` of the features; and the deviations
    ``[N]``, ascending, of the texts that these are from."""

    moments: RowMoments
    center: Tensor
    spread: Tensor
    deviations: Tensor
    tokens: TokenTable

    def examine(
        self, cache: Readable, source: ModelIdentity, *, skip_positions: int, peaks: Tensor
    ) -> Finding | None:
        """Measure a source cache, keys as cached; ``peaks`` are its ``largest``, all finite.

        None when no row of it counts, since all are among the first positions.
        """
        rows = usual_rows(cache, skip_positions)
        if len(rows) == 0:
            return None
        length = int(cache.positions[-1]) + 1
        return self.examine_rows(cache.take(rows), source, length=length, peaks=peaks)

    def examine_rows(
        self, taken: KVCache, source: ModelIdentity, *, length: int, peaks: Tensor
    ) -> Finding:
        """The same from the rows that count, at least one, of a prompt of ``length`` tokens."""
        found = features(self.moments, taken, source, length=length, peaks=peaks)
        return self.judge(found, taken.tokens)

    def judge(self, found: Mapping[str, Tensor], rows: int) -> Finding:
        """How far features of so many sampled rows are from those of the calibration texts."""
        z = (flat(found) - self.center) / self.spread
        # Fewer rows than calibration had vary by more. What is not a number is infinitely far.
        far = z.nan_to_num(math.inf).abs() * min(1.0, rows / SAMPLED_ROWS) ** 0.5
        worst = int(far.argmax())
        return Finding(float(far[worst]), name_of(found, worst), score_of(found, z))

    def limit(self, alpha: float) -> float:
        """The deviation beyond which a cache is implausible: at most ``alpha`` of calibration-like
        texts lie beyond even without the margin, or 1 / (N + 1) where that is more."""
        return MARGIN * conformal(self.deviations.tolist(), alpha)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """For safetensors."""
        own = ("center", "spread", "deviations")
        return {
            **{f"rows.{f.name}": getattr(self.moments, f.name) for f in fields(RowMoments)},
            **{name: getattr(self, name) for name in own},
            **self.tokens.tensors(),
        }

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], source: ModelIdentity
    ) -> "CalibrationProfile":
        """The inverse of ``tensors``. Raises LayoutError for whatever is not a source's profile."""
        table = {name: t for name, t in tensors.items() if name.startswith("tokens.")}
        own = {name: t for name, t in tensors.items() if name not in table}
        shapes = shapes_of(source)
        if own.keys() != shapes.keys() | {"deviations"}:
            raise LayoutError("a profile with other tensors than a profile has")
        texts = own["deviations"].numel()
        if not 1 <= texts <= TEXTS_AT_MOST:
            raise LayoutError(f"a profile of {texts} texts")
        for name, shape in (shapes | {"deviations": (texts,)}).items():
            _check(name, own[name], shape)
        rows = {n.removeprefix("rows."): own.pop(n) for n in shapes if n.startswith("rows.")}
        width = source.num_kv_heads * source.head_dim
        return cls(RowMoments(**rows), **own, tokens=TokenTable.from_tensors(table, width))


_POSITIVE = {"rows.within", "rows.scale", "rows.rest", "rows.peak", "spread"}


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
        raise LayoutError(f"profile: {name} must be float32 {list(shape)}")
    sound = torch.isfinite(tensor).all() and not (name in _POSITIVE and bool((tensor <= 0).any()))
    if not sound or (name == "rows.between" and bool((tensor < 0).any())):
        raise LayoutError(f"profile: {name} has values that it cannot have")
    if name == "deviations" and bool((tensor.diff() < 0).any()):
        raise LayoutError("profile: deviations are not in ascending order")


def shapes_of(source: ModelIdentity) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what follows from the source's geometry."""
    layers, heads, dim = source.num_layers, source.num_kv_heads, source.head_dim
    places, leading = (2, layers, heads), min(COMPONENTS, dim - 1)
    count = 3 * math.prod(places) + layers * heads + 4 * layers
    return {
        **{f"rows.{name}": (*places, dim) for name in ("mean", "within", "between", "peak")},
        "rows.basis": (*places, dim, leading),
        "rows.scale": (*places, leading),
        "rows.rest": places,
        "rows.coupling": (layers, heads, leading, leading),
        "center": (count,),
        "spread": (count,),
    }


def bytes_at_most(source: ModelIdentity) -> int:
    """No profile of this source has more bytes of tensors."""
    numbers = sum(math.prod(shape) for shape in shapes_of(source).values())
    width = source.num_kv_heads * source.head_dim
    return 4 * (numbers + TEXTS_AT_MOST + PROJECTED * width) + TOKENS_AT_MOST * _TOKEN_BYTES


def usual_rows(cache: Readable, skip_positions: int) -> Tensor:
    """The rows of a cache that are sampled, int64 ``[m]``."""
    start = int(cache.positions[0])
    return sample_rows(cache.tokens, start_position=start, skip_positions=skip_positions)


def features(
    moments: RowMoments, taken: KVCache, source: ModelIdentity, *, length: int, peaks: Tensor
) -> dict[str, Tensor]:
    """The features of a cache by name: from sampled rows of a prompt of ``length`` tokens."""
    sampled = content_of(taken, source.rope, length=length)
    return measure(moments, sampled, taken.positions.cpu(), peaks, source.rope)


def scorer(profile: CalibrationProfile | None, mapper: Mapper) -> Callable[[KVCache], float | None]:
    """What gives a source cache its score; None where nothing can."""

    def score(cache: KVCache) -> float | None:
        if profile is None:
            return None
        found = profile.examine(
            cache, mapper.source, skip_positions=mapper.skipped_positions, peaks=largest(cache)
        )
        return None if found is None else found.score

    return score


def flat(found: Mapping[str, Tensor]) -> Tensor:
    """All features end to end, ``[F]``."""
    return torch.cat([found[name].flatten() for name in FEATURES])


def name_of(found: Mapping[str, Tensor], index: int) -> str:
    """Which feature number ``index`` is: its name and its place, such as ``shift[1, 0, 3]``."""
    for name in FEATURES:
        tensor = found[name]
        if index < tensor.numel():
            place = [int(i) for i in torch.unravel_index(torch.tensor(index), tensor.shape)]
            return f"{name}{place}"
        index -= tensor.numel()
    raise IndexError(index)
