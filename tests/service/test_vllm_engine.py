"""Engines in which the connector does not start, by the configuration that vLLM hands it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import mappers.demo
from mappers.artifact import load
from mappers.errors import UnsupportedModel
from mappers.identity import check
from service.store import artifact_folders
from service.vllm.engine import (
    TESTED_VERSIONS,
    Options,
    check_engine,
    claim_of_engine,
    geometry_of,
    read_options,
)
from service.vllm.errors import EngineRefused

FAMILY = Path(mappers.demo.__file__).parent
OPTIONS = Options(url="http://127.0.0.1:1", model="large")
GOOD = {
    "parallel_config.tensor_parallel_size": 1,
    "parallel_config.pipeline_parallel_size": 1,
    "parallel_config.decode_context_parallel_size": 1,
    "parallel_config.prefill_context_parallel_size": 1,
    "cache_config.cache_dtype": "auto",
    "device_config.device_type": "cpu",
    "kv_transfer_config.kv_load_failure_policy": "recompute",
    "speculative_config": None,
}


def config(**changes: Any) -> Any:
    """vLLM's, as far as it is read; names of ``changes`` have __ for a dot."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(FAMILY / "large"),
            tokenizer=str(FAMILY / "large"),
            dtype=torch.float32,
            max_model_len=1280,
            quantization=None,
            hf_text_config=AutoConfig.from_pretrained(FAMILY / "large"),
            get_total_num_kv_heads=lambda: 4,
        )
    )
    for name, value in (GOOD | {k.replace("__", "."): v for k, v in changes.items()}).items():
        owner, _, field = name.rpartition(".")
        if owner:
            if not hasattr(made, owner):
                setattr(made, owner, SimpleNamespace())
            setattr(getattr(made, owner), field, value)
        else:
            setattr(made, name, value)
    return made


REFUSED = [
    ({"kv_transfer_config__kv_load_failure_policy": "fail"}, "recompute"),
    ({"device_config__device_type": "cuda"}, "device cuda"),
    ({"cache_config__cache_dtype": "fp8"}, "cache dtype fp8"),
    ({"parallel_config__pipeline_parallel_size": 2}, "parallelism"),
    ({"parallel_config__decode_context_parallel_size": 2}, "parallelism"),
    ({"parallel_config__tensor_parallel_size": 8}, "ranks"),
    ({"speculative_config": object()}, "speculative"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_engines_that_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineRefused, match=said):
        check_engine(config(**changes), 1, TESTED_VERSIONS[0], OPTIONS)


def test_an_engine_that_was_tested() -> None:
    check_engine(config(), 1, TESTED_VERSIONS[0], OPTIONS)
    check_engine(config(parallel_config__tensor_parallel_size=2), 1, TESTED_VERSIONS[0], OPTIONS)


@pytest.mark.parametrize("version", ["0.25.1", "0.32.0rc1", "1.0.0"])
def test_other_versions(version: str) -> None:
    with pytest.raises(EngineRefused, match=r"tested are 0\.32\.0"):
        check_engine(config(), 1, version, OPTIONS)
    check_engine(config(), 1, version, OPTIONS.model_copy(update={"accept_untested": True}))


def test_several_groups_of_caches() -> None:
    with pytest.raises(EngineRefused, match="2 groups"):
        check_engine(config(), 2, TESTED_VERSIONS[0], OPTIONS)


def test_the_claim_is_the_one_that_the_embedded_mappers_know() -> None:
    claim = claim_of_engine(config(), OPTIONS)
    targets = [load(folder).mapper.target for folder in artifact_folders([FAMILY / "artifacts"])]
    (identity,) = [target for target in targets if target.model == "large"]
    check(identity, claim, "target")
    assert claim.dtype == "float32"


def test_a_model_from_a_hub_needs_a_version() -> None:
    made = config()
    made.model_config.model = "some/model"
    with pytest.raises(EngineRefused, match="version"):
        claim_of_engine(made, OPTIONS)
    claim = claim_of_engine(made, OPTIONS.model_copy(update={"version": "abc"}))
    assert claim.version == "abc"


def test_a_model_that_cannot_be_translated() -> None:
    made = config()
    made.model_config.hf_text_config.sliding_window = 128
    made.model_config.hf_text_config.layer_types = ["sliding_attention"] * 8
    with pytest.raises(UnsupportedModel):
        claim_of_engine(made, OPTIONS)


def test_weights_that_the_engine_quantizes_are_not_those_of_the_claim() -> None:
    made = config(model_config__quantization="fp8")
    with pytest.raises(EngineRefused, match="quantization fp8: .* weights are not quantized"):
        claim_of_engine(made, OPTIONS)
    made.model_config.hf_text_config.quantization_config = {"quant_method": "fp8"}
    assert claim_of_engine(made, OPTIONS).quantization == "fp8"
    made.model_config.quantization = "awq"
    with pytest.raises(EngineRefused, match="quantization awq: .* weights are fp8"):
        claim_of_engine(made, OPTIONS)


def test_the_geometry_is_the_whole_models() -> None:
    spec = SimpleNamespace(head_size=32, block_size=64, dtype=torch.float32)
    geometry = geometry_of(config(parallel_config__tensor_parallel_size=2), spec)
    assert (geometry.layers, geometry.kv_heads, geometry.ranks) == (8, 4, 2)
    assert geometry.cache_bytes(10) == 2 * 8 * 10 * 4 * 32 * 4


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"model": "m"}, "url"),
        ({"url": "u", "model": "m", "deadline": 1.0}, "deadline"),
        ({"url": "u", "model": "m", "deadline_seconds": -1.0}, "deadline_seconds"),
    ],
)
def test_options_that_are_not_ours(given: dict[str, Any], named: str) -> None:
    with pytest.raises(EngineRefused, match=f"kv_connector_extra_config: {named}$"):
        read_options(given)
