"""Artifacts: what goes in comes out bit for bit, and everything else is refused by its cause."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mappers import artifact, strict_json
from mappers.errors import ArtifactError, LayoutError
from mappers.evidence import Arm, Evidence, EvidenceRow
from mappers.folder import NAME
from mappers.geometry import Geometry
from mappers.identity import ModelIdentity
from mappers.manifest import Calibration, Manifest, ManifestFacts, library_versions, mapper_id
from mappers.mapper import AffineMap, HeadReads, LayerMap, Mapper
from mappers.prefixes import ExactPrefixes
from mappers.recipes import RECIPES
from mappers.tensor_file import pack, unpack
from tests.mappers.pairs import identity, random_cache, reads_of_layers

SOURCE, TARGET = identity(3, 2, 8), identity(4, 2, 8, theta=500_000.0)
WEIGHTS, PREFIXES = "weights.safetensors", "prefixes.safetensors"


def affine(inputs: int, outputs: int, dtype: torch.dtype, seed: int) -> AffineMap:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(inputs, outputs, generator=generator).to(dtype)
    return AffineMap(weight, torch.randn(outputs, generator=generator))


def mapper(
    recipe: str = "full_head",
    dtype: torch.dtype = torch.float32,
    source: ModelIdentity = SOURCE,
    target: ModelIdentity = TARGET,
) -> Mapper:
    layers = []
    for index in range(target.num_layers):
        sources = (0, 2) if index % 2 else (1,)
        inputs = (
            len(sources) * source.head_dim * (source.num_kv_heads if recipe == "full_head" else 1)
        )
        outputs = target.num_kv_heads * target.head_dim
        maps = [affine(inputs, outputs, dtype, 2 * index + kind) for kind in (0, 1)]
        reads = reads_of_layers(RECIPES[recipe].structure, Geometry.of(source, target), sources)
        if isinstance(reads, HeadReads):
            maps = [replace(one, heads=heads) for one, heads in zip(maps, reads, strict=True)]
        layers.append(LayerMap(sources, *maps))
    known = {
        ids: random_cache(target.num_layers, len(ids), target.num_kv_heads, target.head_dim, seed=n)
        for n, ids in enumerate([(0,), (5,), (0, 7, 9)])
    }
    return Mapper(source, target, recipe, tuple(layers), ExactPrefixes.of(known), 1)


def facts(**changes: Any) -> ManifestFacts:
    return ManifestFacts.model_validate(
        {
            "ridge": 0.01,
            "r2_keys": torch.rand(3, 4).tolist(),
            "r2_values": torch.rand(3, 4).tolist(),
            "calibration": Calibration(corpus_digest="sha256:c", documents=2, tokens=300, rows=70),
            **changes,
        }
    )


def evidence(kl: float = 0.02) -> Evidence:
    row = EvidenceRow(
        document="d1",
        domain="chat",
        length=128,
        native_tail=1,
        prefix_known=True,
        arm=Arm.TRANSLATED,
        kl=kl,
        kl_max=kl,
        top1=0.9,
        nll=float("inf"),
    )
    return Evidence(continuation_tokens=32, corpora={"chat": "sha256:d"}, rows=(row,))


def tensors(given_mapper: Mapper) -> Iterator[tuple[str, Tensor]]:
    for name, one in given_mapper.affine_maps():
        yield f"{name}.W", one.weight
        yield f"{name}.b", one.bias
    yield from given_mapper.prefixes.tensors().items()


def assert_same(left: Mapper, right: Mapper) -> None:
    assert (left.source, left.target, left.recipe) == (right.source, right.target, right.recipe)
    for ours, theirs in zip(left.layers, right.layers, strict=True):
        assert (ours.sources, ours.heads) == (theirs.sources, theirs.heads)
    assert left.skipped_positions == right.skipped_positions
    mine, given = dict(tensors(left)), dict(tensors(right))
    assert mine.keys() == given.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == given[name].dtype
        assert torch.equal(tensor, given[name]), name


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(tmp_path: Path, recipe: str, dtype: torch.dtype) -> None:
    given_mapper = mapper(recipe, dtype)
    path = artifact.publish(tmp_path, given_mapper, facts(), evidence(), "<html></html>")
    loaded = artifact.load(path)
    assert_same(loaded.mapper, given_mapper)
    assert loaded.evidence == evidence()
    assert (path / "report.html").read_text() == "<html></html>"
    sums = (path / "SHA256SUMS").read_bytes()
    assert loaded.digest == f"sha256:{hashlib.sha256(sums).hexdigest()}"


def test_reads_of_earlier_tokens_and_a_shared_choice_are_kept(tmp_path: Path) -> None:
    own = mapper("top_heads")
    first, *others = own.layers
    reads = HeadReads(((1, 4 * 12),), ((3, 12 + 3),))  # of layer 0, 4 tokens back; of layer 1
    maps = [affine(2 * 8, 16, torch.float32, seed) for seed in (3, 4)]
    keys, values = (replace(one, heads=heads) for one, heads in zip(maps, reads, strict=True))
    given_mapper = replace(own, layers=(LayerMap((0, 1), keys, values), *others))
    loaded = artifact.load(artifact.publish(tmp_path, given_mapper, facts()))
    assert_same(loaded.mapper, given_mapper)
    assert loaded.mapper.lags == 4


def test_the_manifest_says_what_it_is(tmp_path: Path) -> None:
    said = facts(bundle_version=3)
    path = artifact.publish(tmp_path, mapper(dtype=torch.bfloat16), said)
    manifest = artifact.load(path).manifest
    assert manifest == artifact.load_manifest(path)
    assert path.name == manifest.mapper_id == mapper_id(SOURCE, TARGET, "full_head", 3)
    assert manifest.sources == ((1,), (0, 2), (1,), (0, 2))
    assert (manifest.r2_keys, manifest.r2_values) == (said.r2_keys, said.r2_values)
    assert manifest.calibration == said.calibration
    # Per layer of k sources: keys and values, k * 16 x 16 weights of 2 bytes, 16 biases of 4.
    assert manifest.weight_bytes == sum(2 * (k * 16 * 16 * 2 + 16 * 4) for k in (1, 2, 1, 2))
    assert manifest.flops_per_token == sum(2 * 2 * k * 16 * 16 for k in (1, 2, 1, 2))
    # Five known tokens in keys and values of 4 layers, and their ids.
    assert manifest.prefix_bytes == 5 * (2 * 4 * 2 * 8 * 4 + 8)
    assert manifest.libraries == library_versions()
    assert manifest.libraries.keys() >= {"python", "torch", "transformers", "safetensors"}
    assert manifest.created_at.utcoffset() is not None


def test_manifest_json_is_sorted_and_ascii(tmp_path: Path) -> None:
    raw = (artifact.publish(tmp_path, mapper(), facts()) / "manifest.json").read_bytes()
    assert raw == strict_json.dumps(json.loads(raw))


def test_safetensors_library_reads_the_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = artifact.publish(tmp_path, mapper(), facts())
    found = load_file(path / WEIGHTS)
    assert set(found) == {
        f"target.{i}.{kind}.{part}" for i in range(4) for kind in "kv" for part in "Wb"
    }
    assert torch.equal(found["target.1.v.W"], mapper().layers[1].values.weight)


def test_an_artifact_without_prefixes_and_findings(tmp_path: Path) -> None:
    path = artifact.publish(
        tmp_path, replace(mapper(), prefixes=ExactPrefixes()), ManifestFacts(ridge=0.0)
    )
    loaded = artifact.load(path)
    assert loaded.evidence is None
    assert len(loaded.mapper.prefixes) == 0
    assert loaded.manifest.calibration is None


def test_evidence_is_added_and_the_mapper_stays(tmp_path: Path) -> None:
    path = artifact.publish(tmp_path, mapper(), facts())
    before = artifact.load(path)
    kept = {name: (path / name).read_bytes() for name in ("manifest.json", WEIGHTS, PREFIXES)}
    assert artifact.add_evidence(path, evidence(), "<p>report</p>") == path
    after = artifact.load(path)
    assert before.evidence is None
    assert after.evidence == evidence()
    assert after.digest != before.digest
    assert {name: (path / name).read_bytes() for name in kept} == kept
    artifact.add_evidence(path, evidence(0.5))
    assert artifact.load(path).evidence == evidence(0.5)
    assert not (path / "report.html").exists()


def test_publishing_again_replaces(tmp_path: Path) -> None:
    first = artifact.publish(tmp_path, mapper(), facts(), evidence())
    second = artifact.publish(tmp_path, mapper(), facts(ridge=0.5))
    assert first == second
    assert artifact.load(second).manifest.ridge == 0.5
    assert artifact.load(second).evidence is None
    assert artifact.find(tmp_path) == [first]


def test_a_loaded_mapper_needs_its_files_no_longer(tmp_path: Path) -> None:
    path = artifact.publish(tmp_path, mapper(), facts())
    loaded = artifact.load(path)
    for name in (WEIGHTS, PREFIXES):
        os.truncate(path / name, 0)
    assert_same(loaded.mapper, mapper())


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = artifact.publish(tmp_path, mapper(), facts())
    monkeypatch.chdir(path)
    assert_same(artifact.load(Path()).mapper, mapper())
    assert artifact.add_evidence(Path(), evidence()) == path
    monkeypatch.chdir(tmp_path)
    assert_same(artifact.load(Path(path.name)).mapper, mapper())


def with_weight(change: Callable[[Tensor], Tensor], part: str = "weight") -> Mapper:
    good = mapper()
    layer = good.layers[2]
    keys = replace(layer.keys, **{part: change(getattr(layer.keys, part).clone())})
    return replace(good, layers=(*good.layers[:2], replace(layer, keys=keys), good.layers[3]))


def spoilt(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[3] = value
        return tensor

    return change


@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_refuses_to_publish_what_is_not_finite(tmp_path: Path, part: str, value: float) -> None:
    with pytest.raises(ArtifactError, match=r"target\.2\.k\.[Wb] has values that are not finite"):
        artifact.publish(tmp_path, with_weight(spoilt(value), part), facts())
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(with_weight(Tensor.bfloat16), id="mixed weights"),
        pytest.param(with_weight(Tensor.bfloat16, "bias"), id="bfloat16 bias"),
        pytest.param(mapper(dtype=torch.float16), id="float16"),
        pytest.param(mapper(dtype=torch.float64), id="float64"),
    ],
)
def test_refuses_to_publish_other_dtypes(tmp_path: Path, bad: Mapper) -> None:
    with pytest.raises(ArtifactError, match="all float32 or all bfloat16"):
        artifact.publish(tmp_path, bad, facts())


def test_refuses_to_publish_other_shapes(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="target layer 2"):
        artifact.publish(tmp_path, with_weight(lambda weight: weight[:-1]), facts())


def resealed(path: Path) -> None:
    """Make the sums right again, so that the digest does not hide what is wrong."""
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
        for file in sorted(path.iterdir())
        if file.name != "SHA256SUMS"
    ]
    (path / "SHA256SUMS").write_text("".join(lines))


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        document = json.loads((path / "manifest.json").read_bytes())
        change(document)
        (path / "manifest.json").write_bytes(strict_json.dumps(document))

    return damage


def replaced(old: str, new: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        text = (path / "manifest.json").read_text()
        assert old in text
        (path / "manifest.json").write_text(text.replace(old, new, 1))

    return damage


def retensored(file: str, change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        held = {
            name: t.clone() for name, t in unpack(bytearray((path / file).read_bytes())).items()
        }
        change(held)
        (path / file).write_bytes(b"".join(pack(held)))

    return damage


def narrowed(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda held: held.update({name: held[name][..., 1:].clone()})


def filled(name: str, value: float) -> Callable[[dict[str, Tensor]], Any]:
    return lambda held: held[name].view(-1)[-1:].fill_(value)


def cast(name: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], Any]:
    return lambda held: held.update({name: held[name].to(dtype)})


def other_geometry(document: dict[str, Any]) -> None:
    """A manifest of another pair, correct in itself, over these weights."""
    other = identity(3, 2, 16)
    document["source"] = other.model_dump(mode="json")
    document["mapper_id"] = mapper_id(other, TARGET, "full_head")


ID = "the one that these identities and recipe have"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "manifest: not JSON": (lambda p: (p / "manifest.json").write_text("{"), "not valid JSON"),
    "manifest: NaN": (replaced('"ridge": 0.01', '"ridge": NaN'), "NaN and infinity"),
    "manifest: a key twice": (replaced("{", '{"ridge": 1.0,'), "twice"),
    "manifest: surplus field": (edited(lambda d: d.update(colour="red")), "colour"),
    "manifest: surplus field that is not printable": (
        edited(lambda d: d.update({"\x1b[31m" + "x" * 99: 1})),
        r"\?\[31mx{59}: Extra inputs",
    ),
    "manifest: missing field": (edited(lambda d: d.pop("sources")), "sources"),
    "manifest: later schema": (edited(lambda d: d.update(schema_version=2)), "schema_version"),
    "manifest: text for a number": (edited(lambda d: d.update(ridge="0.01")), "ridge"),
    "manifest: negative ridge": (edited(lambda d: d.update(ridge=-1.0)), "ridge"),
    "manifest: another id": (edited(lambda d: d.update(mapper_id="other")), ID),
    "manifest: another version": (edited(lambda d: d["source"].update(version="2")), ID),
    "manifest: another theta": (edited(lambda d: d["target"]["rope"].update(theta=1e6)), ID),
    "manifest: another recipe": (edited(lambda d: d.update(recipe="head_local")), ID),
    "manifest: other tokenizers": (
        edited(lambda d: d["source"].update(tokenizer_digest="other")),
        "different tokenizers",
    ),
    "manifest: identity contradicts itself": (
        edited(lambda d: d["target"].update(num_layers=5)),
        "target",
    ),
    "manifest: too few sources": (edited(lambda d: d["sources"].pop()), "one entry for each"),
    "manifest: sources out of range": (
        edited(lambda d: d["sources"].__setitem__(0, [3])),
        "target layer 0",
    ),
    "manifest: sources descending": (
        edited(lambda d: d["sources"].__setitem__(1, [2, 0])),
        "target layer 1",
    ),
    "manifest: more sources": (
        edited(lambda d: d["sources"].__setitem__(0, [0, 1])),
        "weight_bytes is not what",
    ),
    "manifest: weight bytes": (
        edited(lambda d: d.update(weight_bytes=d["weight_bytes"] + 1)),
        "weight_bytes is not what",
    ),
    "manifest: weights dtype": (
        edited(lambda d: d.update(weights_dtype="bfloat16")),
        "weight_bytes is not what",
    ),
    "manifest: prefix bytes": (
        edited(lambda d: d.update(prefix_bytes=d["prefix_bytes"] - 1)),
        "prefix_bytes is not the size",
    ),
    "manifest: r2 of another shape": (edited(lambda d: d["r2_keys"].pop()), "r2: expected"),
    "manifest: time without zone": (
        edited(lambda d: d.update(created_at="2026-01-01T00:00:00")),
        "created_at",
    ),
    "manifest: huge": (
        lambda p: os.truncate(p / "manifest.json", (16 << 20) + 1),
        "more than the 16777216 expected",
    ),
    "weights: missing tensor": (
        retensored(WEIGHTS, lambda held: held.pop("target.3.v.b")),
        "not those of the manifest's layers",
    ),
    "weights: surplus tensor": (
        retensored(WEIGHTS, lambda held: held.update(extra=torch.ones(1))),
        "not those of the manifest's layers",
    ),
    "weights: another name": (
        retensored(WEIGHTS, lambda held: held.update({"target.4.k.W": held.pop("target.3.k.W")})),
        "not those of the manifest's layers",
    ),
    "weights: narrow": (
        retensored(WEIGHTS, narrowed("target.0.k.W")),
        r"target.0.k.W has shape \[16, 15\], not \[16, 16\]",
    ),
    "weights: short bias": (
        retensored(WEIGHTS, narrowed("target.0.k.b")),
        r"target.0.k.b has shape \[15\], not \[16\]",
    ),
    "weights: turned": (
        retensored(
            WEIGHTS, lambda held: held.update({"target.1.k.W": held["target.1.k.W"].T.clone()})
        ),
        r"target.1.k.W has shape \[16, 32\], not \[32, 16\]",
    ),
    "weights: another dtype": (
        retensored(WEIGHTS, cast("target.0.k.W", torch.float16)),
        "all float32 or all bfloat16",
    ),
    "weights: bfloat16 bias": (
        retensored(WEIGHTS, cast("target.0.k.b", torch.bfloat16)),
        "all float32 or all bfloat16",
    ),
    "weights: NaN": (
        retensored(WEIGHTS, filled("target.3.v.W", float("nan"))),
        "target.3.v.W has values that are not finite",
    ),
    "weights: infinite bias": (
        retensored(WEIGHTS, filled("target.3.v.b", float("inf"))),
        "target.3.v.b has values that are not finite",
    ),
    "weights: not safetensors": (
        lambda p: (p / WEIGHTS).write_bytes(b"\x80\x04K\x01."),
        "too short for its header",
    ),
    "weights: truncated": (lambda p: os.truncate(p / WEIGHTS, 4000), "need"),
    "weights: far too large": (
        lambda p: (p / WEIGHTS).write_bytes(bytes(9 << 20)),
        "weights.safetensors has 9437184 bytes, more than",
    ),
    "prefixes: missing tensor": (
        retensored(PREFIXES, lambda held: held.pop("prefix.1.0.k")),
        "prefix",
    ),
    "prefixes: a layer less": (
        retensored(
            PREFIXES,
            lambda held: [held.pop(f"prefix.{p}.3.{kind}") for p in (1, 3) for kind in "kv"],
        ),
        "prefix",
    ),
    "prefixes: NaN": (retensored(PREFIXES, filled("prefix.1.0.v", float("nan"))), "finite"),
    "prefixes: negative id": (retensored(PREFIXES, filled("prefix.1.ids", -1)), "non-negative"),
    "prefixes: far too large": (
        lambda p: (p / PREFIXES).write_bytes(bytes(9 << 20)),
        "prefixes.safetensors has 9437184 bytes, more than",
    ),
    "evidence: not evidence": (
        lambda p: (p / "evidence.json").write_text('{"rows": []}'),
        "evidence.json: ",
    ),
    "evidence: columns without names": (
        lambda p: (p / "evidence.json").write_text(
            '{"continuation_tokens": 1, "corpora": {}, "rows": {"columns": [[1]], "values": [[1]]}}'
        ),
        "evidence.json: ",
    ),
    "evidence: not JSON": (
        lambda p: (p / "evidence.json").write_text("<html>"),
        "evidence.json: ",
    ),
    "files: none of the weights": (lambda p: (p / WEIGHTS).unlink(), "expected the files"),
    "files: none of the manifest": (lambda p: (p / "manifest.json").unlink(), "expected the files"),
    "files: one that does not belong": (
        lambda p: (p / "weights.pkl").write_bytes(b"\x80\x04K\x01."),
        "expected the files",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_every_wrong_content_is_refused(tmp_path: Path, name: str) -> None:
    path = artifact.publish(tmp_path, mapper(), facts(), evidence())
    damage, message = DAMAGES[name]
    damage(path)
    resealed(path)
    with pytest.raises(ArtifactError, match=message) as error:
        artifact.load(path)
    assert str(tmp_path) not in str(error.value)
    assert "Traceback" not in str(error.value)


def test_resealing_alone_harms_nothing(tmp_path: Path) -> None:
    path = artifact.publish(tmp_path, mapper(), facts(), evidence())
    edited(lambda document: None)(path)
    retensored(WEIGHTS, lambda held: None)(path)
    resealed(path)
    assert_same(artifact.load(path).mapper, mapper())


def test_a_flipped_bit_is_refused_before_anything_is_parsed(tmp_path: Path) -> None:
    path = artifact.publish(tmp_path, mapper(), facts(), evidence(), "<html>")
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        bad = bytearray(good)
        bad[len(bad) // 2] ^= 4
        file.write_bytes(bad)
        with pytest.raises(ArtifactError, match="digest|not those|form of sha256sum"):
            artifact.load(path)
        file.write_bytes(good)
    artifact.load(path)


def test_weights_of_another_geometry_under_a_right_name(tmp_path: Path) -> None:
    path = artifact.publish(tmp_path, mapper(), facts())
    edited(other_geometry)(path)
    resealed(path)
    other = path.rename(tmp_path / mapper_id(identity(3, 2, 16), TARGET, "full_head"))
    with pytest.raises(ArtifactError, match="weight_bytes is not what the geometry"):
        artifact.load(other)


def test_a_folder_of_another_name_is_refused(tmp_path: Path) -> None:
    path = artifact.publish(tmp_path, mapper(), facts())
    with pytest.raises(ArtifactError, match="not named as its mapper"):
        artifact.load(path.rename(tmp_path / "renamed"))


def test_evidence_is_not_added_to_what_is_damaged(tmp_path: Path) -> None:
    path = artifact.publish(tmp_path, mapper(), facts())
    raw = bytearray((path / WEIGHTS).read_bytes())
    raw[-1] ^= 1
    (path / WEIGHTS).write_bytes(raw)
    with pytest.raises(ArtifactError, match="digest"):
        artifact.add_evidence(path, evidence())
    assert not (path / "evidence.json").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"version": "2"},
        {"dtype": "bfloat16"},
        {"adapter": "lora"},
        {"k_norm": False},
        {"kv_dtype": "float8_e5m2"},
    ],
    ids=str,
)
def test_the_id_changes_with_every_part_of_an_identity(change: dict[str, Any]) -> None:
    changed = ModelIdentity.model_validate({**dict(SOURCE), **change})
    ids = {
        mapper_id(SOURCE, TARGET, "full_head"),
        mapper_id(changed, TARGET, "full_head"),
        mapper_id(TARGET, SOURCE, "full_head"),
        mapper_id(SOURCE, TARGET, "head_local"),
        mapper_id(SOURCE, TARGET, "full_head", 2),
    }
    assert len(ids) == 5


def test_the_id_is_readable_and_stays() -> None:
    source = ModelIdentity.model_validate({**dict(SOURCE), "model": "Qwen/Qwen3-0.6B"})
    target = ModelIdentity.model_validate({**dict(TARGET), "model": "Qwen/Qwen3-1.7B"})
    made = mapper_id(source, target, "full_head")
    assert re.fullmatch(r"qwen3-0\.6b-to-qwen3-1\.7b-full_head-b1-[0-9a-f]{12}", made)
    assert made == mapper_id(source, target, "full_head")


@given(st.text(min_size=1, max_size=256), st.text(min_size=1, max_size=256))
@settings(max_examples=50, deadline=None)
def test_the_id_is_one_safe_path_component(source: str, target: str) -> None:
    left = ModelIdentity.model_validate({**dict(SOURCE), "model": source})
    right = ModelIdentity.model_validate({**dict(TARGET), "model": target})
    made = mapper_id(left, right, "full_head")
    assert NAME.fullmatch(made)
    assert os.path.basename(made) == made


def test_a_manifest_never_holds_nan() -> None:
    for matrix in ([[float("nan")] * 4] * 3, [[float("inf")] * 4] * 3):
        with pytest.raises(ValueError, match="finite"):
            facts(r2_keys=matrix)
    assert Manifest.model_config["allow_inf_nan"] is False
