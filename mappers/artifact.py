"""A mapper on disk: ``<root>/<mapper_id>/`` and the files in it.

==================== ==============================================================================
manifest.json        ``Manifest``: the pair, the recipe, where the mapper comes from
weights.safetensors  ``target.{layer}.{k|v}.{W|b}``: W ``[inputs, H_t * D_t]``, b ``[H_t * D_t]``;
                     ``target.{layer}.k.norm`` ``[D_t]`` where keys are put back on their norm
prefixes.safetensors ``ExactPrefixes``: the target's KV of known first tokens
profile.safetensors  ``CalibrationProfile``: what the source's caches look like; may be missing
probe.safetensors    ``ProbeQueries``: what the target's attention asks of a probe; may be missing
evidence.json        ``Evidence``: how good the translations are; may be missing, or added later
report.html          the same for people; may be missing
SHA256SUMS           digests of all of these; its own digest is the artifact's
==================== ==============================================================================

``mappers/folder.py`` says how a folder is published and verified. Shapes, dtypes and sizes follow
from the manifest and the recipe before any weight is read; whatever differs is refused.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from mappers import strict_json
from mappers.errors import ArtifactError, KVTranslatorError
from mappers.evidence import Evidence
from mappers.folder import OpenFolder, Parts, find, open_folder, publish_folder
from mappers.geometry import Geometry
from mappers.identity import shown
from mappers.manifest import Manifest, ManifestFacts, WeightsDtype, library_versions, mapper_id
from mappers.mapper import AffineMap, Heads, LayerMap, Mapper
from mappers.pages import Bytes
from mappers.prefixes import ExactPrefixes
from mappers.probe import ProbeQueries
from mappers.probe import bytes_at_most as probe_bytes_at_most
from mappers.profile import CalibrationProfile, bytes_at_most
from mappers.recipes import RECIPES, check_shapes, flops_per_token, reads_of
from mappers.tensor_file import HEADER_BYTES_AT_MOST, pack, unpack

__all__ = ["Artifact", "add_evidence", "find", "load", "load_manifest", "publish"]

MANIFEST, WEIGHTS, PREFIXES = "manifest.json", "weights.safetensors", "prefixes.safetensors"
PROFILE, PROBE = "profile.safetensors", "probe.safetensors"
EVIDENCE, REPORT = "evidence.json", "report.html"

_NORM = "target.{}.k.norm"
_NEEDED = {MANIFEST, WEIGHTS, PREFIXES}
_OPTIONAL = {PROFILE, PROBE}
_ALLOWED = _NEEDED | _OPTIONAL | {EVIDENCE, REPORT}
_MANIFEST_BYTES_AT_MOST = 16 << 20
_EVIDENCE_BYTES_AT_MOST = 256 << 20
_REPORT_BYTES_AT_MOST = 64 << 20
_WEIGHTS_DTYPES: dict[torch.dtype, WeightsDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
}


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """A verified mapper in memory; ``digest`` is ``sha256:...`` of its ``SHA256SUMS``."""

    mapper: Mapper
    manifest: Manifest
    evidence: Evidence | None
    digest: str
    profile: CalibrationProfile | None = None
    probe_queries: ProbeQueries | None = None

    @property
    def rows_an_input(self) -> float:
        """Rows of the fit for each number that a map reads; infinite where they are not known."""
        facts = self.manifest.calibration
        inputs = max(affine.weight.shape[0] for _, affine in self.mapper.affine_maps())
        return math.inf if facts is None else facts.rows / inputs


def publish(
    root: Path,
    mapper: Mapper,
    facts: ManifestFacts,
    evidence: Evidence | None = None,
    report_html: str | None = None,
    *,
    profile: CalibrationProfile | None = None,
    probe_queries: ProbeQueries | None = None,
) -> Path:
    """Write a mapper as ``<root>/<mapper_id>``, replacing an older one of that id; the folder.

    Raises ``LayoutError`` for weights that the recipe would not have, and ``ArtifactError`` for
    weights that are not finite or not of one dtype, and when the disk refuses.
    """
    check_shapes(mapper)
    weights = _weights(mapper)
    prefixes = dict(mapper.prefixes.tensors())
    manifest = _manifest(mapper, facts, weights, prefixes)
    files: dict[str, Parts] = {
        MANIFEST: [strict_json.dumps(manifest.model_dump(mode="json"))],
        WEIGHTS: pack(weights),
        PREFIXES: pack(prefixes),
        **({} if profile is None else {PROFILE: pack(profile.tensors())}),
        **({} if probe_queries is None else {PROBE: pack(probe_queries.tensors())}),
        **_findings(evidence, report_html),
    }
    return publish_folder(root, manifest.mapper_id, files)


def add_evidence(path: Path, evidence: Evidence, report_html: str | None = None) -> Path:
    """Publish the artifact again with this evidence and report; the mapper's bytes stay.

    Raises ``ArtifactError`` when the artifact is not intact or the disk refuses.
    """
    with open_folder(path) as folder:
        manifest = _read_manifest(folder, path)
        limits = _limits(manifest)
        names = sorted((_NEEDED | _OPTIONAL) & folder.sums.keys())
        kept = {name: [folder.read(name, at_most=limits[name])] for name in names}
    files: dict[str, Parts] = {
        **{name: [memoryview(part) for part in parts] for name, parts in kept.items()},
        **_findings(evidence, report_html),
    }
    return publish_folder(Path(os.path.abspath(path)).parent, manifest.mapper_id, files)


def load(path: Path, *, admit: Callable[[Manifest, int], None] | None = None) -> Artifact:
    """Read, verify and check an artifact; nothing of it is used before its digest was compared.

    ``admit`` is given the verified manifest and the bytes of all tensor files before any of these
    is read; what it raises ends the load. Raises ``ArtifactError`` for whatever is missing,
    altered, surplus or not what it says.
    """
    with open_folder(path) as folder:
        manifest = _read_manifest(folder, path)
        limits = _limits(manifest)
        if admit is not None:
            tensor_files = (_NEEDED | _OPTIONAL) - {MANIFEST}
            admit(manifest, sum(folder.size(name) for name in tensor_files & folder.sums.keys()))
        data = {name: folder.read(name, at_most=limits[name]) for name in sorted(folder.sums)}
        digest = folder.digest
    try:
        mapper = _mapper(manifest, unpack(data[WEIGHTS]), unpack(data[PREFIXES]))
        evidence = _evidence(data.get(EVIDENCE))
        profile = _profile(manifest, data.get(PROFILE))
        probe_queries = _probe_queries(manifest, data.get(PROBE))
    except ArtifactError:
        raise
    except KVTranslatorError as error:
        raise ArtifactError(str(error)) from error
    return Artifact(mapper, manifest, evidence, digest, profile, probe_queries)


def load_manifest(path: Path) -> Manifest:
    """The verified manifest alone, to know a mapper's pair and size before it is loaded.

    Raises ``ArtifactError`` as ``load`` does.
    """
    with open_folder(path) as folder:
        return _read_manifest(folder, path)


def matrix_elements(manifest: Manifest) -> int:
    """Numbers in all ``W`` of this manifest's mapper. Raises ``ArtifactError`` for a recipe that
    there is not."""
    shapes = _shapes(manifest).items()
    return sum(torch.Size(shape).numel() for name, shape in shapes if name.endswith(".W"))


def _manifest(
    mapper: Mapper,
    facts: ManifestFacts,
    weights: Mapping[str, Tensor],
    prefixes: Mapping[str, Tensor],
) -> Manifest:
    return Manifest(
        **dict(facts),
        mapper_id=mapper_id(mapper.source, mapper.target, mapper.recipe, facts.bundle_version),
        source=mapper.source,
        target=mapper.target,
        recipe=mapper.recipe,
        sources=tuple(layer.sources for layer in mapper.layers),
        heads=_heads(mapper),
        key_norm=mapper.layers[0].key_norm is not None,
        skipped_positions=mapper.skipped_positions,
        weights_dtype=_WEIGHTS_DTYPES[mapper.layers[0].keys.weight.dtype],
        weight_bytes=_bytes(weights),
        prefix_bytes=_bytes(prefixes),
        flops_per_token=flops_per_token(mapper),
        libraries=library_versions(),
        created_at=datetime.now(UTC).replace(microsecond=0),
    )


def _heads(mapper: Mapper) -> Any:
    chosen = [layer.heads._asdict() for layer in mapper.layers if layer.heads is not None]
    return tuple(chosen) or None


def _weights(mapper: Mapper) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, affine in mapper.affine_maps():
        tensors[f"{name}.W"], tensors[f"{name}.b"] = affine.weight, affine.bias
    norms = [layer.key_norm for layer in mapper.layers]
    if any((norm is None) != (norms[0] is None) for norm in norms):
        raise ArtifactError("all layers must have a key norm, or none")
    for index, norm in enumerate(norms):
        if norm is not None:
            tensors[_NORM.format(index)] = norm
    _check_values(tensors, mapper.layers[0].keys.weight.dtype)
    return tensors


def _check_values(tensors: Mapping[str, Tensor], weights_dtype: torch.dtype) -> None:
    for name, tensor in tensors.items():
        expected = weights_dtype if name.endswith(".W") else torch.float32
        if tensor.dtype != expected or expected not in _WEIGHTS_DTYPES:
            raise ArtifactError("weights must be all float32 or all bfloat16, and biases float32")
        if not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(f"{name} has values that are not finite")


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _findings(evidence: Evidence | None, report_html: str | None) -> dict[str, Parts]:
    files: dict[str, Parts] = {}
    if evidence is not None:
        files[EVIDENCE] = [evidence.model_dump_json().encode()]
    if report_html is not None:
        files[REPORT] = [report_html.encode()]
    return files


def _read_manifest(folder: OpenFolder, path: Path) -> Manifest:
    names = folder.sums.keys()
    if not _NEEDED <= names <= _ALLOWED:
        raise ArtifactError(
            f"expected the files {sorted(_NEEDED)} and at most {sorted(_ALLOWED - _NEEDED)}"
        )
    raw = bytes(folder.read(MANIFEST, at_most=_MANIFEST_BYTES_AT_MOST))
    try:
        strict_json.loads(raw)
        manifest = Manifest.model_validate_json(raw)
    except (strict_json.BadJSON, ValidationError, KVTranslatorError) as error:
        raise ArtifactError(f"{MANIFEST}: {_why(error)}") from error
    if manifest.mapper_id != Path(os.path.abspath(path)).name:
        raise ArtifactError(f"the folder is not named as its mapper, {manifest.mapper_id}")
    return manifest


def _why(error: Exception) -> str:
    """What is wrong, without the value that is."""
    if isinstance(error, TypeError):
        return "not of the form of the format"
    if not isinstance(error, ValidationError):
        return str(error)
    fault = error.errors(include_input=False, include_url=False, include_context=False)[0]
    return f"{shown('.'.join(str(part) for part in fault['loc']))}: {fault['msg']}"


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights that this manifest's mapper must have."""
    recipe = RECIPES.get(manifest.recipe)
    if recipe is None:
        raise ArtifactError(f"the recipe is not one of {sorted(RECIPES)}")
    geometry = Geometry.of(manifest.source, manifest.target)
    shapes: dict[str, tuple[int, ...]] = {}
    for index, sources in enumerate(manifest.sources):
        for kind, heads in zip("kv", _heads_of(manifest, index), strict=True):
            weight = recipe.weight_shape(geometry, reads_of(sources, heads))
            shapes[f"target.{index}.{kind}.W"] = weight
            shapes[f"target.{index}.{kind}.b"] = weight[1:]
        if manifest.key_norm:
            shapes[_NORM.format(index)] = (geometry.target_dim,)
    return shapes


