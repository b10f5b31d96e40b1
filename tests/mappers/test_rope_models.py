"""Whole models of every listed family: what they cache, stripped, no longer depends on position.

One token alone attends to nothing but itself, so at any position it has the same keys but for the
rotation, in every layer. That proves pairing, sign, rotated part, scaling and the order of k-norm
and rotation at once, on the cache itself.
"""

import inspect
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mappers.rope import Rope, RotaryTable
from mappers.rope_models import HALF, INTERLEAVED, PARTIAL, pairing_of

POSITIONS = torch.tensor([0, 1, 5, 4095, 131_071])
TINY: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 131_072,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# only where the family's config has such a field
TINY_EXPERTS = {
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "moe_num_experts": 2,
    "moe_k": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "layer_types": ["full_attention"] * 4,
}


def tiny_config(model_type: str, **more: Any) -> PretrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    fields = inspect.signature(config_class.__init__).parameters
    experts = {name: value for name, value in TINY_EXPERTS.items() if name in fields}
    config: PretrainedConfig = config_class(**TINY, **experts, **more)
    return config


def cached_keys(config: PretrainedConfig) -> list[torch.Tensor]:
    """The keys of one token at each of POSITIONS, per layer ``[T, H, D]``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # norms too, so that a norm behind the rotation would show
            parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(std=0.1)
        ids = torch.full((len(POSITIONS), 1), 7)
        out = model(input_ids=ids, position_ids=POSITIONS[:, None], use_cache=True)
    return [layer.keys[:, :, 0] for layer in out.past_key_values.layers]


def assert_stripped_alike(config: PretrainedConfig) -> Rope:
    nested = any(isinstance(value, dict) for value in config.rope_parameters.values())
    rope = Rope.from_config(config, layer_type="full_attention" if nested else None)
    table = RotaryTable.of(rope, POSITIONS)
    layers = cached_keys(config)
    assert len(layers) == 4
    for keys in layers:
        content = table.strip(keys)
        torch.testing.assert_close(content, content[:1].expand_as(content), rtol=0, atol=1e-5)
        assert (keys - keys[:1]).abs().amax(dim=(1, 2))[1:].min() > 1e-2  # they were rotated
    return rope


@pytest.mark.parametrize("model_type", sorted(HALF | INTERLEAVED))
def test_cached_keys_follow_the_listed_pairing(model_type: str) -> None:
    rope = assert_stripped_alike(tiny_config(model_type))
    assert rope.pairing == pairing_of(model_type)


@pytest.mark.parametrize("model_type", sorted(PARTIAL))
def test_listed_families_leave_the_rest_of_a_head_unrotated(model_type: str) -> None:
    parameters = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}
    rope = assert_stripped_alike(tiny_config(model_type, rope_parameters=parameters))
    assert rope.rotary_dim == 4


def test_no_family_has_two_pairings() -> None:
    assert not HALF & INTERLEAVED
    assert PARTIAL < HALF | INTERLEAVED


@pytest.mark.parametrize("model_type", ["nanochat", "hunyuan_v1_dense", "smollm3", "of_tomorrow"])
def test_families_that_rotate_otherwise_are_not_listed(model_type: str) -> None:
    assert pairing_of(model_type) is None
