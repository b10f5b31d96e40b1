"""8-bit float storage of keys and values, with and without scales.

A stored value ``s`` stands for ``s * scale``: one scale for the tensor (``per_tensor``), one per kv
head (``per_head``), or none at all (``none``, scale 1). Formats: OCP 8-bit floating point E4M3 and
E5M2 (https://www.opencompute.org/documents/ocp-8-bit-floating-point-specification-ofp8).
"""

from typing import Literal

import torch
from torch import Tensor

from mappers.cache import describe
from mappers.errors import LayoutError

ScaleScheme = Literal["none", "per_tensor", "per_head"]
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def quantize(
    states: Tensor, dtype: torch.dtype, scheme: ScaleScheme = "none"
) -> tuple[Tensor, Tensor | None]:
    """Store float ``[T, H, D]`` as float8; returns it and its float32 scale, or None for "none".

    The scale maps the largest magnitude to the largest finite value of ``dtype``; without a scale,
    values beyond that saturate (the conversion alone would give NaN or infinity). Raises
    ``LayoutError`` when ``dtype`` is not a float8 or the values are not finite.
    """
    if dtype not in FLOAT8:
        raise LayoutError(f"expected a float8 dtype, got {str(dtype).removeprefix('torch.')}")
    largest = torch.finfo(dtype).max
    exact = states.to(torch.float32)
    if not torch.isfinite(exact).all():
        raise LayoutError("values to quantize must be finite")
    if scheme == "none":
        return exact.clamp(-largest, largest).to(dtype), None
    scale = _scale(exact, scheme, largest)
    scaled = exact / _spread(scale)
    return scaled.clamp(-largest, largest).to(dtype), scale


def dequantize(
    stored: Tensor, scale: Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Values of float8 ``[T, H, D]`` in ``dtype``; ``scale`` is ``[]``, ``[1]``, ``[H]`` or None.

    Raises ``LayoutError`` when ``stored`` is not float8 or the scale has another shape, is not
    finite or not positive.
    """
    if stored.dtype not in FLOAT8 or stored.ndim != 3:
        raise LayoutError(f"expected float8 [tokens, heads, dim], got {describe(stored)}")
    exact = stored.to(torch.float32)
    if scale is not None:
        _check_scale(scale, stored.shape[1])
        exact *= _spread(scale.to(torch.float32))
    return exact.to(dtype)


def _scale(exact: Tensor, scheme: ScaleScheme, largest: float) -> Tensor:
    if exact.numel() == 0:
        shape = (exact.shape[1],) if scheme == "per_head" else ()
        return torch.ones(shape, device=exact.device)
    peak = exact.abs().amax(dim=(0, 2)) if scheme == "per_head" else exact.abs().amax()
    scale = peak / largest
    # All zeros need some scale: 1. So does a peak so small that its scale would be subnormal.
    return torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)


def _spread(scale: Tensor) -> Tensor:
    return scale.reshape(1, -1, 1)


def _check_scale(scale: Tensor, heads: int) -> None:
    if tuple(scale.shape) not in ((), (1,), (heads,)) or not scale.is_floating_point():
        raise LayoutError(f"scale: expected [], [1] or [{heads}], got {describe(scale)}")
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise LayoutError("scale: expected finite values above 0")
