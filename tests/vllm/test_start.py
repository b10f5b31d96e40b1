"""Engines in which the connector does not start, by vLLM's own configuration objects."""

import pytest

from service.vllm.errors import EngineRefused

pytest.importorskip("vllm", reason="only make test-vllm installs vLLM")

from vllm.config import KVTransferConfig, VllmConfig

from tests.vllm.starting import OURS, engine_config, started


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return engine_config()


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