def _heads_of(manifest: Manifest, layer: int) -> tuple[Heads | None, Heads | None]:
    """Which heads the keys and the values of a target layer read, where the recipe chooses."""
    if manifest.heads is None:
        return None, None
    reads = manifest.heads[layer]
    if not reads.keys or not reads.values:
        raise ArtifactError(f"heads: target layer {layer} reads none")
    return reads.keys, reads.values


def _limits(manifest: Manifest) -> dict[str, int]:
    """The most bytes that each file may have; compared with its size before it is read."""
    width = {"float32": 4, "bfloat16": 2}[manifest.weights_dtype]
    elements = {
        name: torch.Size(shape).numel() * (width if name.endswith(".W") else 4)
        for name, shape in _shapes(manifest).items()
    }
    if sum(elements.values()) != manifest.weight_bytes:
        raise ArtifactError("weight_bytes is not what the geometry and the recipe give")
    header = 8 + HEADER_BYTES_AT_MOST
    return {
        MANIFEST: _MANIFEST_BYTES_AT_MOST,
        WEIGHTS: manifest.weight_bytes + header,
        PREFIXES: manifest.prefix_bytes + header,
        PROFILE: bytes_at_most(manifest.source) + header,
        PROBE: probe_bytes_at_most(manifest.target) + header,
        EVIDENCE: _EVIDENCE_BYTES_AT_MOST,
        REPORT: _REPORT_BYTES_AT_MOST,
    }


