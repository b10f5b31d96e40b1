"""RoPE strip and apply against transformers' own rotary modules, and their properties."""

import importlib
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mappers.errors import LayoutError, UnsupportedModel
from mappers.rope import Rope, RotaryTable
from mappers.rope_frequencies import ROPE_INIT_FUNCTIONS
from mappers.rope_parameters import TAKES
from mappers.rope_spec import RopeType

POSITIONS = torch.tensor([0, 1, 4095, 131_071])
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
}  # head_dim 64
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32_768,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(32)],
    "long_factor": [1.0 + 2.0 * i for i in range(32)],
    "original_max_position_embeddings": 4096,
}
HALF_LONGROPE = {
    **LONGROPE,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0] * 16,
    "long_factor": [3.0] * 16,
}


def plain(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


# name: (model type, rope_parameters, other fields of the config)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "default": ("llama", plain(10_000.0), {}),
    "default qwen3": ("qwen3", plain(1_000_000.0), {"head_dim": 128}),
    "linear": ("llama", {**plain(10_000.0), "rope_type": "linear", "factor": 4.0}, {}),
    "dynamic, short": ("llama", {**plain(10_000.0), "rope_type": "dynamic", "factor": 2.0}, {}),
    "dynamic, long": (
        "llama",
        {**plain(10_000.0), "rope_type": "dynamic", "factor": 2.0},
        {"max_position_embeddings": 4096},
    ),
    "yarn": ("qwen3", YARN, {"head_dim": 64}),
    "yarn, attention factor": ("llama", {**YARN, "attention_factor": 1.7}, {}),
    "yarn, mscale": ("llama", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707}, {}),
    "yarn, betas": ("llama", {**YARN, "beta_fast": 20, "beta_slow": 2}, {}),
    "yarn, not truncated": ("gpt_oss", {**YARN, "truncate": False}, {"head_dim": 64}),
    "llama3": ("llama", LLAMA3, {}),
    "longrope, long": ("phi3", LONGROPE, {}),
    "longrope, short": (
        "phi3",
        {**LONGROPE, "original_max_position_embeddings": 131_072},
        {"max_position_embeddings": 262_144},
    ),
    "longrope, partial": ("phi3", HALF_LONGROPE, {}),
    "longrope, attention factor": ("phi3", {**LONGROPE, "attention_factor": 1.3}, {}),
    "proportional": (
        "llama",
        {**plain(10_000.0), "rope_type": "proportional", "partial_rotary_factor": 0.25},
        {},
    ),
    "partial": ("gpt_neox", plain(10_000.0, partial_rotary_factor=0.25), {}),
    "interleaved": ("cohere", plain(500_000.0), {}),
    "interleaved, partial": ("glm", plain(10_000.0, partial_rotary_factor=0.5), {"head_dim": 64}),
}


# where the model's own cos is laid out otherwise than twice in a row
ONE_OF_EACH_PAIR = {"gpt_oss": slice(None), "cohere": slice(0, None, 2)}


def config_of(case: str) -> PretrainedConfig:
    model_type, parameters, more = CASES[case]
    fields = {**SHAPE, "pad_token_id": 0, **more, "rope_parameters": dict(parameters)}
    if model_type == "phi3":  # it keeps this one outside of the rope parameters
        name = "original_max_position_embeddings"
        fields[name] = parameters[name]
    config: PretrainedConfig = CONFIG_MAPPING[model_type](**fields)
    return config


