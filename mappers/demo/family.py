"""The two architectures of the embedded family, and how the large one grows from the small one."""

from dataclasses import dataclass

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 4_096


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One model: its shape and how it is trained.

    Windows get longer for the last ``long_share`` of the steps.
    """

    name: str
    layers: int
    rope_theta: float
    steps: int
    peak_rate: float
    seed: int
    window_tokens: int = 512
    long_window_tokens: int = 1_056
    long_share: float = 0.25


def config(plan: Plan) -> Qwen3Config:
    """Equal kv_heads x head_dim (4 x 32) on both sides; depth and rope_theta differ."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=plan.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2_048,
        rope_parameters={"rope_type": "default", "rope_theta": plan.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def grow(small: Qwen3ForCausalLM, plan: Plan) -> Qwen3ForCausalLM:
    """Put a copy behind every layer, its outputs at zero, so that the loss starts where it was."""
    large = Qwen3ForCausalLM(config(plan))
    state = dict(large.state_dict())
    for name, tensor in small.state_dict().items():
        parts = name.split(".")
        if parts[1] != "layers":
            state[name] = tensor.clone()
            continue
        old = int(parts[2])
        for new in (2 * old, 2 * old + 1):
            silent = new % 2 == 1 and parts[-2] in ("o_proj", "down_proj")
            key = ".".join(["model", "layers", str(new), *parts[3:]])
            state[key] = torch.zeros_like(tensor) if silent else tensor.clone()
    large.load_state_dict(state)
    return large
