"""The Semantic Router layout: bit for bit there and back, and what it cannot hold is refused."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mappers import artifact
from mappers.errors import ArtifactError, IdentityMismatch, UnsupportedModel
from mappers.identity import ModelIdentity
from mappers.manifest import Calibration, ManifestFacts
from mappers.mapper import AffineMap, LayerMap, Mapper
from mappers.prefixes import ExactPrefixes
from mappers.rope import Rope
from mappers.vsr import export_vsr, import_vsr
from tests.mappers.pairs import identity, random_cache

SOURCE, TARGET = identity(4, 2, 8), identity(3, 2, 8, theta=500_000.0)
WIDTH = 16


def affine(k: int, seed: int, dtype: torch.dtype = torch.float32) -> AffineMap:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(k * WIDTH, WIDTH, generator=generator)
    return AffineMap(weight.to(dtype), torch.randn(WIDTH, generator=generator))


def mapper(dtype: torch.dtype = torch.float32, **changes: Any) -> Mapper:
    layers = tuple(
        LayerMap((index, 3), affine(2, 2 * index, dtype), affine(2, 2 * index + 1, dtype))
        for index in range(3)
    )
    made = Mapper(SOURCE, TARGET, "full_head", layers, ExactPrefixes(), 4)
    return replace(made, **changes)


FACTS = ManifestFacts(
    ridge=0.01,
    calibration=Calibration(
        corpus_digest="sha256:c",
        documents=2,
        tokens=300,
        rows=70,
        document_digests=("0123456789abcdef", "fedcba9876543210"),
    ),
)


def published(root: Path, made: Mapper | None = None) -> artifact.Artifact:
    return artifact.load(artifact.publish(root, made or mapper(), FACTS))


def weights(made: Mapper) -> dict[str, Tensor]:
    named = dict(made.affine_maps())
    return {
        **{f"{name}.W": one.weight for name, one in named.items()},
        **{f"{name}.b": one.bias for name, one in named.items()},
    }


def test_there_and_back_bit_for_bit(tmp_path: Path) -> None:
    ours = published(tmp_path / "ours")
    exported = export_vsr(ours, tmp_path / "vsr")
    back = artifact.load(import_vsr(exported, tmp_path / "back", SOURCE, TARGET))
    for name, tensor in weights(ours.mapper).items():
        assert torch.equal(weights(back.mapper)[name], tensor), name
    same = {"created_at", "r2_keys", "r2_values"}
    assert back.manifest.model_dump(exclude=same) == ours.manifest.model_dump(exclude=same)
    assert back.evidence is None
    again = export_vsr(back, tmp_path / "again")
    for file in sorted(exported.iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes()


def test_the_exported_folder_has_the_router_s_form(tmp_path: Path) -> None:
    folder = export_vsr(published(tmp_path / "ours"), tmp_path)
    assert {file.name for file in folder.iterdir()} == {
        "SHA256SUMS",
        "manifest.json",
        "weights.safetensors",
    }
    layers = {"0": [0, 3], "1": [1, 3], "2": [2, 3]}
    assert json.loads((folder / "manifest.json").read_bytes()) == {
        "schema_version": 1,
        "mapper_id": folder.name,
        "compatibility": {
            "source_model": SOURCE.model,
            "source_revision": "1",
            "target_model": TARGET.model,
            "target_revision": "1",
            "variant": "full_head",
            "precision": "fp32",
            "source_tp": 1,
            "target_tp": 1,
            "head_order": "contiguous",
            "num_kv_heads": 2,
            "head_dim": 8,
        },
        "topk": 2,
        "ridge_alpha": 0.01,
        "centered_inputs": True,
        "rope_stripped_on_keys": True,
        "source_layers_per_target": {"k": layers, "v": layers},
        "calibration": {
            "corpus_digest": "sha256:c",
            "documents": 2,
            "tokens": 300,
            "rows": 70,
            "document_digests": ["0123456789abcdef", "fedcba9876543210"],
            "skipped_positions": 4,
        },
        "evaluation_report": None,
    }
    held = load_file(folder / "weights.safetensors")
    assert held.keys() == weights(mapper()).keys()
    assert all(tensor.dtype == torch.float32 for tensor in held.values())


def test_bfloat16_weights_are_widened_exactly(tmp_path: Path) -> None:
    ours = published(tmp_path / "ours", mapper(torch.bfloat16))
    held = load_file(export_vsr(ours, tmp_path) / "weights.safetensors")
    for name, tensor in weights(ours.mapper).items():
        assert torch.equal(held[name], tensor.float())
        assert torch.equal(held[name].to(tensor.dtype), tensor)


def with_identities(**changes: Any) -> Mapper:
    sides = [ModelIdentity.model_validate({**dict(side), **changes}) for side in (SOURCE, TARGET)]
    return mapper(source=sides[0], target=sides[1])


def rope(**changes: Any) -> Rope:
    plain = {"type": "default", "theta": 1e4, "head_dim": 8, "max_position_embeddings": 4096}
    return Rope.model_validate({**plain, **changes})


def local() -> Mapper:
    def narrow(one: AffineMap) -> AffineMap:
        return AffineMap(one.weight[: one.weight.shape[0] // 2], one.bias)

    layers = tuple(
        LayerMap(layer.sources, narrow(layer.keys), narrow(layer.values))
        for layer in mapper().layers
    )
    return mapper(recipe="head_local", layers=layers)


def wider_target() -> Mapper:
    target = identity(3, 4, 8)
    wide = AffineMap(torch.ones(2 * WIDTH, 32), torch.ones(32))
    return mapper(target=target, layers=(LayerMap((0, 1), wide, wide),) * 3)


def uneven() -> Mapper:
    first = LayerMap((1,), affine(1, 7), affine(1, 8))
    return mapper(layers=(first, *mapper().layers[1:]))


UNHOLDABLE: dict[str, tuple[Callable[[], Mapper], str]] = {
    "another recipe": (local, "recipe head_local"),
    "other heads": (wider_target, "kv heads or head dims"),
    "uneven layers": (uneven, "different numbers of source layers"),
    "an adapter": (lambda: with_identities(adapter="lora"), "adapters or quantized"),
    "quantized": (lambda: with_identities(quantization="awq"), "adapters or quantized"),
    "float8": (lambda: with_identities(kv_dtype="float8_e5m2"), "stored in another dtype"),
    "rope scaling": (
        lambda: with_identities(rope=rope(type="linear", parameters={"factor": 2.0})),
        "rotary embeddings other",
    ),
    "partial rope": (
        lambda: with_identities(rope=rope(parameters={"partial_rotary_factor": 0.5})),
        "rotary embeddings other",
    ),
    "interleaved rope": (
        lambda: with_identities(rope=rope(pairing="interleaved")),
        "rotary embeddings other",
    ),
    "two dtypes": (
        lambda: mapper(
            source=ModelIdentity.model_validate(
                {**dict(SOURCE), "dtype": "float16", "kv_dtype": "float16"}
            )
        ),
        "different dtypes",
    ),
}


@pytest.mark.parametrize("name", UNHOLDABLE)
def test_export_refuses_what_the_format_cannot_hold(tmp_path: Path, name: str) -> None:
    make, message = UNHOLDABLE[name]
    ours = published(tmp_path / "ours", make())
    with pytest.raises(ArtifactError, match=f"layout cannot hold .*{message}"):
        export_vsr(ours, tmp_path / "vsr")
    assert not (tmp_path / "vsr").exists()


def test_prefixes_are_left_out_only_expressly(tmp_path: Path) -> None:
    known = ExactPrefixes.of({(1,): random_cache(3, 1, 2, 8)})
    ours = published(tmp_path / "ours", mapper(prefixes=known))
    with pytest.raises(ArtifactError, match="cannot hold exact prefixes"):
        export_vsr(ours, tmp_path / "vsr")
    folder = export_vsr(ours, tmp_path / "vsr", without_prefixes=True)
    back = artifact.load(import_vsr(folder, tmp_path / "back", SOURCE, TARGET))
    assert len(back.mapper.prefixes) == 0


def foreign(root: Path, sources: dict[str, list[int]], **changes: Any) -> Path:
    """A folder as the router's own tools write it: the library's file, sums in their order."""
    folder = root / "qwen3-full_head"
    folder.mkdir(parents=True)
    exported = export_vsr(published(root / "ours"), root / "vsr")
    document = json.loads((exported / "manifest.json").read_bytes())
    document.update(source_layers_per_target={"k": sources, "v": sources}, mapper_id="x", **changes)
    (folder / "manifest.json").write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    save_file(load_file(exported / "weights.safetensors"), folder / "weights.safetensors")
    seal(folder)
    return folder


def seal(folder: Path) -> None:
    lines = [
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}"
        for name in ("manifest.json", "weights.safetensors")
    ]
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n")


def test_source_layers_in_any_order_mean_the_same_map(tmp_path: Path) -> None:
    folder = foreign(tmp_path, {"0": [3, 0], "1": [1, 3], "2": [3, 2]})
    imported = artifact.load(import_vsr(folder, tmp_path / "in", SOURCE, TARGET)).mapper
    held = load_file(folder / "weights.safetensors")
    x = {layer: torch.randn(5, WIDTH) for layer in range(4)}
    for index, stated in enumerate([(3, 0), (1, 3), (3, 2)]):
        layer = imported.layers[index]
        assert layer.sources == tuple(sorted(stated))
        theirs = torch.cat([x[j] for j in stated], dim=1) @ held[f"target.{index}.v.W"]
        ours = torch.cat([x[j] for j in layer.sources], dim=1) @ layer.values.weight
        torch.testing.assert_close(ours, theirs)


def test_a_foreign_calibration_and_unknown_fields_are_passed_over(tmp_path: Path) -> None:
    folder = foreign(
        tmp_path,
        {"0": [0, 3], "1": [1, 3], "2": [2, 3]},
        calibration={"corpus": "fineweb", "seed": 42},
        later_field={"a": 1},
    )
    manifest = artifact.load(import_vsr(folder, tmp_path / "in", SOURCE, TARGET)).manifest
    assert manifest.calibration is None
    assert manifest.skipped_positions == 0
    assert manifest.ridge == 0.01


def changed(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update(fields)


def compatibility(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["compatibility"].update(fields)


def layers(**selected: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["source_layers_per_target"].update(selected)


EVERY = {"0": [0, 3], "1": [1, 3], "2": [2, 3]}
WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "schema": (changed(schema_version=2), "not a Semantic Router manifest"),
    "missing field": (lambda document: document.pop("topk"), "not a Semantic Router manifest"),
    "text for a number": (changed(topk="2"), "not a Semantic Router manifest"),
    "unknown compatibility": (compatibility(ep=2), "not a Semantic Router manifest"),
    "variant": (compatibility(variant="per_head"), "only the variant full_head"),
    "source_tp": (compatibility(source_tp=2), "not split"),
    "target_tp": (compatibility(target_tp=8), "not split"),
    "head_order": (compatibility(head_order="interleaved"), "not split"),
    "not centred": (changed(centered_inputs=False), "only centred maps"),
    "keys as cached": (changed(rope_stripped_on_keys=False), "only centred maps"),
    "topk": (changed(topk=1), "expected 1 different source layers"),
    "keys and values differ": (layers(v={**EVERY, "0": [1, 3]}), "read the same source layers"),
    "values missing": (
        lambda document: document["source_layers_per_target"].pop("v"),
        "read the same source layers",
    ),
    "a target layer less": (
        layers(k={"0": [0, 3]}, v={"0": [0, 3]}),
        "each of 3 target layers",
    ),
    "a source layer twice": (
        layers(k={**EVERY, "0": [3, 3]}, v={**EVERY, "0": [3, 3]}),
        "expected 2 different source layers",
    ),
    "a source layer too high": (
        layers(k={**EVERY, "0": [0, 4]}, v={**EVERY, "0": [0, 4]}),
        "source layers must be 0 to 3",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_import_refuses_other_manifests(tmp_path: Path, name: str) -> None:
    folder = foreign(tmp_path, EVERY)
    change, message = WRONG[name]
    document = json.loads((folder / "manifest.json").read_bytes())
    change(document)
    (folder / "manifest.json").write_text(json.dumps(document))
    seal(folder)
    with pytest.raises(ArtifactError, match=message):
        import_vsr(folder, tmp_path / "in", SOURCE, TARGET)
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize(
    ("side", "field", "change"),
    [
        ("source", "model", {"source_model": "other\n"}),
        ("source", "version", {"source_revision": "2"}),
        ("target", "model", {"target_model": "other"}),
        ("target", "version", {"target_revision": "2"}),
        ("source", "dtype", {"precision": "fp16"}),
        ("source", "num_kv_heads", {"num_kv_heads": 4}),
        ("source", "head_dim", {"head_dim": 16}),
    ],
)
def test_import_refuses_other_models(
    tmp_path: Path, side: str, field: str, change: dict[str, Any]
) -> None:
    folder = foreign(tmp_path, EVERY)
    document = json.loads((folder / "manifest.json").read_bytes())
    document["compatibility"].update(change)
    (folder / "manifest.json").write_text(json.dumps(document))
    seal(folder)
    with pytest.raises(IdentityMismatch) as error:
        import_vsr(folder, tmp_path / "in", SOURCE, TARGET)
    assert (error.value.side, error.value.field) == (side, field)
    assert str(error.value).isprintable()


def test_import_needs_a_pair(tmp_path: Path) -> None:
    other = ModelIdentity.model_validate({**dict(SOURCE), "tokenizer_digest": "other"})
    with pytest.raises(UnsupportedModel):
        import_vsr(foreign(tmp_path, EVERY), tmp_path / "in", other, TARGET)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.pop("target.0.k.b"), "not those of the manifest"),
        (lambda held: held.update(extra=torch.ones(1)), "not those of the manifest"),
        (lambda held: held.update({"target.0.k.W": torch.ones(32, 15)}), r"float32 \[32, 16\]"),
        (lambda held: held.update({"target.0.k.b": torch.ones(15)}), r"float32 \[16\]"),
        (lambda held: held.update({"target.0.k.W": held["target.0.k.W"].half()}), "float32"),
        (lambda held: held["target.2.v.W"].fill_(float("nan")), "not finite"),
    ],
    ids=["missing", "surplus", "narrow", "short bias", "float16", "nan"],
)
def test_import_refuses_other_weights(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    folder = foreign(tmp_path, EVERY)
    held = load_file(folder / "weights.safetensors")
    held = {name: tensor.clone() for name, tensor in held.items()}
    change(held)
    save_file(held, folder / "weights.safetensors")
    seal(folder)
    with pytest.raises(ArtifactError, match=message):
        import_vsr(folder, tmp_path / "in", SOURCE, TARGET)


def test_import_verifies_the_sums_and_the_files(tmp_path: Path) -> None:
    folder = foreign(tmp_path, EVERY)
    (folder / "extra").write_text("x")
    with pytest.raises(ArtifactError, match="not those that SHA256SUMS lists"):
        import_vsr(folder, tmp_path / "in", SOURCE, TARGET)
    (folder / "extra").unlink()
    raw = bytearray((folder / "weights.safetensors").read_bytes())
    raw[-1] ^= 1
    (folder / "weights.safetensors").write_bytes(raw)
    with pytest.raises(ArtifactError, match="does not have the digest"):
        import_vsr(folder, tmp_path / "in", SOURCE, TARGET)


def test_our_own_artifacts_are_not_of_that_format(tmp_path: Path) -> None:
    path = artifact.publish(tmp_path, mapper(), FACTS)
    with pytest.raises(ArtifactError, match="expected exactly the files"):
        import_vsr(path, tmp_path / "in", SOURCE, TARGET)
