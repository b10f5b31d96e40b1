"""The scheduler's side of the connector in vLLM's own configuration objects, without an engine."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs

from service.vllm_connector import KVTranslationConnector
from tests.vllm.stack import FAMILY

OURS: dict[str, Any] = {"url": "http://127.0.0.1:1", "model": "large"}
GROUP = SimpleNamespace(
    kv_cache_spec=SimpleNamespace(head_size=32, block_size=32, dtype=torch.float32)
)


def engine_config() -> VllmConfig:
    """Of the large model."""
    arguments = EngineArgs(
        model=str(FAMILY / "large"), dtype="float32", enforce_eager=True, max_model_len=1280
    )
    return arguments.create_engine_config()


def started(config: VllmConfig, groups: int = 1, **changes: Any) -> KVTranslationConnector:
    """As the README says, but for ``changes``."""
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
