"""Storage of keys and values in 8 bits: rounding, scales, zero points.

A stored number ``q`` stands for ``(q - zero) * scale``; the zero point is 0 unless the storage has
zero points. Scales and zero points are float32, for each layer's keys and values of their own:

==================  ========  ==================================================================
scales              shape     where such caches come from
==================  ========  ==================================================================
``none``            -         float8 in vLLM, SGLang and LMDeploy without calibrated scales
``per_tensor``      [1]       float8 with calibrated scales there; int8 in TensorRT-LLM
``per_head``        [H]       float8 calibrated by llm-compressor for each kv head (vLLM)
``per_token_head``  [T, H]    ``int8_per_token_head`` and ``fp8_per_token_head`` of vLLM; int8 with
                              zero points of LMDeploy (whose numbers run from 0: subtract 128 from
                              them and from their zero points)
==================  ========  ==================================================================

Float8 is OCP's E4M3 and E5M2
(https://www.opencompute.org/documents/ocp-8-bit-floating-point-specification-ofp8).
Legend: T tokens, H kv heads, D head dim.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mappers.cache import DTYPES, describe
from mappers.errors import LayoutError

StorageDtype = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
ScaleScheme = Literal["none", "per_tensor", "per_head", "per_token_head"]

INT8_LARGEST = 127
"""-128 is never written: with it the numbers would not be even about zero."""
ZERO_POINTS = (-128.0, 127.0)
"""A zero point lies within the range of the stored numbers."""


@dataclass(frozen=True, slots=True)
class Storage:
    """In which form a cache is stored. Raises ``LayoutError`` for one that there is not."""

    dtype: StorageDtype
    scales: ScaleScheme = "none"
    zero_points: bool = False

    def __post_init__(self) -> None:
        if self.scales != "none" and not self.eight_bits:
            raise LayoutError(f"scales: only an 8-bit cache has any, {self.dtype} has none")
        if self.scales == "none" and self.dtype == "int8":
            raise LayoutError("scales: an int8 cache has some, expected another scheme than none")
        if self.zero_points and self.dtype != "int8":
            raise LayoutError(f"zero points: only an int8 cache has any, {self.dtype} has none")

    @property
    def eight_bits(self) -> bool:
        """Whether it is other numbers than the model computed, and not only fewer digits."""
        return DTYPES[self.dtype].itemsize == 1

    @property
    def scaled(self) -> bool:
        """Whether tensors of scales belong to it."""
        return self.scales != "none"

    def scale_shape(self, tokens: int, heads: int) -> tuple[int, ...]:
        """Shape of a layer's scales, and of its zero points, for keys as for values."""
        shapes = {"per_tensor": (1,), "per_head": (heads,), "per_token_head": (tokens, heads)}
        return shapes[self.scales]


class Stored(NamedTuple):
    """One layer's keys or values: numbers ``[T, H, D]``; scale and zero as ``scale_shape`` says."""

    numbers: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None

    def rows(self, chosen: slice | Tensor) -> "Stored":
        """Those tokens only."""
        scale, zero = (
            part[chosen] if part is not None and part.ndim == 2 else part
            for part in (self.scale, self.zero)
        )
        return Stored(self.numbers[chosen], scale, zero)


def in_turn(sides: Iterable[Stored]) -> list[Tensor]:
    """The scales of keys and values, then their zero points, as far as there are any."""
    kinds = list(zip(*sides, strict=True))[1:]
    return [part for kind in kinds for part in kind if part is not None]


def quantize(states: Tensor, storage: Storage) -> Stored:
    """Store float ``[T, H, D]``; the largest numbers of ``storage`` are given to its extremes.

    To nearest, ties to even. Without scales, values beyond the dtype saturate. Raises
    ``LayoutError`` for a storage of more than 8 bits and for values that are not finite.
    """
    if not storage.eight_bits:
        raise LayoutError(f"expected an 8-bit dtype, got {storage.dtype}")
    exact = states.to(torch.float32)
    if not torch.isfinite(exact).all():
        raise LayoutError("values to quantize must be finite")
    dtype = DTYPES[storage.dtype]
    largest = INT8_LARGEST if dtype == torch.int8 else torch.finfo(dtype).max
    if not storage.scaled:
        return Stored(exact.clamp(-largest, largest).to(dtype))
    scale, zero = _parameters(exact, storage, largest)
    scaled = exact / scale[..., None]
    if zero is not None:
        scaled += zero[..., None]
    if dtype == torch.int8:
        scaled.round_()
    return Stored(scaled.clamp_(-largest, largest).to(dtype), scale, zero)


def dequantize(stored: Stored) -> Tensor:
    """What is stored, float32 ``[T, H, D]``; ``stored`` is as ``check`` wants it."""
    exact = stored.numbers.to(torch.float32)
    if stored.zero is not None:
        exact -= stored.zero[..., None]
    if stored.scale is not None:
        exact *= stored.scale[..., None]
    return exact


def check(stored: Stored, storage: Storage) -> None:
    """Raise ``LayoutError`` unless ``stored`` is of this storage, with scales that can be used."""
    numbers = stored.numbers
    if numbers.ndim != 3 or numbers.dtype != DTYPES[storage.dtype]:
        raise LayoutError(f"expected {storage.dtype} [tokens, heads, dim], got {describe(numbers)}")
    for name, part, wanted in (
        ("scale", stored.scale, storage.scaled),
        ("zero point", stored.zero, storage.zero_points),
    ):
        if (part is not None) != wanted:
            raise LayoutError(f"{name}: {'missing' if wanted else 'not expected'}")
        if part is not None:
            _check_parameters(name, part, storage.scale_shape(*numbers.shape[:2]))
    if stored.scale is not None and not bool((stored.scale > 0).all()):
        raise LayoutError("scale: expected values above 0")
    low, high = ZERO_POINTS
    if stored.zero is not None and not bool(((stored.zero >= low) & (stored.zero <= high)).all()):
        raise LayoutError(f"zero point: expected values from {low:g} to {high:g}")


def _parameters(exact: Tensor, storage: Storage, largest: float) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point, so that what is stored reaches from ``-largest`` to ``largest``."""
    low, high = _extremes(exact, storage.scales)
    if not storage.zero_points:
        return _usable(torch.maximum(-low, high) / largest), None
    # The halves apart: a difference could be larger than any float32.
    scale = _usable(high / (2 * largest) - low / (2 * largest))
    return scale, (-largest - low / scale).clamp(-largest, largest)


def _extremes(exact: Tensor, scales: ScaleScheme) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of what shares a scale, zero among them."""
    tokens, heads, _ = exact.shape
    if exact.numel() == 0:
        shape = Storage("int8", scales).scale_shape(tokens, heads)
        return exact.new_zeros(shape), exact.new_zeros(shape)
    dims = {"per_tensor": (0, 1, 2), "per_head": (0, 2), "per_token_head": (2,)}[scales]
    low, high = exact.amin(dims), exact.amax(dims)
    if scales == "per_tensor":
        low, high = low.view(1), high.view(1)
    return low.clamp_max(0.0), high.clamp_min(0.0)


def _usable(scale: Tensor) -> Tensor:
    # All zeros need some scale: 1. So does a peak so small that its scale would be subnormal.
    return torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)


def _check_parameters(name: str, part: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(part.shape) != shape or part.dtype != torch.float32:
        raise LayoutError(f"{name}: expected float32 {list(shape)}, got {describe(part)}")
    if not bool(torch.isfinite(part).all()):
        raise LayoutError(f"{name}: expected finite values")
