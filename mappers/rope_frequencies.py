"""Inverse frequencies of every rope type, as transformers computes them.

The numbers come from ``transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS``, so that they agree
to the last bit with the model that wrote the cache. Always on the CPU, since ``pow`` differs
between devices in the last bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """The part of a model config that transformers' rope functions read."""

    rope_parameters: Mapping[str, Any]
    head_dim: int
    max_position_embeddings: int
    # read only to derive a head_dim that is given here
    hidden_size: int = 0
    num_attention_heads: int = 1

    def standardize_rope_params(self) -> None:
        """Nothing to do: the parameters are complete already. transformers calls it."""


def inverse_frequencies(
    rope_type: str, settings: RopeSettings, *, length: int | None = None
) -> tuple[Tensor, float]:
    """Radians per position of each pair, float32 ``[R/2]``, and the factor on cos and sin.

    ``length`` in tokens matters to ``dynamic`` beyond ``max_position_embeddings`` and to
    ``longrope`` beyond its ``original_max_position_embeddings``; None means the short form of both.
    """
    if rope_type == "default":
        return _default(settings), 1.0
    seq_len: int | Tensor | None = length
    if rope_type == "dynamic":
        stretched = length is not None and length > settings.max_position_embeddings
        # transformers hands over a tensor and so computes the stretched base in float32
        seq_len = torch.tensor(length) if stretched else None
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](settings, None, seq_len=seq_len)
    return inv_freq.to(torch.float32), float(scaling)


def _default(settings: RopeSettings) -> Tensor:
    """theta^(-2i/R) for pair i (RoFormer, arXiv 2104.09864, section 3.2.2)."""
    theta = settings.rope_parameters["rope_theta"]
    rotary_dim = int(settings.head_dim * settings.rope_parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return torch.reciprocal(theta**exponents)
