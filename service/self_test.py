"""A translation whose answer is known beforehand, made on the device before any mapper is served.

One layer, one head of four numbers, and weights that only scale and shift, so the answer follows
from the rotations alone; they are written out here a second time, number by number. A device, a
BLAS or a build that computes wrongly is found by it, and no mapper becomes ready there.

Legend: T tokens, H kv heads, D head dim.
"""

import math

import torch
from torch import Tensor

from mappers.cache import KVCache, consecutive
from mappers.errors import KVTranslatorError
from mappers.identity import ModelIdentity
from mappers.mapper import AffineMap, LayerMap, Mapper
from mappers.prefixes import ExactPrefixes
from mappers.rope import Rope
from service.device import Device

CONTENT = (1.0, -2.0, 3.0, 0.5)
KEY_SCALE, VALUE_SCALE, SHIFT = 2.0, -3.0, 0.25
SOURCE_THETA, TARGET_THETA = 10_000.0, 500_000.0
TOKENS = 48
# Relative to the largest number: rounding of the device's weights and content, and then some.
TOLERANCE = {2: 3e-2, 4: 1e-4}


class SelfTestFailed(KVTranslatorError):
    """The device does not give the golden answer; nothing that it computes may be used."""

    code = "self_test_failed"


def self_test(device: Device) -> None:
    """Translate the known cache on the device. Raises SelfTestFailed for any other answer."""
    values = torch.tensor(CONTENT).expand(TOKENS, 1, -1).contiguous()
    given = KVCache((rotated(CONTENT, SOURCE_THETA),), (values,), consecutive(TOKENS))
    answer = device.translator(_mapper()).translate(given, dtype=torch.float32)
    mapped = tuple(KEY_SCALE * number + SHIFT for number in CONTENT)
    _check("keys", answer.keys[0], rotated(mapped, TARGET_THETA), device)
    _check("values", answer.values[0], VALUE_SCALE * values + SHIFT, device)


def rotated(content: tuple[float, ...], theta: float) -> Tensor:
    """Keys [T, 1, D] of one content at positions 0 ... T - 1: number i turns with number i + D/2,
    by position * theta ** (-2 i / D)."""
    half = len(content) // 2
    rows = []
    for position in range(TOKENS):
        turns = [position * theta ** (-i / half) for i in range(half)]
        pairs = list(zip(content[:half], content[half:], turns, strict=True))
        first = [a * math.cos(turn) - b * math.sin(turn) for a, b, turn in pairs]
        second = [b * math.cos(turn) + a * math.sin(turn) for a, b, turn in pairs]
        rows.append([[*first, *second]])
    return torch.tensor(rows)


def _check(what: str, given: Tensor, golden: Tensor, device: Device) -> None:
    error = float((given.cpu() - golden).abs().max() / golden.abs().max())
    most = TOLERANCE[device.weight_bytes]
    if not error <= most:
        raise SelfTestFailed(
            f"the device's {what} of a known translation are off by {error:.2g}, at most {most:g} "
            "was expected"
        )


def _mapper() -> Mapper:
    unit, shift = torch.eye(len(CONTENT)), torch.full((len(CONTENT),), SHIFT)
    layer = LayerMap((0,), AffineMap(KEY_SCALE * unit, shift), AffineMap(VALUE_SCALE * unit, shift))
    sides = [_identity(theta) for theta in (SOURCE_THETA, TARGET_THETA)]
    return Mapper(sides[0], sides[1], "full_head", (layer,), ExactPrefixes.of({}), 0)


def _identity(theta: float) -> ModelIdentity:
    dim = len(CONTENT)
    return ModelIdentity(
        model="self-test",
        version=f"theta-{theta:g}",
        dtype="float32",
        kv_dtype="float32",
        architecture="self-test",
        num_layers=1,
        num_kv_heads=1,
        head_dim=dim,
        rope=Rope(type="default", theta=theta, head_dim=dim, max_position_embeddings=TOKENS),
        k_norm=False,
        tokenizer_digest="sha256:none",
        attention=("full",),
    )
