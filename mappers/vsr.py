"""Mappers in the layout of vLLM Semantic Router (github.com/vllm-project/semantic-router).

``<mapper_id>/``: ``manifest.json`` (schema 1), ``weights.safetensors`` (float32,
``target.{layer}.{k|v}.{W|b}``) and ``SHA256SUMS``. That format knows full-head maps between models
of equal kv heads and head dim, one number of source layers for all target layers, and models whose
rotary embedding is plain. It has no place for the exact prefixes, the evidence, or most of an
identity: so exporting refuses what would be lost unseen, and importing asks for both identities and
gives an artifact without evidence, which a service does not serve.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from mappers import strict_json
from mappers.artifact import MANIFEST, WEIGHTS, Artifact, publish
from mappers.errors import ArtifactError, IdentityMismatch
from mappers.folder import open_folder, publish_folder
from mappers.identity import ModelIdentity, check_pair, shown
from mappers.manifest import Calibration, Manifest, ManifestFacts
from mappers.mapper import AffineMap, LayerMap, Mapper
from mappers.prefixes import ExactPrefixes
from mappers.tensor_file import HEADER_BYTES_AT_MOST, pack, unpack

_PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# Two names for one order, that of the model's own kv heads.
_HEAD_ORDER = "contiguous"
_HEAD_ORDERS = (_HEAD_ORDER, "hf")
_SKIPPED = "skipped_positions"
_MANIFEST_BYTES_AT_MOST = 1 << 20
_WIDTH = 4


class _Compatibility(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source_model: str
    source_revision: str
    target_model: str
    target_revision: str
    variant: str
    precision: str
    source_tp: int
    target_tp: int
    head_order: str
    num_kv_heads: int
    head_dim: int


class _VsrManifest(BaseModel):
    # Its readers pass over fields that they do not know, so this one does as well.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    schema_version: Literal[1] = 1
    mapper_id: str
    compatibility: _Compatibility
    topk: int = Field(ge=1)
    ridge_alpha: float = Field(ge=0)
    centered_inputs: bool
    rope_stripped_on_keys: bool
    source_layers_per_target: dict[Literal["k", "v"], dict[str, tuple[int, ...]]]
    calibration: dict[str, Any] = {}
    evaluation_report: str | None = None


def export_vsr(artifact: Artifact, root: Path, *, without_prefixes: bool = False) -> Path:
    """Write an artifact as ``<root>/<mapper_id>`` in the router's layout; the folder.

    bfloat16 weights become float32, which is exact. ``without_prefixes`` says that the exact KV of
    the first tokens, which the format cannot hold, may be left out: its reader will map those
    tokens too. Raises ``ArtifactError`` for anything else that the format cannot hold.
    """
    if len(artifact.mapper.prefixes) and not without_prefixes:
        raise _cannot_hold("exact prefixes; leave them out expressly to export the rest")
    manifest = _vsr_manifest(artifact.manifest)
    weights: dict[str, Tensor] = {}
    for name, affine in artifact.mapper.affine_maps():
        weights[f"{name}.W"], weights[f"{name}.b"] = affine.weight.float(), affine.bias
    document = strict_json.dumps(manifest.model_dump(mode="json"))
    return publish_folder(
        root, manifest.mapper_id, {MANIFEST: [memoryview(document)], WEIGHTS: pack(weights)}
    )


def import_vsr(folder: Path, root: Path, source: ModelIdentity, target: ModelIdentity) -> Path:
    """Read a mapper in the router's layout and publish it under ``root``; the new folder.

    The artifact has no evidence and no prefixes. Raises ``ArtifactError`` for a folder that is not
    intact or not of this format, ``IdentityMismatch`` when it is for other models than these two,
    and ``UnsupportedModel`` when they are no pair.
    """
    check_pair(source, target)
    with open_folder(folder) as opened:
        if opened.sums.keys() != {MANIFEST, WEIGHTS}:
            raise ArtifactError(f"expected exactly the files {MANIFEST} and {WEIGHTS}")
        manifest = _parse(bytes(opened.read(MANIFEST, at_most=_MANIFEST_BYTES_AT_MOST)))
        _check(manifest, source, target)
        limit = _weight_bytes(manifest, target) + 8 + HEADER_BYTES_AT_MOST
        weights = unpack(opened.read(WEIGHTS, at_most=limit))
    mapper = Mapper(
        source=source,
        target=target,
        recipe="full_head",
        layers=_layers(manifest, weights, source, target),
        prefixes=ExactPrefixes(),
        skipped_positions=_skipped(manifest),
    )
    return publish(root, mapper, _facts(manifest))


def _vsr_manifest(manifest: Manifest) -> _VsrManifest:
    _check_exportable(manifest)
    source, target = manifest.source, manifest.target
    layers = {str(index): sources for index, sources in enumerate(manifest.sources)}
    fitted_on = manifest.calibration
    calibration = {} if fitted_on is None else fitted_on.model_dump(mode="json", exclude_none=True)
    return _VsrManifest(
        mapper_id=manifest.mapper_id,
        compatibility=_Compatibility(
            source_model=source.model,
            source_revision=source.version,
            target_model=target.model,
            target_revision=target.version,
            variant="full_head",
            precision=_PRECISIONS[target.dtype],
            source_tp=1,
            target_tp=1,
            head_order=_HEAD_ORDER,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
        ),
        topk=len(manifest.sources[0]),
        ridge_alpha=manifest.ridge,
        centered_inputs=True,
        rope_stripped_on_keys=True,
        source_layers_per_target={"k": layers, "v": layers},
        calibration={**calibration, _SKIPPED: manifest.skipped_positions},
    )


def _check_exportable(manifest: Manifest) -> None:
    source, target = manifest.source, manifest.target
    if manifest.recipe != "full_head":
        raise _cannot_hold(f"recipe {manifest.recipe}, only full_head")
    if manifest.key_norm:
        raise _cannot_hold("keys that are put back on their norm after mapping")
    if (source.num_kv_heads, source.head_dim) != (target.num_kv_heads, target.head_dim):
        raise _cannot_hold("kv heads or head dims that differ between source and target")
    if source.dtype != target.dtype:
        raise _cannot_hold("different dtypes of source and target")
    if len({len(sources) for sources in manifest.sources}) != 1:
        raise _cannot_hold("target layers that read different numbers of source layers")
    for side in (source, target):
        rope = side.rope
        if rope.type != "default" or rope.parameters or rope.pairing != "half":
            raise _cannot_hold("rotary embeddings other than the plain one")
        if side.adapter is not None or side.quantization is not None:
            raise _cannot_hold("adapters or quantized models")
        if side.kv_dtype != side.dtype:
            raise _cannot_hold("caches stored in another dtype than the model's")


def _cannot_hold(what: str) -> ArtifactError:
    return ArtifactError(f"the Semantic Router layout cannot hold {what}")


def _parse(raw: bytes) -> _VsrManifest:
    try:
        strict_json.loads(raw)
        return _VsrManifest.model_validate_json(raw)
    except (strict_json.BadJSON, ValidationError) as error:
        raise ArtifactError(f"{MANIFEST} is not a Semantic Router manifest of schema 1") from error


def _check(manifest: _VsrManifest, source: ModelIdentity, target: ModelIdentity) -> None:
    stated = manifest.compatibility
    if stated.variant != "full_head":
        raise ArtifactError("only the variant full_head can be imported")
    if (stated.source_tp, stated.target_tp) != (1, 1) or stated.head_order not in _HEAD_ORDERS:
        raise ArtifactError("only heads in the model's own order, not split, can be imported")
    if not (manifest.centered_inputs and manifest.rope_stripped_on_keys):
        raise ArtifactError("only centred maps of keys without rotary embedding can be imported")
    for side, identity, model, revision in (
        ("source", source, stated.source_model, stated.source_revision),
        ("target", target, stated.target_model, stated.target_revision),
    ):
        for field, expected, given in (
            ("model", model, identity.model),
            ("version", revision, identity.version),
            ("dtype", stated.precision, _PRECISIONS[identity.dtype]),
            ("num_kv_heads", stated.num_kv_heads, identity.num_kv_heads),
            ("head_dim", stated.head_dim, identity.head_dim),
        ):
            if expected != given:
                raise IdentityMismatch(side, field, shown(expected), shown(given))
    _check_layers(manifest, source, target)


def _check_layers(manifest: _VsrManifest, source: ModelIdentity, target: ModelIdentity) -> None:
    selected = manifest.source_layers_per_target
    if selected.keys() != {"k", "v"} or selected["k"] != selected["v"]:
        raise ArtifactError("keys and values must read the same source layers")
    if selected["k"].keys() != {str(index) for index in range(target.num_layers)}:
        raise ArtifactError(f"expected source layers for each of {target.num_layers} target layers")
    for sources in selected["k"].values():
        if len(set(sources)) != manifest.topk or len(sources) != manifest.topk:
            raise ArtifactError(f"expected {manifest.topk} different source layers for each")
        if not all(0 <= layer < source.num_layers for layer in sources):
            raise ArtifactError(f"source layers must be 0 to {source.num_layers - 1}")


def _weight_bytes(manifest: _VsrManifest, target: ModelIdentity) -> int:
    width = target.num_kv_heads * target.head_dim
    return 2 * target.num_layers * (manifest.topk * width + 1) * width * _WIDTH


def _layers(
    manifest: _VsrManifest,
    weights: dict[str, Tensor],
    source: ModelIdentity,
    target: ModelIdentity,
) -> tuple[LayerMap, ...]:
    names = {f"target.{i}.{kind}" for i in range(target.num_layers) for kind in "kv"}
    if weights.keys() != {f"{name}.{part}" for name in names for part in "Wb"}:
        raise ArtifactError("the weights are not those of the manifest's layers")
    width = source.num_kv_heads * source.head_dim
    for name in names:
        _check_shape(weights[f"{name}.W"], (manifest.topk * width, width))
        _check_shape(weights[f"{name}.b"], (width,))
    selected = manifest.source_layers_per_target["k"]
    return tuple(
        LayerMap(
            tuple(sorted(selected[str(index)])),
            keys=_affine(weights, f"target.{index}.k", selected[str(index)]),
            values=_affine(weights, f"target.{index}.v", selected[str(index)]),
        )
        for index in range(target.num_layers)
    )


def _check_shape(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
        raise ArtifactError(f"a weight is not float32 {list(shape)}")


def _affine(weights: dict[str, Tensor], name: str, sources: tuple[int, ...]) -> AffineMap:
    """The map with its rows in ascending order of the source layers, as ours are."""
    blocks = weights[f"{name}.W"].chunk(len(sources))
    order = sorted(range(len(sources)), key=lambda index: sources[index])
    return AffineMap(torch.cat([blocks[index] for index in order]), weights[f"{name}.b"])


def _skipped(manifest: _VsrManifest) -> int:
    stated = manifest.calibration.get(_SKIPPED)
    return stated if type(stated) is int and stated >= 0 else 0


def _facts(manifest: _VsrManifest) -> ManifestFacts:
    stated = {name: value for name, value in manifest.calibration.items() if name != _SKIPPED}
    try:
        calibration = Calibration.model_validate_json(strict_json.dumps(stated))
    except ValidationError:
        # Any content is allowed there; what is not in our terms is not carried over.
        calibration = None
    return ManifestFacts(ridge=manifest.ridge_alpha, calibration=calibration)
