"""Loading: from a folder, and a sibling with layers left out."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mappers import hf_compat
from mappers.cache import from_hf
from mappers.errors import UnsupportedModel
from mappers.identity import weights_digest
from mappers.models import LoadedModel, ModelSpec, drop_layers, load_model

IDS = torch.arange(50, 70)[None]


@pytest.fixture
def folder(tmp_path: Path, target: LoadedModel) -> Path:
    target.model.save_pretrained(tmp_path / "tiny")
    target.tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_folder_is_loaded_with_its_digest_as_version(folder: Path, target: LoadedModel) -> None:
    loaded = load_model(ModelSpec(path=str(folder)))
    assert loaded.identity.model == "tiny"
    assert loaded.identity.version == weights_digest(folder)
    assert loaded.identity.tokenizer_digest == target.identity.tokenizer_digest
    assert not loaded.model.training
    expected, _ = hf_compat.read(target.model, IDS)
    torch.testing.assert_close(hf_compat.read(loaded.model, IDS)[0], expected)


def test_name_version_and_dtype_can_be_said(folder: Path) -> None:
    spec = ModelSpec(path=str(folder), name="ours", version="v1", dtype="bfloat16")
    loaded = load_model(spec)
    assert (loaded.identity.model, loaded.identity.version) == ("ours", "v1")
    assert loaded.identity.dtype == "bfloat16"
    assert loaded.model.dtype == torch.bfloat16


def test_dropped_layers_change_version_depth_and_numbers(folder: Path, target: LoadedModel) -> None:
    loaded = load_model(ModelSpec(path=str(folder), drop_layers=(1,)))
    assert loaded.identity.num_layers == 2
    assert loaded.identity.version == f"{weights_digest(folder)}-without-layers-1"
    logits, cache = hf_compat.read(loaded.model, IDS)
    # The same by hand: the full model with the middle layer made to add nothing.
    full = load_model(ModelSpec(path=str(folder))).model
    with torch.no_grad():
        full.model.layers[1].self_attn.o_proj.weight.zero_()
        full.model.layers[1].mlp.down_proj.weight.zero_()
    expected, whole = hf_compat.read(full, IDS)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(from_hf(cache).keys[1], from_hf(whole).keys[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dropped", [(3,), (-1,), (0, 1, 2)])
def test_layers_that_are_not_there_or_all_of_them(dropped: tuple[int, ...], folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="cannot leave out"):
        load_model(ModelSpec(path=str(folder), drop_layers=dropped))


def test_drop_layers_trims_the_layer_types() -> None:
    config = Qwen3Config(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    drop_layers(model, [0, 2])
    assert model.config.num_hidden_layers == len(model.config.layer_types) == 2


def test_a_model_that_is_not_there_is_an_error_without_its_path(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        load_model(ModelSpec(path=str(tmp_path / "nothing")))
    assert caught.value.reason == "model_not_found"
    assert "nothing" not in str(caught.value)


def test_sliding_window_models_are_refused_with_a_reason(
    tmp_path: Path, target: LoadedModel
) -> None:
    config = Qwen3Config(**{**target.model.config.to_dict(), "use_sliding_window": True})
    config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    config.sliding_window = 16
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        load_model(ModelSpec(path=str(tmp_path)))
    assert caught.value.reason == "sliding_window"
