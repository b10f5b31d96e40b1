"""Take the rotary embedding out of cached keys, and put one in.

Convention. A pair (a, b) of a key at position p, whose frequency is f, is cached as

    (a cos(pf) - b sin(pf), b cos(pf) + a sin(pf)) * scaling

which is RoFormer (arXiv 2104.09864) with the sign that transformers uses. Pairs are elements i and
i + R/2 (``half``) or 2i and 2i + 1 (``interleaved``) of the first R = rotary_dim elements of a
head; the others are left alone. ``scaling`` is YaRN's or LongRoPE's attention factor, else 1.
Stripping turns back and divides by it, and so gives the key in content space.

Angles are float32 products of position and frequency, cos and sin float32, as in transformers, so
they agree with the model's at any position (whole up to 2^24). A model that runs in bfloat16 rounds
cos and sin once more; that is within the rounding of its cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import LayoutError
from .rope_models import Pairing
from .rope_spec import Rope

__all__ = ["Rope", "RotaryTable"]


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """The cosines and sines of one request's positions; T tokens, R rotated elements of D.

    ``cos`` and ``sin`` are float32 ``[T, R/2]`` and include ``scaling``.
    """

    cos: Tensor
    sin: Tensor
    scaling: float
    head_dim: int
    pairing: Pairing

    @classmethod
    def of(
        cls,
        rope: Rope,
        positions: Tensor,
        *,
        length: int | None = None,
        device: torch.device | str | None = None,
    ) -> "RotaryTable":
        """The table of a rope at absolute ``positions`` (int64 ``[T]``), on ``device`` or theirs.

        ``length`` is how many tokens the sequence had when the model computed these keys; left out,
        it is the last position + 1. Only ``dynamic`` and ``longrope`` depend on it, and only beyond
        the length that they were trained for. There a model that decodes token by token caches keys
        of several lengths, each of which needs a table of its own, and transformers' ``dynamic``
        keeps to the longest sequence that the model object has seen. Raises LayoutError.
        """
        if positions.dim() != 1 or positions.dtype != torch.int64:
            raise LayoutError(
                f"positions must be int64 [T], not {positions.dtype} {list(positions.shape)}"
            )
        if length is None and rope.type in ("dynamic", "longrope") and len(positions):
            length = int(positions.max()) + 1
        inv_freq, scaling = rope.frequencies(length=length)
        device = positions.device if device is None else torch.device(device)
        angles = positions.to(device, torch.float32)[:, None] * inv_freq.to(device)
        cos, sin = angles.cos().mul_(scaling), angles.sin_().mul_(scaling)
        return cls(cos, sin, scaling, rope.head_dim, rope.pairing)

    def slice(self, start: int, stop: int) -> "RotaryTable":
        """The same for token rows ``start`` to ``stop`` of this table; views, nothing is copied."""
        rows = slice(start, stop)
        return RotaryTable(
            self.cos[rows], self.sin[rows], self.scaling, self.head_dim, self.pairing
        )

    def strip(self, keys: Tensor, out: Tensor | None = None) -> Tensor:
        """Keys as cached ``[T, H, D]``, any float dtype -> content keys, new float32 or in ``out``.

        ``out`` may be a view, of any float dtype, and ``keys`` itself. Raises LayoutError.
        """
        if self.scaling == 1:
            return self._rotate(keys, out, self.cos, self.sin, sign=-1)
        undo = 1 / self.scaling**2
        return self._rotate(keys, out, self.cos * undo, self.sin * undo, sign=-1)

    def apply(self, content: Tensor, out: Tensor | None = None) -> Tensor:
        """Content keys ``[T, H, D]`` -> keys as the model caches them, new float32 or in ``out``.

        ``out`` may be a view, of any float dtype, and ``content`` itself. Raises LayoutError.
        """
        return self._rotate(content, out, self.cos, self.sin, sign=1)

    def _rotate(
        self, keys: Tensor, out: Tensor | None, cos: Tensor, sin: Tensor, *, sign: int
    ) -> Tensor:
        self._check(keys, "keys")
        # reduced precision enters and leaves by conversion only; between is float32
        source = keys.to(torch.float32)
        if out is None:
            out = torch.empty_like(keys, dtype=torch.float32, memory_format=torch.contiguous_format)
        else:
            self._check(out, "out")
            if out.shape != keys.shape:
                raise LayoutError(f"out is {list(out.shape)} for keys {list(keys.shape)}")
        _rotate_pairs(self._pairs(source), self._pairs(out), cos[:, None], sin[:, None], sign)
        rotated = 2 * cos.shape[-1]
        if rotated < self.head_dim:
            out[..., rotated:].copy_(source[..., rotated:])
        return out

    def _pairs(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Views ``[T, H, R/2]`` of the first and of the second element of each pair."""
        half = self.cos.shape[-1]
        if self.pairing == "interleaved":
            return keys[..., 0 : 2 * half : 2], keys[..., 1 : 2 * half : 2]
        return keys[..., :half], keys[..., half : 2 * half]

    def _check(self, keys: Tensor, name: str) -> None:
        if not keys.is_floating_point() or keys.dim() != 3:
            raise LayoutError(f"{name} must be floats [T, H, D], not {keys.dtype} {keys.dim()}-d")
        tokens, _, head_dim = keys.shape
        if (tokens, head_dim) != (len(self.cos), self.head_dim):
            raise LayoutError(
                f"{name} has {tokens} tokens of head_dim {head_dim}; "
                f"this table is for {len(self.cos)} of {self.head_dim}"
            )


def _rotate_pairs(
    source: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, sign: int
) -> None:
    """Turn float32 pairs by sign * angle into ``out``, which may be ``source``.

    Where ``out`` is other float32 memory it takes both steps. Else one scratch tensor of half a
    key: the first elements wait in it until the second are done.
    """
    first, second = source
    if out[0].dtype == torch.float32 and not _share(first, out[0]):
        torch.mul(first, cos, out=out[0]).addcmul_(second, sin, value=-sign)
        torch.mul(second, cos, out=out[1]).addcmul_(first, sin, value=sign)
        return
    scratch = (first * cos).addcmul_(second, sin, value=-sign)
    if out[1].dtype == torch.float32:
        torch.mul(second, cos, out=out[1]).addcmul_(first, sin, value=sign)
        out[0].copy_(scratch)
    else:  # not the source then, which is float32, so the scratch is free for the second elements
        out[0].copy_(scratch)
        torch.mul(second, cos, out=scratch).addcmul_(first, sin, value=sign)
        out[1].copy_(scratch)


def _share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
