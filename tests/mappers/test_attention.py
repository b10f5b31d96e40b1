"""Which attention each transformers family has, read from its config and checked on its model."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mappers.attention import attention_kinds, decoder_config, head_sizes, key_norm
from mappers.errors import UnsupportedModel
from mappers.rope_models import HALF, INTERLEAVED

# What the default config of a family lacks or has wrong for a model of one layer.
COMPLETIONS: dict[str, dict[str, Any]] = {
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
}


def config(family: str, **fields: Any) -> PretrainedConfig:
    made: PretrainedConfig = CONFIG_MAPPING[family](**COMPLETIONS.get(family, {}), **fields)
    return made


def normed_keys_of_model(made: PretrainedConfig) -> bool:
    """Whether the attention modules of a real model of one layer have a norm for keys."""
    made.num_hidden_layers = 1
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return bool(names & {"k_norm", "k_layernorm", "key_layernorm"})


@pytest.mark.parametrize("family", sorted(HALF | INTERLEAVED))
def test_key_norm_is_that_of_the_model(family: str) -> None:
    made = config(family)
    assert key_norm(made) is normed_keys_of_model(made)


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("cohere", "use_qk_norm"),
        ("glm4_moe", "use_qk_norm"),
        ("persimmon", "qk_layernorm"),
        ("phi", "qk_layernorm"),
        ("stablelm", "qk_layernorm"),
    ],
)
@pytest.mark.parametrize("on", [True, False])
def test_key_norm_that_a_field_switches(family: str, field: str, on: bool) -> None:
    made = config(family, **{field: on})
    assert key_norm(made) is on
    assert normed_keys_of_model(made) is on


@pytest.mark.parametrize("family", ["bert", "gpt2", "hunyuan_v1_dense", "nanochat", "diffllama"])
def test_an_unknown_family_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        key_norm(config(family))
    assert error.value.reason == "unknown_architecture"


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("qwen3", {"layer_types": ["full_attention"] * 3}),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}),
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"layer_types": ["full_attention"] * 3}),
        ("phi3", {"sliding_window": None}),
    ],
)
def test_full_attention(family: str, fields: dict[str, Any]) -> None:
    made = config(family, num_hidden_layers=3, **fields)
    assert attention_kinds(made) == ("full", "full", "full")


@pytest.mark.parametrize(
    ("reason", "family", "fields"),
    [
        ("mla", "deepseek_v2", {}),
        ("mla", "deepseek_v3", {}),
        ("mla", "minicpm3", {}),
        ("mla", "longcat_flash", {}),
        ("sliding_window", "mistral", {"sliding_window": 4096}),
        ("sliding_window", "phi3", {"sliding_window": 2047}),
        ("sliding_window", "starcoder2", {"sliding_window": 4096}),
        ("sliding_window", "gemma2", {}),
        ("sliding_window", "gemma3_text", {}),
        ("sliding_window", "gpt_oss", {}),
        ("sliding_window", "ministral", {}),
        (
            "sliding_window",
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        ),
        (
            "sliding_window",
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        ),
        ("chunked_attention", "llama4_text", {}),
        ("linear_attention", "qwen3_next", {}),
        ("linear_attention", "minimax", {}),
        ("recurrent", "mamba", {}),
        ("recurrent", "mamba2", {}),
        ("recurrent", "rwkv", {}),
        ("recurrent", "xlstm", {}),
        ("recurrent", "jamba", {}),
        ("recurrent", "bamba", {}),
        ("recurrent", "falcon_h1", {}),
        ("recurrent", "recurrent_gemma", {}),
        ("recurrent", "lfm2", {"layer_types": ["conv"] * 32}),
        ("sparse_attention", "deepseek_v4", {}),
        ("layers_without_rope", "smollm3", {}),
        ("unknown_attention", "qwen3", {"layer_types": ["moe"] * 32}),
    ],
)
def test_every_other_kind_is_refused_with_its_reason(
    reason: str, family: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be translated") as error:
        attention_kinds(decoder_config(config(family, **fields)))
    assert error.value.reason == reason


def test_shared_layers_are_refused() -> None:
    made = config("gemma3n_text", layer_types=["full_attention"] * 35)
    assert made.num_kv_shared_layers > 0
    with pytest.raises(UnsupportedModel) as error:
        attention_kinds(made)
    assert error.value.reason == "shared_kv"


@pytest.mark.parametrize("family", ["t5", "bart", "whisper", "t5gemma"])
def test_encoder_decoders_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        decoder_config(config(family))
    assert error.value.reason == "encoder_decoder"


def test_the_text_part_of_a_larger_model_is_meant() -> None:
    assert decoder_config(config("qwen3_vl")).model_type == "qwen3_vl_text"


@pytest.mark.parametrize(
    ("family", "fields", "sizes"),
    [
        ("qwen3", {"num_key_value_heads": 4, "head_dim": 16}, (4, 16)),
        ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}, (3, 16)),
        ("qwen2", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}, (2, 16)),
        ("gpt_neox", {"hidden_size": 96, "num_attention_heads": 6}, (6, 16)),
        (
            "mixtral",
            {
                "hidden_size": 96,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": None,
            },
            (2, 16),
        ),
    ],
)
def test_head_sizes(family: str, fields: dict[str, Any], sizes: tuple[int, int]) -> None:
    assert head_sizes(config(family, **fields)) == sizes
