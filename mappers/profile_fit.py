"""The profile of a source, from the windows of text that it reads during calibration.

The first half of the windows gives the moments of rows. Of each window after that, the features are
measured against those moments, in which it has no part: these give centers, spreads and limits.
What is kept of a window is its share in the sums, or its features.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mappers.cache import KVCache
from mappers.errors import NonFinite
from mappers.features import LEAST_SPREAD, RowMoments
from mappers.identity import ModelIdentity
from mappers.profile import CalibrationProfile, features, flat, usual_rows
from mappers.row_sums import RowSums
from mappers.sample import largest, sample
from mappers.token_check import TokenTableBuilder

TEXTS_AT_LEAST = 4
"""After the first half; from fewer no profile is made."""


class ProfileBuilder:
    """Takes the whole caches of ``windows`` windows of text in order; then ``profile`` has it.

    ``tensors`` and ``restore`` carry it over an interruption.
    """

    def __init__(self, source: ModelIdentity, *, windows: int, skip_positions: int) -> None:
        self.source, self.skip_positions = source, skip_positions
        self._first_half = windows // 2
        self._sums = RowSums(source.num_layers, source.num_kv_heads, source.head_dim)
        self._tokens = TokenTableBuilder(source.num_kv_heads * source.head_dim)
        self._moments: RowMoments | None = None
        self._seen: list[dict[str, Tensor]] = []

    def add(self, ids: Tensor, cache: KVCache) -> None:
        """Token ids ``[T]`` of one window and its cache, keys as cached. Raises NonFinite."""
        peaks = largest(cache)
        if not bool(peaks.isfinite().all()):
            raise NonFinite("the source's cache of a calibration window is not finite")
        self._tokens.add(ids, cache)
        rows = usual_rows(cache, self.skip_positions)
        if self._sums.texts < self._first_half and len(rows):
            self._sums.add(sample(cache, self.source.rope, rows), peaks)
        elif len(rows):
            self._moments = self._moments or self._sums.moments()
            taken, length = cache.take(rows), int(cache.positions[-1]) + 1
            found = features(self._moments, taken, self.source, length=length, peaks=peaks)
            self._seen.append(found)

    def profile(self) -> CalibrationProfile | None:
        """None when there were too few windows to know what is usual."""
        if len(self._seen) < TEXTS_AT_LEAST or self._moments is None:
            return None
        seen = torch.stack([flat(found) for found in self._seen])
        least = flat({n: torch.full_like(t, LEAST_SPREAD[n]) for n, t in self._seen[0].items()})
        center, spread = seen.mean(0), torch.maximum(seen.std(0), least)
        return CalibrationProfile(
            self._moments,
            center,
            spread,
            deviations_of(seen, least).sort().values,
            self._tokens.table(),
        )

    def tensors(self) -> dict[str, Tensor]:
        """All that was kept so far, for a checkpoint."""
        names = self._seen[0] if self._seen else ()
        stacked = {f"seen.{n}": torch.stack([found[n] for found in self._seen]) for n in names}
        return {**self._sums.tensors(), **stacked, **self._tokens.table().tensors()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on where ``tensors`` was called."""
        self._sums.restore({n: t for n, t in tensors.items() if "." not in n})
        seen = {n.removeprefix("seen."): t for n, t in tensors.items() if n.startswith("seen.")}
        self._tokens.ids, self._tokens.values = tensors["tokens.ids"], tensors["tokens.values"]
        rows = zip(*(t.unbind() for t in seen.values()), strict=True)
        self._seen = [dict(zip(seen, row, strict=True)) for row in rows]
        self._moments = self._sums.moments() if self._seen else None


def deviations_of(seen: Tensor, least: Tensor) -> Tensor:
    """How far each of N texts is from the others, ``[N]``, given the features ``[N, F]`` of all.

    ``least [F]``: below this no spread is taken for one.
    """
    texts, wide = len(seen), seen.double()
    others = (wide.sum(0) - wide) / (texts - 1)
    # The sum of squares without one text: Welford's step, backwards.
    squares = wide.var(0, correction=0) * texts - (wide - wide.mean(0)) * (wide - others)
    spread = (squares / (texts - 2)).clamp_min(0).sqrt()
    return ((wide - others) / torch.maximum(spread, least)).abs().amax(1).float()
