"""What a config says of its rotary embedding, and what is refused."""

import copy
import math
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mappers.errors import UnsupportedModel
from mappers.rope import Rope

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 131_072,
}  # head_dim 64
FIELDS: dict[str, Any] = {"theta": 10_000.0, "head_dim": 64, "max_position_embeddings": 131_072}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32_768}
LONGROPE: dict[str, Any] = {
    "short_factor": (1.0,) * 32,
    "long_factor": (4.0,) * 32,
    "original_max_position_embeddings": 4096,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
VALID: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "proportional": {"partial_rotary_factor": 0.25},
    "llama3": LLAMA3,
    "yarn": YARN,
    "longrope": LONGROPE,
}


def reason(config: Any, **how: Any) -> str:
    with pytest.raises(UnsupportedModel) as refusal:
        Rope.from_config(config, **how)
    return refusal.value.reason


def raw(model_type: str = "llama", **fields: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SHAPE, **fields}


# --- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope_type", sorted(VALID))
def test_old_and_new_spelling_say_the_same(rope_type: str) -> None:
    parameters = {k: list(v) if isinstance(v, tuple) else v for k, v in VALID[rope_type].items()}
    new = raw(rope_parameters={"rope_type": rope_type, "rope_theta": 10_000, **parameters})
    old = raw(rope_theta=10_000, rope_scaling={"type": rope_type, **parameters})
    expected = Rope(type=rope_type, **FIELDS, parameters=VALID[rope_type])  # type: ignore[arg-type]
    for spelling in (new, old):
        before = copy.deepcopy(spelling)
        assert Rope.from_config(spelling) == expected
        assert spelling == before
        config = CONFIG_MAPPING["llama"].from_dict(copy.deepcopy(spelling))
        assert Rope.from_config(config) == expected


def test_plain_rope_has_no_parameters_and_keeps_its_theta() -> None:
    rope = Rope.from_config(raw(rope_theta=5000, rope_scaling=None))
    assert (rope.type, rope.theta, rope.parameters) == ("default", 5000.0, {})
    assert (rope.head_dim, rope.rotary_dim) == (64, 64)


def test_gpt_neox_names_its_theta_and_share_otherwise() -> None:
    rope = Rope.from_config(raw("gpt_neox", rotary_emb_base=777, rotary_pct=0.5))
    assert (rope.theta, rope.rotary_dim) == (777.0, 32)


def test_a_share_that_only_the_config_class_knows_is_taken_from_it() -> None:
    assert Rope.from_config(raw("phi", rope_theta=10_000.0)).rotary_dim == 32


def test_query_scaling_of_ministral3_is_none_of_the_keys() -> None:
    stated = {"rope_type": "yarn", "rope_theta": 1e6, **YARN, "llama_4_scaling_beta": 0.1}
    assert Rope.from_config(raw("ministral3", rope_parameters=stated)).type == "yarn"


def test_parameters_of_other_types_do_nothing() -> None:
    stated = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 32}
    assert Rope.from_config(raw(rope_parameters=stated)).parameters == {"factor": 2.0}


# --- refusing -----------------------------------------------------------------------------------


def test_a_theta_is_never_assumed() -> None:
    assert LlamaConfig(**SHAPE).rope_parameters["rope_theta"] == 10_000.0  # the class's own idea
    for config in (
        raw(),
        raw(rope_theta=None),
        raw(rope_parameters={"rope_type": "default"}),
        raw(rope_theta="10000"),
        raw(rope_theta=True),
        raw(vision_config={"rope_theta": 10_000.0}),
        raw("gpt_neox", rotary_pct=0.25),
    ):
        assert reason(config) in ("missing_rope_theta", "invalid_rope_parameters")


def test_a_config_object_without_theta_is_refused() -> None:
    class Bare(PretrainedConfig):
        model_type = "llama"
        hidden_size, num_attention_heads, max_position_embeddings = 256, 4, 128

    assert reason(Bare()) == "missing_rope_theta"


def test_the_local_theta_of_gemma3_must_be_stated_too() -> None:
    gemma = raw("gemma3_text", head_dim=64, rope_theta=1e6)
    assert Rope.from_config(gemma, layer_type="full_attention").theta == 1e6
    assert reason(gemma, layer_type="sliding_attention") == "missing_rope_theta"
    stated = {**gemma, "rope_local_base_freq": 10_000.0}
    assert Rope.from_config(stated, layer_type="sliding_attention").theta == 10_000.0


