"""Identities: each field decides, left-out fields mean the plain default, refusals say what."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mappers.errors import IdentityMismatch, UnsupportedModel
from mappers.identity import (
    IdentityClaim,
    ModelIdentity,
    check,
    check_pair,
    tokenizer_digest,
    weights_digest,
)

YARN = {"factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def identity(rope: dict[str, Any] | None = None, **changes: Any) -> ModelIdentity:
    """A Qwen3 of 4 layers, whose theta is not the usual one."""
    config = CONFIG_MAPPING["qwen3"](
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 250_000.0, **(rope or {})},
    )
    made = ModelIdentity.from_config(
        config, model="org/a", version="rev1", dtype="bfloat16", tokenizer_digest="sha256:t"
    )
    return ModelIdentity.model_validate({**dict(made), **changes})


def claim(**changes: Any) -> IdentityClaim:
    said = {"model": "org/a", "version": "rev1", "rope_theta": 250_000.0, "dtype": "bfloat16"}
    return IdentityClaim.model_validate({**said, **changes})


def mismatch(fitted: ModelIdentity, said: IdentityClaim) -> IdentityMismatch:
    with pytest.raises(IdentityMismatch) as error:
        check(fitted, said, "source")
    return error.value


def test_from_config_reads_every_field() -> None:
    made = identity()
    assert made.model_dump() == {
        "model": "org/a",
        "version": "rev1",
        "architecture": "qwen3",
        "num_layers": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rope": made.rope.model_dump(),
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "kv_scales": "none",
        "k_norm": True,
        "quantization": None,
        "adapter": None,
        "tokenizer_digest": "sha256:t",
        "attention": ("full",) * 4,
    }
    assert (made.rope.theta, made.rope.type) == (250_000.0, "default")


def test_json_round_trip() -> None:
    made = identity({"rope_type": "llama3", **LLAMA3})
    assert ModelIdentity.model_validate_json(made.model_dump_json()) == made


@pytest.mark.parametrize(
    ("stated", "expected"),
    [({"quant_method": "gptq"}, "gptq"), ({"bits": 4}, "unknown"), (None, None)],
)
def test_quantization_comes_from_the_config(
    stated: dict[str, Any] | None, expected: str | None
) -> None:
    config = CONFIG_MAPPING["qwen3"]()
    if stated is not None:
        config.quantization_config = stated
    made = ModelIdentity.from_config(
        config, model="a", version="1", dtype="float32", tokenizer_digest="t"
    )
    assert made.quantization == expected


def test_an_unknown_family_is_refused() -> None:
    facts = {"model": "a", "version": "1", "dtype": "float32", "tokenizer_digest": "t"}
    with pytest.raises(UnsupportedModel) as error:
        ModelIdentity.from_config(CONFIG_MAPPING["nanochat"](), **facts)
    assert error.value.reason == "unknown_architecture"


def test_a_model_without_rotary_embedding_is_refused() -> None:
    facts = {"model": "a", "version": "1", "dtype": "float32", "tokenizer_digest": "t"}
    config = CONFIG_MAPPING["qwen3"]()
    config.rope_parameters = None
    with pytest.raises(UnsupportedModel) as error:
        ModelIdentity.from_config(config, **facts)
    assert error.value.reason == "missing_rope_theta"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"attention": ("full",) * 3}, id="attention of other length"),
        pytest.param({"attention": ("sliding",) * 4}, id="another attention kind"),
        pytest.param({"head_dim": 32}, id="head dim that is not the rope's"),
        pytest.param({"kv_scales": "per_head"}, id="scales of 16 bits"),
        pytest.param({"kv_dtype": "int8"}, id="int8 without scales"),
        pytest.param({"kv_zero_points": True}, id="zero points of 16 bits"),
        pytest.param({"num_layers": 0, "attention": ()}, id="no layers"),
        pytest.param({"num_kv_heads": True}, id="bool for a number"),
        pytest.param({"num_kv_heads": "2"}, id="text for a number"),
        pytest.param({"dtype": "int8"}, id="unknown dtype"),
        pytest.param({"version": ""}, id="empty version"),
        pytest.param({"colour": "red"}, id="unknown field"),
    ],
)
def test_an_identity_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        identity(**changes)


@pytest.mark.parametrize("name", ["model", "version", "rope_theta", "dtype"])
def test_a_claim_must_say(name: str) -> None:
    said = dict(claim())
    del said[name]
    with pytest.raises(ValidationError, match=name):
        IdentityClaim.model_validate(said)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 0.0},
        {"rope_theta": -1.0},
        {"rope_theta": float("nan")},
        {"rope_theta": float("inf")},
        {"rope_theta": "10000"},
        {"rope_theta": True},
        {"rope_parameters": {"factor": "4"}},
        {"rope_parameters": {f"p{i}": 1 for i in range(33)}},
        {"model": "a" * 257},
        {"kv_dtype": "int4"},
        {"colour": "red"},
    ],
    ids=str,
)
def test_a_claim_of_another_form_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        claim(**changes)


def test_a_plain_claim_matches_a_plain_model() -> None:
    check(identity(), claim(), "source")


def test_a_full_claim_matches() -> None:
    made = identity({"rope_type": "yarn", **YARN}, adapter="lora-1")
    said = claim(
        adapter="lora-1",
        rope_type="yarn",
        rope_parameters={"factor": 4, "original_max_position_embeddings": 8192},
        architecture="qwen3",
        num_layers=4,
        num_kv_heads=2,
        head_dim=16,
        k_norm=True,
        tokenizer_digest="sha256:t",
        kv_dtype="float16",
    )
    check(made, said, "target")


def test_inferred_rope_parameters_may_be_stated_too() -> None:
    made = identity({"rope_type": "yarn", **YARN})
    inferred = {key: value for key, value in made.rope.parameters.items() if key not in YARN}
    assert "attention_factor" in inferred
    check(made, claim(rope_type="yarn", rope_parameters={**YARN, **inferred}), "source")


@pytest.mark.parametrize(
    ("field", "said", "expected", "shown"),
    [
        ("model", {"model": "org/b"}, "org/a", "org/b"),
        ("version", {"version": "rev2"}, "rev1", "rev2"),
        ("rope_theta", {"rope_theta": 250_001.0}, "250000.0", "250001.0"),
        ("dtype", {"dtype": "float16"}, "bfloat16", "float16"),
        ("quantization", {"quantization": "awq"}, "none", "awq"),
        ("adapter", {"adapter": "lora"}, "none", "lora"),
        ("kv_scales", {"kv_scales": "per_tensor"}, "none", "per_tensor"),
        ("kv_zero_points", {"kv_zero_points": True}, "false", "true"),
        ("kv_dtype", {"kv_dtype": "float8_e4m3fn"}, "bfloat16", "float8_e4m3fn"),
        ("kv_dtype", {"kv_dtype": "int8", "kv_scales": "per_head"}, "bfloat16", "int8"),
        ("rope_type", {"rope_type": "yarn", "rope_parameters": YARN}, "default", "yarn"),
        (
            "rope_parameters.partial_rotary_factor",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "none",
            "0.5",
        ),
        ("architecture", {"architecture": "llama"}, "qwen3", "llama"),
        ("num_layers", {"num_layers": 5}, "4", "5"),
        ("num_kv_heads", {"num_kv_heads": 1}, "2", "1"),
        ("head_dim", {"head_dim": 8}, "16", "8"),
        ("k_norm", {"k_norm": False}, "true", "false"),
        ("tokenizer_digest", {"tokenizer_digest": "sha256:u"}, "sha256:t", "sha256:u"),
    ],
)
def test_each_field_decides(field: str, said: dict[str, Any], expected: str, shown: str) -> None:
    error = mismatch(identity(), claim(**said))
    assert (error.side, error.field) == ("source", field)
    assert (error.expected, error.given) == (expected, shown)
    assert str(error) == f"source.{field}: the mapper was fitted for {expected}, not {shown}"


def test_every_field_of_a_claim_is_compared() -> None:
    """The cases above cover all fields, so that a new one cannot be forgotten."""
    (mark,) = test_each_field_decides.pytestmark  # type: ignore[attr-defined]
    covered = {case[0].partition(".")[0] for case in mark.args[1]}
    assert covered == IdentityClaim.model_fields.keys()


@pytest.mark.parametrize(
    ("field", "fitted"),
    [
        ("adapter", identity(adapter="lora")),
        ("quantization", identity(quantization="awq")),
        ("kv_dtype", identity(kv_dtype="float8_e5m2")),
        ("kv_dtype", identity(kv_dtype="int8", kv_scales="per_head")),
        ("rope_type", identity({"rope_type": "llama3", **LLAMA3})),
    ],
)
def test_a_field_left_out_means_its_plain_default(field: str, fitted: ModelIdentity) -> None:
    assert mismatch(fitted, claim()).field == field


def test_scaling_left_out_does_not_match_scaling() -> None:
    error = mismatch(identity({"rope_type": "yarn", **YARN}), claim(rope_type="yarn"))
    assert error.field.startswith("rope_parameters")


def test_the_parameter_that_the_request_named_is_the_one_in_the_message() -> None:
    fitted = identity({"rope_type": "yarn", **YARN})
    error = mismatch(fitted, claim(rope_type="yarn", rope_parameters={**YARN, "factor": 8.0}))
    assert (error.field, error.expected, error.given) == ("rope_parameters.factor", "4.0", "8.0")


def test_tables_are_compared_and_not_printed() -> None:
    table = [1.0] * 8
    scaling = {"short_factor": table, "original_max_position_embeddings": 8192, "factor": 4.0}
    fitted = identity({"rope_type": "longrope", "long_factor": [2.0] * 8, **scaling})
    said = {"short_factor": table, "original_max_position_embeddings": 8192, "factor": 4.0}
    good = claim(rope_type="longrope", rope_parameters={**said, "long_factor": [2.0] * 8})
    check(fitted, good, "source")
    bad = claim(rope_type="longrope", rope_parameters={**said, "long_factor": [2.0] * 7 + [3.0]})
    error = mismatch(fitted, bad)
    assert error.field == "rope_parameters.long_factor"
    assert (error.expected, error.given) == ("8 numbers", "8 numbers")


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", None])
def test_wider_storage_dtypes_are_interchangeable(kv_dtype: str | None) -> None:
    check(identity(), claim(kv_dtype=kv_dtype), "source")


def test_8_bit_storage_is_not() -> None:
    fitted = identity(kv_dtype="float8_e4m3fn", kv_scales="per_head")
    check(fitted, claim(kv_dtype="float8_e4m3fn", kv_scales="per_head"), "source")
    assert mismatch(fitted, claim(kv_dtype="float8_e5m2", kv_scales="per_head")).field == "kv_dtype"
    found = mismatch(fitted, claim(kv_dtype="float8_e4m3fn", kv_scales="per_token_head"))
    assert (found.field, found.expected, found.given) == (
        "kv_scales",
        "per_head",
        "per_token_head",
    )
    assert mismatch(fitted, claim(kv_dtype="float8_e4m3fn")).field == "kv_scales"
    assert mismatch(fitted, claim()).field == "kv_dtype"


def test_zero_points_are_compared_and_absent_where_there_are_none() -> None:
    plain = identity(kv_dtype="int8", kv_scales="per_head")
    shifted = identity(kv_dtype="int8", kv_scales="per_head", kv_zero_points=True)
    said = {"kv_dtype": "int8", "kv_scales": "per_head"}
    check(shifted, claim(**said, kv_zero_points=True), "source")
    assert mismatch(shifted, claim(**said)).field == "kv_zero_points"
    assert mismatch(plain, claim(**said, kv_zero_points=True)).field == "kv_zero_points"
    # The ids of mappers are digests of this.
    assert "kv_zero_points" not in plain.model_dump()
    assert shifted.model_dump()["kv_zero_points"] is True


HOSTILE = st.text(min_size=1, max_size=256)


@given(model=HOSTILE, version=HOSTILE, adapter=HOSTILE, name=HOSTILE)
@settings(max_examples=30, deadline=None)
def test_what_a_caller_says_is_shown_printable_and_short(
    model: str, version: str, adapter: str, name: str
) -> None:
    for said in (
        claim(model=model + "\x1b[31m"),
        claim(version=version + "\n"),
        claim(adapter=adapter + "\0"),
        claim(rope_parameters={name + "\r": 1.0}),
    ):
        message = str(mismatch(identity(), said))
        assert message.isascii()
        assert message.isprintable()
        assert len(message) < 260


@given(
    parameters=st.dictionaries(
        st.sampled_from([*LLAMA3, "attention_factor", "beta_fast", "mscale", "truncate"]),
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(), st.lists(st.floats(), max_size=9)
        ),
    ),
    rope_type=st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3", "longrope"]),
)
@settings(max_examples=60, deadline=None)
def test_any_rope_claim_ends_in_a_match_or_a_mismatch(
    parameters: dict[str, Any], rope_type: str
) -> None:
    fitted = identity({"rope_type": "llama3", **LLAMA3})
    said = claim(rope_type=rope_type, rope_parameters=parameters)
    stated = {name: value for name, value in parameters.items() if value is not None}
    if rope_type == "llama3" and stated == LLAMA3:
        check(fitted, said, "target")
    else:
        assert mismatch(fitted, said).field.startswith("rope_")


def test_a_pair_needs_one_tokenizer() -> None:
    check_pair(identity(), identity(model="org/b"))
    with pytest.raises(UnsupportedModel) as error:
        check_pair(identity(), identity(tokenizer_digest="sha256:u"))
    assert error.value.reason == "different_tokenizers"


def test_weights_digest_covers_names_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(b"one")
    (tmp_path / "model-2.safetensors").write_bytes(b"two")
    first = weights_digest(tmp_path)
    assert first.startswith("sha256:")
    assert len(first) == 71
    (tmp_path / "README.md").write_text("not a weight")
    assert weights_digest(tmp_path) == first
    (tmp_path / "model-2.safetensors").write_bytes(b"tWo")
    changed = weights_digest(tmp_path)
    (tmp_path / "model-2.safetensors").write_bytes(b"two")
    (tmp_path / "model-2.safetensors").rename(tmp_path / "model-3.safetensors")
    assert len({first, changed, weights_digest(tmp_path)}) == 3


def test_weights_digest_of_one_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    assert weights_digest(file) == weights_digest(tmp_path)


def test_weights_digest_needs_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModel) as error:
        weights_digest(tmp_path)
    assert error.value.reason == "no_weights"


def tokenizer(**changes: Any) -> PreTrainedTokenizerFast:
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}
    merges = changes.get("merges", [("a", "b"), ("b", "c")])
    backend = Tokenizer(models.BPE(vocab=changes.get("vocab", vocab), merges=merges))
    backend.pre_tokenizer = changes.get("pre_tokenizer", pre_tokenizers.Whitespace())
    if "normalizer" in changes:
        backend.normalizer = changes["normalizer"]
    backend.add_special_tokens([AddedToken(changes.get("added", "<s>"), special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(
    "changes",
    [
        {"merges": [("b", "c"), ("a", "b")]},
        {"vocab": {"b": 0, "a": 1, "c": 2, "ab": 3, "bc": 4}},
        {"pre_tokenizer": pre_tokenizers.ByteLevel()},
        {"normalizer": normalizers.Lowercase()},
        {"added": "<t>"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_tokenizer_digest_changes_with_what_decides_the_ids(changes: dict[str, Any]) -> None:
    assert tokenizer_digest(tokenizer(**changes)) != tokenizer_digest(tokenizer())


def test_tokenizer_digest_ignores_how_it_is_called(tmp_path: Path) -> None:
    used = tokenizer()
    used("a b", truncation=True, max_length=1)
    used.chat_template = "{{ messages }}"
    assert tokenizer_digest(used) == tokenizer_digest(tokenizer())


def test_tokenizer_digest_survives_saving(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer_digest(again) == tokenizer_digest(tokenizer())


def test_a_tokenizer_of_another_library_is_refused() -> None:
    with pytest.raises(UnsupportedModel) as error:
        tokenizer_digest(object())  # type: ignore[arg-type]
    assert error.value.reason == "slow_tokenizer"


def test_messages_hold_no_json_specials() -> None:
    error = mismatch(identity(), claim(model='"}{'))
    assert json.loads(json.dumps({"detail": str(error)}))["detail"] == str(error)
