"""What one call asks of a Translator, checked: which tokens are read, mapped, or known already."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.cache import KVCache
from mappers.content_memory import Layer
from mappers.errors import LayoutError
from mappers.geometry import Geometry
from mappers.rope import Rope, RotaryTable

OUTPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Of ``tokens`` tokens the first ``known`` come from the prefix, the others are mapped.

    The target's table is for the mapped tokens only, the source's for ``read``: from as many tokens
    before them as the maps read back, and ``repeats`` are too few there.
    """

    tokens: int
    known: int
    read: slice
    repeats: int
    prefix: KVCache | None
    dtype: torch.dtype
    answer: Sequence[Layer] | None
    source_table: RotaryTable
    target_table: RotaryTable

    @property
    def mapped(self) -> slice:
        """The rows of the answer that the maps give."""
        return slice(self.known, self.tokens)


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes the requests of one mapper: its geometry, both ropes, how far back its maps read."""

    geometry: Geometry
    ropes: tuple[Rope, Rope]
    lags: int
    device: torch.device

    def plan(
        self,
        positions: Tensor,
        dtype: torch.dtype,
        prefix: KVCache | None,
        tokens: int | None,
        answer: Sequence[Layer] | None,
    ) -> Request:
        """Arguments and errors as ``Translator.stream`` has them."""
        given = positions.shape[0] if positions.ndim == 1 else 0
        wanted = given if tokens is None else tokens
        if not 1 <= wanted <= given:
            raise LayoutError(f"{wanted} tokens wanted, of a source with {given}")
        if dtype not in OUTPUT_DTYPES:
            raise ValueError(f"an answer is float32, float16 or bfloat16, not {dtype}")
        if answer is not None:
            self._check_answer(answer, wanted, dtype)
        known = 0 if prefix is None else _known_tokens(prefix, positions, self.geometry, wanted)
        read = slice(max(0, known - self.lags), wanted)
        # Some types of rotary embedding depend on the length that the model saw, not on ours.
        length, both = int(positions.max()) + 1, (positions[read], positions[known:wanted])
        tables = [
            RotaryTable.of(rope, rows, length=length, device=self.device)
            for rope, rows in zip(self.ropes, both, strict=True)
        ]
        repeats = self.lags - (known - read.start)
        return Request(wanted, known, read, repeats, prefix, dtype, answer, *tables)

    def _check_answer(self, answer: Sequence[Layer], tokens: int, dtype: torch.dtype) -> None:
        geometry = self.geometry
        shape = (tokens, geometry.target_heads, geometry.target_dim)
        forms = {(tuple(t.shape), t.dtype, t.device.type) for layer in answer for t in layer}
        if len(answer) != geometry.target_layers or forms != {(shape, dtype, self.device.type)}:
            raise LayoutError(
                f"an answer's memory must be {geometry.target_layers} layers of {dtype} "
                f"{list(shape)} on {self.device.type}"
            )


def _known_tokens(prefix: KVCache, positions: Tensor, geometry: Geometry, tokens: int) -> int:
    """How many tokens the prefix gives; LayoutError where it cannot stand before the others."""
    given = (prefix.num_layers, prefix.num_kv_heads, prefix.head_dim)
    expected = (geometry.target_layers, geometry.target_heads, geometry.target_dim)
    if given != expected:
        raise LayoutError(f"the prefix has (layers, kv heads, head dim) {given}, not {expected}")
    known = min(prefix.tokens, tokens)
    if not torch.equal(positions[:known], torch.arange(known, device=positions.device)):
        raise LayoutError("an exact prefix needs a source that begins at position 0")
    return known
