"""Engines in which the connector does not start, by vLLM's own configuration objects."""

from types import SimpleNamespace
from typing import Any

import pytest

from service.vllm.errors import EngineRefused
from tests.vllm.stack import FAMILY

pytest.importorskip("vllm", reason="only make test-vllm installs vLLM")

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs

from service.vllm_connector import KVTranslationConnector

OURS = {"url": "http://127.0.0.1:1", "model": "large"}
GROUP = SimpleNamespace(
    kv_cache_spec=SimpleNamespace(head_size=32, block_size=32, dtype=torch.float32)
)


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    arguments = EngineArgs(
        model=str(FAMILY / "large"), dtype="float32", enforce_eager=True, max_model_len=1280
    )
    return arguments.create_engine_config()


def started(config: VllmConfig, groups: int = 1, **changes: Any) -> KVTranslationConnector:
    given = {
        "kv_connector": "KVTranslationConnector",
        "kv_connector_module_path": "service.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": OURS,
    }
    config.kv_transfer_config = KVTransferConfig(**(given | changes))
    caches = SimpleNamespace(kv_cache_groups=[GROUP] * groups, num_blocks=8)
    return KVTranslationConnector(config, KVConnectorRole.SCHEDULER, caches)


def test_the_configuration_that_the_readme_names(config: VllmConfig) -> None:
    started(config).shutdown()


def test_vllms_default_policy_is_refused(config: VllmConfig) -> None:
    assert KVTransferConfig().kv_load_failure_policy == "fail"
    with pytest.raises(EngineRefused, match="recompute"):
        started(config, kv_load_failure_policy="fail")


def test_options_that_are_not_ours_are_refused(config: VllmConfig) -> None:
    with pytest.raises(EngineRefused, match="deadline"):
        started(config, kv_connector_extra_config=OURS | {"deadline": 1})


def test_several_groups_of_caches_are_refused(config: VllmConfig) -> None:
    with pytest.raises(EngineRefused, match="2 groups"):
        started(config, groups=2)


def test_another_version_is_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    with pytest.raises(EngineRefused, match=r"0\.33\.0: tested are 0\.32\.0"):
        started(config)