def _mapper(
    manifest: Manifest, weights: Mapping[str, Tensor], prefixes: Mapping[str, Tensor]
) -> Mapper:
    shapes = _shapes(manifest)
    if weights.keys() != shapes.keys():
        raise ArtifactError("the weights are not those of the manifest's layers")
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ArtifactError(f"{name} has shape {list(weights[name].shape)}, not {list(shape)}")
    _check_values(weights, getattr(torch, manifest.weights_dtype))
    if _bytes(prefixes) != manifest.prefix_bytes:
        raise ArtifactError("prefix_bytes is not the size of the prefixes")
    table = ExactPrefixes.from_tensors(prefixes)
    target = manifest.target
    table.check_geometry(target.num_layers, target.num_kv_heads, target.head_dim)
    return Mapper(
        source=manifest.source,
        target=manifest.target,
        recipe=manifest.recipe,
        layers=tuple(_layer(manifest, weights, n) for n in range(len(manifest.sources))),
        prefixes=table,
        skipped_positions=manifest.skipped_positions,
    )


def _layer(manifest: Manifest, weights: Mapping[str, Tensor], index: int) -> LayerMap:
    keys, values = (
        AffineMap(weights[f"target.{index}.{kind}.W"], weights[f"target.{index}.{kind}.b"], heads)
        for kind, heads in zip("kv", _heads_of(manifest, index), strict=True)
    )
    norm = weights.get(_NORM.format(index))
    return LayerMap(manifest.sources[index], keys, values, norm)


def _evidence(raw: Bytes | None) -> Evidence | None:
    if raw is None:
        return None
    try:
        return Evidence.model_validate_json(bytes(raw))
    except (ValidationError, TypeError) as error:
        # TypeError: a table whose columns are no names.
        raise ArtifactError(f"{EVIDENCE}: {_why(error)}") from error


def _profile(manifest: Manifest, raw: Bytes | None) -> CalibrationProfile | None:
    return None if raw is None else CalibrationProfile.from_tensors(unpack(raw), manifest.source)


def _probe_queries(manifest: Manifest, raw: Bytes | None) -> ProbeQueries | None:
    return None if raw is None else ProbeQueries.from_tensors(unpack(raw), manifest.target)