@pytest.mark.parametrize(
    ("expected", "config"),
    [
        ("unknown_rope_pairing", raw("nanochat", rope_theta=1e4)),
        ("unknown_rope_pairing", {**SHAPE, "rope_theta": 1e4}),
        ("unknown_rope_type", raw(rope_theta=1e4, rope_scaling={"rope_type": "helix"})),
        ("unknown_rope_type", raw(rope_theta=1e4, rope_scaling={"rope_type": "axial"})),
        (
            "unknown_rope_parameter",
            raw(rope_theta=1e4, rope_scaling={"type": "default", "mrope_section": [8, 12, 12]}),
        ),
        ("unsupported_partial_rotary", raw(rope_theta=1e4, partial_rotary_factor=0.5)),
        ("invalid_rope_parameters", raw(rope_theta=-1.0)),
        ("invalid_rope_parameters", raw(rope_theta=math.inf)),
        ("invalid_rope_parameters", raw(rope_theta=1e4, rope_scaling={"rope_type": "yarn"})),
        ("invalid_rope_parameters", raw(rope_theta=1e4, rope_scaling=7)),
        (
            "invalid_rope_parameters",
            raw(rope_theta=1e4, rope_scaling={"rope_type": "linear", "factor": "2"}),
        ),
        (
            "invalid_rope_parameters",
            raw("phi", rope_theta=1e4, partial_rotary_factor=0.3),  # 19 of 64
        ),
    ],
)
def test_each_refusal_has_its_reason(expected: str, config: dict[str, Any]) -> None:
    assert reason(config) == expected


def test_the_reason_for_an_unknown_pairing_of_a_config_object() -> None:
    assert reason(CONFIG_MAPPING["nanochat"]()) == "unknown_rope_pairing"


# --- one spelling -------------------------------------------------------------------------------


def test_what_is_inferred_equals_what_is_stated() -> None:
    inferred = Rope(type="yarn", **FIELDS, parameters=YARN)
    stated = {
        **YARN,
        "attention_factor": 0.1 * math.log(4.0) + 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "truncate": True,
        "partial_rotary_factor": 1.0,
        "mscale": None,
    }
    assert inferred == Rope(type="yarn", **FIELDS, parameters=stated)
    assert hash(inferred) == hash(Rope(type="yarn", **FIELDS, parameters=stated))
    assert inferred != Rope(type="yarn", **FIELDS, parameters={**stated, "beta_fast": 16})
    assert inferred != Rope(type="yarn", **FIELDS, parameters={**YARN, "factor": 5.0})


def test_a_missing_factor_is_how_much_longer_the_model_is_than_its_training() -> None:
    only = {"original_max_position_embeddings": 32_768}
    assert Rope(type="yarn", **FIELDS, parameters=only) == Rope(
        type="yarn", **FIELDS, parameters=YARN
    )


@pytest.mark.parametrize("rope_type", sorted(VALID))
def test_json_round_trip_is_exact(rope_type: str) -> None:
    rope = Rope(type=rope_type, **FIELDS, parameters=VALID[rope_type])  # type: ignore[arg-type]
    assert Rope.model_validate_json(rope.model_dump_json()) == rope
    assert Rope.model_validate(rope.model_dump()) == rope


def test_neither_the_given_dict_nor_the_empty_default_is_touched() -> None:
    given = dict(YARN)
    Rope(type="yarn", **FIELDS, parameters=given)
    assert given == YARN
    assert Rope(type="proportional", **FIELDS).parameters == {"factor": 1.0}
    assert Rope(type="default", **FIELDS).parameters == {}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"type": "default", "parameters": {"factor": 2.0}}, "does not take factor"),
        ({"type": "linear"}, "needs factor"),
        ({"type": "linear", "parameters": {"factor": 0.0}}, "above 0"),
        ({"type": "linear", "parameters": {"factor": True}}, "must be a number"),
        ({"type": "default", "parameters": {"partial_rotary_factor": 1.5}}, "at most 1"),
        ({"type": "default", "parameters": {"partial_rotary_factor": 0.01}}, "must be even"),
        ({"type": "default", "head_dim": 63}, "must be even"),
        ({"type": "yarn", "parameters": {**YARN, "truncate": 1}}, "true or false"),
        ({"type": "yarn", "parameters": YARN, "theta": 1.0}, "no frequencies"),
        (
            {"type": "yarn", "parameters": {**YARN, "original_max_position_embeddings": 9.5}},
            "whole number",
        ),
        ({"type": "llama3", "parameters": {**LLAMA3, "low_freq_factor": 4.0}}, "must be above"),
        ({"type": "longrope", "parameters": {**LONGROPE, "long_factor": (1.0,)}}, "1 entries"),
        ({"type": "longrope", "parameters": {**LONGROPE, "long_factor": 4.0}}, "needs long_factor"),
        ({"type": "default", "theta": math.nan}, "theta"),
        ({"type": "axial"}, "type"),
        ({"type": "default", "base": 1e4}, "base"),
    ],
)
def test_fields_that_make_no_rope_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        Rope(**{**FIELDS, **fields})
