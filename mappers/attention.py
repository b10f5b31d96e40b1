"""What a transformers config says about attention: its kind per layer, k-norm, and head sizes.

Only caches that hold one rotated key and one value per token, layer and kv head can be translated.
Everything else is refused with a reason word of its own, and a family that is not known here is
refused too: an unknown part is never taken for a plain one.
"""

from typing import Any, NoReturn

from transformers import PretrainedConfig

from mappers.errors import UnsupportedModel

# transformers' layer types (configuration_utils.ALLOWED_ATTN_LAYER_TYPES) that are not full.
_REASONS = {
    "sliding_attention": "sliding_window",
    "window_attention": "sliding_window",
    "reference_sliding_attention": "sliding_window",
    "chunked_attention": "chunked_attention",
    "linear_attention": "linear_attention",
    "conv": "recurrent",
    "hybrid": "recurrent",
    "hybrid_sliding": "recurrent",
    "indexed_attention": "sparse_attention",
    "compressed_sparse_attention": "sparse_attention",
    "heavily_compressed_attention": "sparse_attention",
    "minimax_m3_sparse": "sparse_attention",
}

# transformers calls state-space layers linear attention too; these fields tell them apart.
_STATE_SPACE_FIELDS = (
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_state_size",
    "state_size",
    "lru_width",
)

# Does the key pass a norm before the rotary embedding? Families that do so always, and those where
# a field of the config decides. Read in transformers 5.24 and checked by
# ``tests/mappers/test_attention.py`` against the models themselves. Families that normalise after
# the embedding are left out on purpose: their cached keys cannot be rotated back.
_PLAIN_KEYS = frozenset(
    "arcee aria_text bitnet ernie4_5 ernie4_5_moe gemma gemma2 glm glm4 gpt_neox gpt_oss granite "
    "granitemoe granitemoeshared helium hyperclovax llama ministral ministral3 mistral mixtral "
    "nemotron olmo phi3 qwen2 qwen2_moe seed_oss solar_open starcoder2 vaultgemma".split()
)
_NORMED_KEYS = frozenset(
    "apertus dots1 flex_olmo gemma3_text hy_v3 minimax_m2 olmo2 olmo3 olmoe qwen3 qwen3_moe".split()
)
_SWITCHED_KEYS = {
    "cohere": "use_qk_norm",
    "glm4_moe": "use_qk_norm",
    **dict.fromkeys(("persimmon", "phi", "stablelm"), "qk_layernorm"),
}


def decoder_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the text decoder; raises ``UnsupportedModel`` for encoder-decoder models."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            "encoder_decoder", "an encoder-decoder model's cache cannot be translated"
        )
    decoder: PretrainedConfig = config.get_text_config(decoder=True)
    return decoder


def attention_kinds(config: PretrainedConfig) -> tuple[str, ...]:
    """``("full",) * L`` for a decoder config; raises ``UnsupportedModel`` for any other kind.

    Reasons: ``mla``, ``recurrent``, ``linear_attention``, ``sliding_window``,
    ``chunked_attention``, ``sparse_attention``, ``shared_kv``, ``layers_without_rope``,
    ``unknown_attention``.
    """
    if getattr(config, "kv_lora_rank", None):
        _refuse("mla", "keys and values are stored as one latent vector")
    if getattr(config, "num_attention_heads", None) is None:
        _refuse("recurrent", "the model has no attention heads")
    for index, kind in enumerate(_layer_types(config)):
        if kind != "full_attention":
            _refuse(_reason(kind, config), f"layer {index} is not full attention")
    if _shares_layers(config):
        _refuse("shared_kv", "some layers have no keys and values of their own")
    if not all(getattr(config, "no_rope_layers", None) or [1]):
        _refuse("layers_without_rope", "some layers have no rotary embedding")
    return ("full",) * int(config.num_hidden_layers)


def key_norm(config: PretrainedConfig) -> bool:
    """Whether keys pass a norm before they are rotated.

    Raises ``UnsupportedModel`` (``unknown_architecture``) for a family that is not known here.
    """
    family = config.model_type
    if family in _SWITCHED_KEYS:
        return bool(getattr(config, _SWITCHED_KEYS[family]))
    if family not in _PLAIN_KEYS | _NORMED_KEYS:
        _refuse("unknown_architecture", "this family is not known")
    return family in _NORMED_KEYS


def head_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """(H, D) of a decoder config: kv heads (as many as heads unless stated) and head dim."""
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(kv_heads), int(head_dim)


def _layer_types(config: PretrainedConfig) -> list[str]:
    declared: list[str] | None = getattr(config, "layer_types", None)
    if declared:
        return declared
    # The rule of transformers' own DynamicCache for a config without layer types.
    kind = "full_attention"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        kind = "sliding_attention"
    elif getattr(config, "attention_chunk_size", None):
        kind = "chunked_attention"
    return [kind] * int(config.num_hidden_layers)


def _reason(kind: str, config: PretrainedConfig) -> str:
    state_space = any(getattr(config, name, None) is not None for name in _STATE_SPACE_FIELDS)
    if kind == "linear_attention" and state_space:
        return "recurrent"
    return _REASONS.get(kind, "unknown_attention")


def _shares_layers(config: PretrainedConfig) -> bool:
    modes: Any = getattr(config, "kv_sharing_modes", None) or ()
    return bool(getattr(config, "num_kv_shared_layers", 0)) or "reuse" in modes


def _refuse(reason: str, why: str) -> NoReturn:
    raise UnsupportedModel(reason, f"this model's cache cannot be translated: {why}")
