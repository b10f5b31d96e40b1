"""Which target layer needs which source layers, and which source layers nobody needs after it."""

from dataclasses import dataclass
from typing import Self

from mappers.mapper import Mapper


@dataclass(frozen=True, slots=True)
class ReadingOrder:
    """``needed_layers[t]``: so many source layers, from the first, must have arrived before target
    layer ``t`` can be computed. ``expiring[t]``: those that ``t`` is the last to read."""

    needed_layers: tuple[int, ...]
    expiring: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mapper: Mapper) -> Self:
        """Of a mapper's maps."""
        last_reader = {j: t for t, layer in enumerate(mapper.layers) for j in layer.sources}
        return cls(
            tuple(max(layer.sources) + 1 for layer in mapper.layers),
            tuple(
                tuple(j for j in layer.sources if last_reader[j] == t)
                for t, layer in enumerate(mapper.layers)
            ),
        )