def transformers_rope(config: PretrainedConfig, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The model's own cos and sin at POSITIONS and its rotated keys ``[T, H, D]``."""
    name = config.model_type
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    rotary = next(value for key, value in vars(module).items() if key.endswith("RotaryEmbedding"))(
        config
    )
    cos, sin = rotary(keys, POSITIONS[None])
    batched = keys.transpose(0, 1)[None]
    _, rotated = module.apply_rotary_pos_emb(batched, batched, cos, sin)
    return cos[0], sin[0], rotated[0].transpose(0, 1)


def content_for(rope: Rope, positions: Tensor = POSITIONS, heads: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(positions), heads, rope.head_dim, generator=generator)


@pytest.mark.parametrize("case", CASES)
def test_float32_agrees_with_transformers(case: str) -> None:
    config = config_of(case)
    rope = Rope.from_config(config)
    table = RotaryTable.of(rope, POSITIONS)
    content = content_for(rope)
    cos, sin, expected = transformers_rope(config, content)
    pairs = ONE_OF_EACH_PAIR.get(config.model_type, slice(0, rope.rotary_dim // 2))
    assert torch.equal(table.cos, cos[..., pairs])
    assert torch.equal(table.sin, sin[..., pairs])
    torch.testing.assert_close(table.apply(content), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(table.strip(expected), content, rtol=0, atol=2e-6)
    assert not torch.allclose(expected[3], content[3], atol=0.5)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_agrees_with_transformers(case: str) -> None:
    config = config_of(case)
    rope = Rope.from_config(config)
    table = RotaryTable.of(rope, POSITIONS)
    content = content_for(rope).bfloat16()
    _, _, expected = transformers_rope(config, content)
    # cos, both products and their sum are rounded there, to 8 bits
    tolerance = 4 * 2**-9 * 2 * float(content.abs().max()) * table.scaling
    ours = table.apply(content.float(), out=torch.empty_like(content))
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)
    stripped = table.strip(expected)
    assert stripped.dtype == torch.float32
    torch.testing.assert_close(stripped, content.float(), rtol=0, atol=tolerance)


def test_every_rope_type_of_transformers_is_known_and_tried() -> None:
    known = {"default", *ROPE_INIT_FUNCTIONS}
    assert set(get_args(RopeType)) == known == TAKES.keys()
    assert {parameters["rope_type"] for _, parameters, _ in CASES.values()} == known


def test_yarn_nested_by_layer_type_is_read_as_transformers_reads_it() -> None:
    layers = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
    assert ROPES["yarn"] != ROPES["yarn, not truncated"]  # so that the flag would show
    nested = {"full_attention": {**YARN, "truncate": False}, "sliding_attention": plain(10_000.0)}
    config = CONFIG_MAPPING["olmo3"](**SHAPE, **layers, rope_parameters=nested)
    module = importlib.import_module("transformers.models.olmo3.modeling_olmo3")
    rotary = module.Olmo3RotaryEmbedding(config)
    rope = Rope.from_config(config, layer_type="full_attention")
    assert torch.equal(rope.frequencies()[0], rotary.full_attention_inv_freq)
    local = Rope.from_config(config, layer_type="sliding_attention")
    assert (local.type, local.theta) == ("default", 10_000.0)
    for layer_type in (None, "linear_attention"):
        with pytest.raises(UnsupportedModel) as refusal:
            Rope.from_config(config, layer_type=layer_type)
        assert refusal.value.reason == "rope_differs_by_layer"


@pytest.mark.parametrize("case", ["dynamic, long", "longrope, long"])
def test_length_chooses_the_frequencies_of_a_part(case: str) -> None:
    rope = Rope.from_config(config_of(case))
    whole = RotaryTable.of(rope, POSITIONS)
    part = RotaryTable.of(rope, POSITIONS[:2], length=131_072)
    assert torch.equal(part.cos, whole.cos[:2])
    alone = RotaryTable.of(rope, POSITIONS[:2])
    assert not torch.equal(alone.cos, whole.cos[:2])


# --- properties ---------------------------------------------------------------------------------

ROPES = {case: Rope.from_config(config_of(case)) for case in CASES}
exactly = settings(derandomize=True, deadline=None, max_examples=40)
some_positions = st.lists(st.integers(0, 2**20), min_size=1, max_size=5)


@exactly
@given(st.sampled_from(sorted(ROPES)), some_positions, st.integers(1, 3))
def test_strip_undoes_apply(case: str, positions: list[int], heads: int) -> None:
    rope, where = ROPES[case], torch.tensor(positions)
    table = RotaryTable.of(rope, where)
    content = content_for(rope, where, heads)
    torch.testing.assert_close(table.strip(table.apply(content)), content, rtol=0, atol=5e-6)


@exactly
@given(
    st.sampled_from([10_000.0, 500_000.0, 1_000_000.0]),
    st.floats(1.05, 10.0),
    st.integers(64, 131_071),
    st.sampled_from(["half", "interleaved"]),
)
def test_a_wrong_theta_does_not_strip(
    theta: float, ratio: float, position: int, pairing: Any
) -> None:
    def table(theta: float) -> RotaryTable:
        return RotaryTable.of(Rope(theta=theta, pairing=pairing, **FIELDS), where)

    where = torch.tensor([position])
    content = content_for(Rope(theta=theta, **FIELDS), where)
    wrong = table(theta * ratio).strip(table(theta).apply(content))
    assert (wrong - content).abs().max() > 0.05


def test_a_theta_wrong_by_one_shows_far_out() -> None:
    right, wrong = (
        RotaryTable.of(Rope(theta=theta, **FIELDS), POSITIONS[-1:])
        for theta in (10_000.0, 10_001.0)
    )
    content = torch.ones(1, 1, 64)
    assert (wrong.strip(right.apply(content)) - content).abs().max() > 0.05


@exactly
@given(
    st.sampled_from(sorted(ROPES)), st.integers(0, 512), st.integers(0, 512), st.integers(0, 3000)
)
def test_apply_preserves_relative_inner_products(case: str, a: int, b: int, shift: int) -> None:
    rope = ROPES[case]
    query, key = content_for(rope, torch.arange(2), 1)

    def score(shift: int) -> Tensor:
        table = RotaryTable.of(rope, torch.tensor([a, b]) + shift, length=4096)
        rotated = table.apply(torch.stack([query, key]))
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(score(0), score(shift), rtol=0, atol=2e-2)


# --- where the result is written ----------------------------------------------------------------

FIELDS: dict[str, Any] = {"type": "default", "head_dim": 64, "max_position_embeddings": 131_072}
PARTIAL = ROPES["interleaved, partial"]
SCALED = ROPES["yarn"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rope", [PARTIAL, SCALED])
def test_out_may_be_a_view_of_any_float_dtype(rope: Rope, dtype: torch.dtype) -> None:
    table, content = RotaryTable.of(rope, POSITIONS), content_for(rope)
    storage = torch.full((2, 4, 2 * rope.head_dim), 9.0, dtype=dtype)  # heads first, K beside V
    view = storage[..., : rope.head_dim].transpose(0, 1)
    assert table.apply(content, out=view) is view
    assert torch.equal(view, table.apply(content).to(dtype))
    assert (storage[..., rope.head_dim :] == 9).all()


@pytest.mark.parametrize("rope", [PARTIAL, SCALED])
def test_out_may_be_the_input(rope: Rope) -> None:
    table, content = RotaryTable.of(rope, POSITIONS), content_for(rope)
    keys = table.apply(content)
    moved = content.clone()
    assert torch.equal(table.apply(moved, out=moved), keys)
    assert torch.equal(table.strip(moved, out=moved), table.strip(keys))


def test_without_out_the_input_is_left_alone_and_the_result_is_contiguous() -> None:
    table = RotaryTable.of(SCALED, POSITIONS)
    content = content_for(SCALED).transpose(0, 1).contiguous().transpose(0, 1)
    before = content.clone()
    assert table.apply(content).is_contiguous()
    assert torch.equal(content, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_strip_reads_reduced_precision_as_it_stands(dtype: torch.dtype) -> None:
    table = RotaryTable.of(SCALED, POSITIONS)
    keys = table.apply(content_for(SCALED)).to(dtype)
    assert torch.equal(table.strip(keys), table.strip(keys.float()))


def test_partial_rotation_leaves_the_rest_bit_for_bit() -> None:
    table, content = RotaryTable.of(PARTIAL, POSITIONS), content_for(PARTIAL)
    rest = slice(PARTIAL.rotary_dim, None)
    assert PARTIAL.rotary_dim == 32
    assert torch.equal(table.apply(content)[..., rest], content[..., rest])
    assert torch.equal(table.strip(content)[..., rest], content[..., rest])


def test_slice_is_a_view_of_these_rows() -> None:
    table, content = RotaryTable.of(SCALED, POSITIONS), content_for(SCALED)
    rows = table.slice(1, 3)
    assert rows.cos.data_ptr() == table.cos[1:].data_ptr()
    assert torch.equal(rows.apply(content[1:3]), table.apply(content)[1:3])


def test_no_tokens_give_no_keys() -> None:
    for rope in (SCALED, ROPES["dynamic, long"]):
        table = RotaryTable.of(rope, torch.empty(0, dtype=torch.int64))
        assert table.strip(torch.empty(0, 2, 64)).shape == (0, 2, 64)


@pytest.mark.parametrize(
    ("keys", "out"),
    [
        (torch.zeros(3, 2, 64), None),
        (torch.zeros(4, 2, 32), None),
        (torch.zeros(4, 64), None),
        (torch.zeros(4, 2, 64, dtype=torch.int32), None),
        (torch.zeros(4, 2, 64), torch.zeros(4, 1, 64)),
        (torch.zeros(4, 2, 64), torch.zeros(4, 2, 64, dtype=torch.uint8)),
    ],
)
def test_keys_of_another_shape_are_refused(keys: Tensor, out: Tensor | None) -> None:
    table = RotaryTable.of(SCALED, POSITIONS)
    for step in (table.strip, table.apply):
        with pytest.raises(LayoutError):
            step(keys, out)


@pytest.mark.parametrize("positions", [torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2)])
def test_positions_must_be_whole_numbers_in_a_row(positions: Tensor) -> None:
    with pytest.raises(LayoutError, match="int64"):
        RotaryTable.of(SCALED, positions)
