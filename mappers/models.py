"""Load a model with its tokenizer and its identity; the only file that does."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mappers.attention import attention_kinds, decoder_config
from mappers.cache import DTYPES
from mappers.errors import LayoutError, UnsupportedModel
from mappers.identity import ModelIdentity, tokenizer_digest, weights_digest
from mappers.quantize import ScaleScheme, Storage, StorageDtype


class ModelSpec(BaseModel):
    """Which model to load and how.

    ``path`` is a local folder or a hub id; ``name`` and ``version`` are what requests will call it
    (default: the folder's name or the hub id; the weights' digest or the hub's revision).
    ``gguf_file`` names a GGUF file inside the folder. ``drop_layers`` leaves out decoder layers,
    for a depth-pruned sibling; the version then says so. ``kv_dtype`` (``dtype`` if None), scales
    and zero points are those of the caches of the engine that runs it (``mappers/quantize.py``):
    its caches are rounded so before anything is made of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    name: str | None = None
    version: str | None = None
    revision: str | None = None
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    gguf_file: str | None = None
    drop_layers: tuple[int, ...] = Field(default=())
    kv_dtype: StorageDtype | None = None
    kv_scales: ScaleScheme = "none"
    kv_zero_points: bool = False

    @model_validator(mode="after")
    def _stored(self) -> Self:
        try:
            Storage(self.kv_dtype or self.dtype, self.kv_scales, self.kv_zero_points)
        except LayoutError as error:
            raise ValueError(str(error)) from error
        return self


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and what it is."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: ModelIdentity

    @property
    def max_position_embeddings(self) -> int:
        return self.identity.rope.max_position_embeddings


def load_model(spec: ModelSpec, *, device: str = "cpu") -> LoadedModel:
    """Load ``spec`` onto ``device``.

    Raises UnsupportedModel, with a reason: ``model_not_found``, or an attention kind whose cache
    cannot be translated, before any weight is read where the config shows it.
    """
    origin: dict[str, Any] = {"revision": spec.revision, "gguf_file": spec.gguf_file}
    origin = {key: value for key, value in origin.items() if value is not None}
    attention_kinds(decoder_config(_config(spec, origin)))
    tokenizer = AutoTokenizer.from_pretrained(spec.path, **origin)
    model = AutoModelForCausalLM.from_pretrained(spec.path, dtype=DTYPES[spec.dtype], **origin)
    if spec.drop_layers:
        drop_layers(model, spec.drop_layers)
    nn.Module.to(model, device).train(False)
    identity = ModelIdentity.from_config(
        model.config,
        model=spec.name or (Path(spec.path).name if Path(spec.path).is_dir() else spec.path),
        version=_version(spec, model),
        dtype=spec.dtype,
        kv_dtype=spec.kv_dtype,
        kv_scales=spec.kv_scales,
        kv_zero_points=spec.kv_zero_points,
        tokenizer_digest=tokenizer_digest(tokenizer),
    )
    return LoadedModel(model, tokenizer, identity)


def _config(spec: ModelSpec, origin: dict[str, Any]) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(spec.path, **origin)
    except OSError as error:
        raise UnsupportedModel(
            "model_not_found", "no model there: expected a local folder with a config, or a hub id"
        ) from error
    return config


def drop_layers(model: PreTrainedModel, dropped: Iterable[int]) -> None:
    """Leave decoder layers out of ``model``, in place, renumbering the rest for its cache.

    Raises UnsupportedModel (``layers_not_found``) for a number outside the model or a model whose
    decoder has no list of layers.
    """
    decoder: Any = model.base_model
    layers = getattr(decoder, "layers", None)
    chosen = set(dropped)
    if not isinstance(layers, nn.ModuleList) or not chosen < set(range(len(layers))):
        raise UnsupportedModel("layers_not_found", f"cannot leave out layers {sorted(chosen)}")
    kept = [index for index in range(len(layers)) if index not in chosen]
    decoder.layers = nn.ModuleList(layers[index] for index in kept)
    config = model.config.get_text_config()
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in kept]
    for number, index in enumerate(kept):
        for module in layers[index].modules():
            if hasattr(module, "layer_idx"):
                vars(module)["layer_idx"] = number


def _version(spec: ModelSpec, model: PreTrainedModel) -> str:
    version = spec.version or _digest(spec, model)
    if not spec.drop_layers:
        return version
    return f"{version}-without-layers-{'-'.join(map(str, sorted(spec.drop_layers)))}"


def _digest(spec: ModelSpec, model: PreTrainedModel) -> str:
    folder = Path(spec.path)
    if folder.is_dir():
        return weights_digest(folder / spec.gguf_file if spec.gguf_file else folder)
    commit = getattr(model.config, "_commit_hash", None)
    if not commit:
        raise UnsupportedModel("no_revision", "the hub gave no revision; name a version")
    return str(commit)
