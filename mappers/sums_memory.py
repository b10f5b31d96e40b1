"""What the sums of a pair take, and into which parts a fit is cut where they cannot all be held.

Sums relate all inputs with each other, so they grow with the square of the source layers and soon
are hundreds of GiB. But a target layer reads few source layers. So a pass may hold the sums of only
some target layers with a pool of source layers, and there are as many passes as it takes.
"""

from typing import NamedTuple

from mappers.errors import TooLittleMemory
from mappers.geometry import Geometry, Structure, head_groups

NUMBER_BYTES = 8
TARGET_LAYERS_A_PASS = 4
"""A pass runs both models over all text: it should serve as many target layers as this, before the
pool gets the memory that is left."""


class Shares(NamedTuple):
    """What one pass holds: sums of so many source layers with so many target layers."""

    source_layers: int
    target_layers: int


def sums_bytes(geometry: Geometry, structure: Structure, lags: int, shares: Shares) -> int:
    """Bytes of the Gram matrices and cross products of a pass, in float64.

    What else there is grows with a window, not with its square: it is not counted.
    """
    groups = head_groups(geometry, structure)
    times = 2 if structure == "joint" else 1  # keys and values are inputs together, or apart
    inputs = (lags + 1) * times * shares.source_layers * geometry.source_width // groups
    outputs = times * shares.target_layers * geometry.target_width // groups
    return 2 // times * groups * inputs * (inputs + outputs) * NUMBER_BYTES


def all_layers(geometry: Geometry) -> Shares:
    """What the only pass of a fit holds that is not cut."""
    return Shares(geometry.source_layers, geometry.target_layers)


def shares_of_a_pass(
    geometry: Geometry, structure: Structure, lags: int, *, least: int, memory_bytes: int
) -> Shares:
    """The largest pool of source layers that fits, with all target layers that fit beside it.

    least: source layers, without which there is not enough to read. Of a whole pair that fits,
    everything. Raises TooLittleMemory where not even one target layer with ``least`` fits.
    """

    def fit(source_layers: int, target_layers: int) -> bool:
        shares = Shares(source_layers, target_layers)
        return sums_bytes(geometry, structure, lags, shares) <= memory_bytes

    for wanted in (TARGET_LAYERS_A_PASS, 1):
        wanted = min(wanted, geometry.target_layers)
        for pool in range(geometry.source_layers, least - 1, -1):
            if fit(pool, wanted):
                beside = range(geometry.target_layers, wanted - 1, -1)
                return Shares(pool, next(count for count in beside if fit(pool, count)))
    needed = sums_bytes(geometry, structure, lags, Shares(least, 1))
    raise TooLittleMemory(
        f"the sums of one target layer with {least} source layers", needed, memory_bytes
    )
