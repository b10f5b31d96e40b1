"""What the connector must know of an engine, and the engines in which it does not start.

It is fitted to an interface that its makers call experimental and to layouts that changed between
releases, so what was not tested is refused.
"""

from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import AutoTokenizer

from mappers.cache import DTYPES
from mappers.identity import IdentityClaim, ModelIdentity, tokenizer_digest, weights_digest
from service.hf import claim_of
from service.vllm.errors import EngineRefused

TESTED_VERSIONS = ("0.32.0",)
TESTED_DEVICES = ("cpu",)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Options(BaseModel):
    """``kv_connector_extra_config``. ``version`` is the revision or weights digest that mappers
    know the model by; without it the digest of a local folder is taken."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    url: str = Field(description="The service.")
    model: str = Field(min_length=1, max_length=256, description="The model's name in mappers.")
    version: str | None = None
    socket: str | None = Field(None, description="The service's socket, if mounted elsewhere.")
    deadline_seconds: float = Field(5.0, gt=0, le=600, allow_inf_nan=False)
    lease_seconds: float = Field(
        1.0, gt=0, le=600, allow_inf_nan=False, description="The longest that an export waits."
    )
    answer_tokens: int = Field(1024, ge=1, description="Room for an answer in an export.")
    accept_untested: bool = Field(False, description="Other versions and devices; not for use.")


class Geometry(BaseModel):
    """Sizes of the whole model's cache, and of a block."""

    model_config = ConfigDict(frozen=True)

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    ranks: int
    item_bytes: int
    max_tokens: int

    def cache_bytes(self, tokens: int) -> int:
        """Keys and values of all layers and heads."""
        return 2 * self.layers * tokens * self.kv_heads * self.head_dim * self.item_bytes


def read_options(given: dict[str, Any]) -> Options:
    """Raises EngineRefused for options that are not ours; says which, not what they were."""
    try:
        return Options.model_validate(given)
    except ValidationError as error:
        places = sorted({str(fault["loc"][0]) for fault in error.errors() if fault["loc"]})
        raise EngineRefused(f"kv_connector_extra_config: {', '.join(places)}") from error


def check_engine(config: Any, groups: int, version: str, options: Options) -> None:
    """Raise EngineRefused for a vLLM whose configuration is not one that was tested."""
    parallel, cache = config.parallel_config, config.cache_config
    device = config.device_config.device_type
    untested = not options.accept_untested
    policy = config.kv_transfer_config.kv_load_failure_policy
    refused = {
        f"vLLM {version}: tested are {', '.join(TESTED_VERSIONS)}": (
            untested and version not in TESTED_VERSIONS
        ),
        f"device {device}: tested are {', '.join(TESTED_DEVICES)}": (
            untested and device not in TESTED_DEVICES
        ),
        f"kv_load_failure_policy is {policy}: it has to be recompute": policy != "recompute",
        f"cache dtype {cache.cache_dtype}: it has to be auto": cache.cache_dtype != "auto",
        "pipeline or context parallelism": max(
            parallel.pipeline_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.prefill_context_parallel_size,
        )
        > 1,
        f"{groups} groups of KV caches: one is supported": groups != 1,
        "speculative decoding": config.speculative_config is not None,
        "more ranks than kv heads": (
            config.model_config.get_total_num_kv_heads() % parallel.tensor_parallel_size != 0
        ),
    }
    for reason, holds in refused.items():
        if holds:
            raise EngineRefused(reason)


def claim_of_engine(config: Any, options: Options) -> IdentityClaim:
    """What requests say of this engine's model. Raises UnsupportedModel, or EngineRefused when
    nothing says which version it is, or the engine runs other weights than that version's."""
    model = config.model_config
    identity = ModelIdentity.from_config(
        model.hf_text_config,
        model=options.model,
        version=options.version or _version(model.model),
        dtype=dtype_name(model.dtype),
        tokenizer_digest=tokenizer_digest(AutoTokenizer.from_pretrained(model.tokenizer)),
    )
    if model.quantization not in (None, identity.quantization):
        own = identity.quantization or "not quantized"
        raise EngineRefused(f"quantization {model.quantization}: the model's own weights are {own}")
    return claim_of(identity)


def dtype_name(dtype: torch.dtype) -> Any:
    """Our name of a dtype. Raises EngineRefused."""
    name = _NAMES.get(dtype)
    if name is None:
        raise EngineRefused("a dtype that no cache has")
    return name


def geometry_of(config: Any, spec: Any) -> Geometry:
    """From vLLM's configuration and the specification of the cache of one layer."""
    model, ranks = config.model_config, config.parallel_config.tensor_parallel_size
    return Geometry(
        layers=model.hf_text_config.num_hidden_layers,
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=spec.head_size,
        block_tokens=spec.block_size,
        ranks=ranks,
        item_bytes=spec.dtype.itemsize,
        max_tokens=model.max_model_len,
    )


def _version(path: str) -> str:
    folder = Path(path)
    if not folder.is_dir():
        raise EngineRefused("kv_connector_extra_config: version is needed for a model from a hub")
    return weights_digest(folder)
