"""What is measured of a source cache to tell whether it is one: a few hundred numbers.

96 rows are compared with the calibration rows, keys in content space, and the largest value of
every channel in all rows with the largest there was.

======== ================ =========================================================================
feature  one for each     what it is, and what shows there
======== ================ =========================================================================
shift    kind, layer,     log mean square of the channels' sampled means, in the unit of how means
         head             vary from text to text: swapped layers, heads or tensors, wrong dtypes
energy   kind, layer,     log mean T2 (Hotelling) in the leading components: scale, and unfamiliar
         head             text
residual kind, layer,     log mean square outside of them (Q of Jackson and Mudholkar 1979): broken
         head             values, and unfamiliar text
coupling layer, head      whether keys and values of a row belong together as they did: rows of one
                          that moved against the other
turn     layer            the mean key along the path that one position more would turn it
tilt     layer            the keys along the path on which a slightly other theta would put them
peak     kind, layer      log2 of the largest value against calibration's: a flipped exponent bit
======== ================ =========================================================================

Legend: L layers, H kv heads, D head dim, R components, m sampled rows, F features; the kinds are
keys and values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.rope import Rope, RotaryTable

FEATURES = ("shift", "energy", "residual", "coupling", "turn", "tilt", "peak")
LEAST_SPREAD = dict.fromkeys(FEATURES, 1e-3) | {"peak": 0.5}
"""Below this a spread is not believed. Peaks of most texts are almost the same, of a few they are
twice as large, which a standard deviation makes too much of; what is to be seen is 16 times."""
COMPONENTS = 8
THETA_STEP = 1.02
FLOOR = 1e-12
"""What a logarithm is taken of at least, so that a zeroed layer is far off and not infinitely."""


@dataclass(frozen=True, slots=True, eq=False)
class RowMoments:
    """The distribution of the calibration rows; all float32.

    mean ``[2, L, H, D]``; within and between ``[2, L, H, D]``: variance of the rows of a text, and
    of the texts' means; basis ``[2, L, H, D, R]`` and scale ``[2, L, H, R]``: leading components of
    all rows and their standard deviations; rest ``[2, L, H]``: variance outside of them; coupling
    ``[L, H, R, R]``: correlation of the keys' components with the values'; peak ``[2, L, H, D]``:
    the largest absolute value, as cached, in any row of any text.
    """

    mean: Tensor
    within: Tensor
    between: Tensor
    basis: Tensor
    scale: Tensor
    rest: Tensor
    coupling: Tensor
    peak: Tensor


def measure(
    moments: RowMoments, rows: Tensor, positions: Tensor, peaks: Tensor, rope: Rope
) -> dict[str, Tensor]:
    """All features by name, float32, of shape ``[2, L, H]``, ``[L, H]``, ``[L]`` or ``[2, L]``.

    ``rows`` ``[2, L, H, m, D]`` at absolute ``positions`` ``[m]`` from ``sample``, ``peaks``
    ``[2, L, H, D]`` from ``largest``.
    """
    delta = rows - moments.mean.unsqueeze(3)
    shift = delta.mean(3)
    variance = moments.between + moments.within / rows.shape[3]
    components = (delta @ moments.basis) / moments.scale.unsqueeze(3)
    return {
        "shift": _log((shift.square() / variance).mean(-1)),
        "energy": _log(components.square().mean((-1, -2))),
        "residual": _log(_outside(delta, components, moments)),
        "coupling": _coupling(components, moments.coupling),
        "turn": _turn(shift[0], variance[0], moments, rope),
        "tilt": _tilt(delta[0], positions, moments, rope),
        "peak": _log(peaks / moments.peak).amax((-1, -2)),
    }


def _log(tensor: Tensor) -> Tensor:
    return tensor.clamp_min(FLOOR).log2()


def _outside(delta: Tensor, components: Tensor, moments: RowMoments) -> Tensor:
    """Mean square of the rows outside of the leading components, 1 in calibration."""
    inside = (components * moments.scale.unsqueeze(3)).square().sum(-1)
    return (delta.square().sum(-1) - inside).mean(-1) / moments.rest


def _coupling(components: Tensor, expected: Tensor) -> Tensor:
    """1 where keys and values of a row are correlated as in calibration, 0 where not at all."""
    found = components[0].transpose(-1, -2) @ components[1] / components.shape[-2]
    return (found * expected).sum((-1, -2)) / expected.square().sum((-1, -2))


def _turn(shift: Tensor, variance: Tensor, moments: RowMoments, rope: Rope) -> Tensor:
    """How far the mean keys ``[L, H, D]`` are on their way to those of one position later.

    The locally most powerful test of that shift among all of the same cost: the projection on it
    in the unit of its own standard deviation.
    """
    path = _turned(moments.mean[0], torch.tensor([1]), rope, rope)[:, :, 0] - moments.mean[0]
    return _projection(shift, path, variance, (1, 2))


def _tilt(delta: Tensor, positions: Tensor, moments: RowMoments, rope: Rope) -> Tensor:
    """How far the keys ``[L, H, m, D]`` are on their way to those of another theta."""
    other = rope.model_copy(update={"theta": rope.theta * THETA_STEP})
    path = _turned(moments.mean[0], positions, rope, other)
    # Relative to the sample's own mean: what is the same at all positions is another feature's.
    path = path - path.mean(2, keepdim=True)
    within = moments.within[0].unsqueeze(2)
    return _projection(delta, path, within, (1, 2, 3))


def _projection(found: Tensor, path: Tensor, variance: Tensor, dims: tuple[int, ...]) -> Tensor:
    along = (found * path / variance).sum(dims)
    return along / (path.square() / variance).sum(dims).clamp_min(FLOOR).sqrt()


def _turned(mean: Tensor, positions: Tensor, rope: Rope, other: Rope) -> Tensor:
    """The mean keys ``[L, H, D]`` as ``other`` puts them at ``positions``, read by ``rope``.

    With the same rope: as one that is cached a position late is read. ``[L, H, m, D]``.
    """
    layers, heads, dim = mean.shape
    keys = mean.view(1, layers * heads, dim).expand(len(positions), -1, -1)
    late = positions - 1 if other is rope else positions
    cached = RotaryTable.of(other, late).apply(keys)
    read = RotaryTable.of(rope, positions).strip(cached)
    return read.view(len(positions), layers, heads, dim).permute(1, 2, 0, 3)
