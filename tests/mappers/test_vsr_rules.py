"""A mapper folder written by the Semantic Router's published rules alone, with none of our code:
read, and translating as those rules say."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from mappers import artifact
from mappers.identity import ModelIdentity
from mappers.translate import Translator
from mappers.vsr import export_vsr, import_vsr
from tests.mappers.pairs import identity, random_cache

Floats = NDArray[np.float32]

HEADS, DIM, TOKENS = 8, 16, 11
COMMITS = ("8f4a6f1d2c3b4a5968778695a4b3c2d1e0f10213", "1b2c3d4e5f60718293a4b5c6d7e8f90123456789")
MAPPER_ID = "qwen3-14b-32b-full_head-fp16-tp1-h8-sd1e0f10213-t90123456789-b1"
# By score and not by number, as their selection gives them.
SELECTED = {"0": [3, 0, 1], "1": [1, 3, 2], "2": [2, 3, 0]}


def model(layers: int, name: str, commit: str, theta: float) -> ModelIdentity:
    plain = identity(layers, HEADS, DIM, theta=theta)
    said = {"model": name, "version": commit, "dtype": "float16", "kv_dtype": "float16"}
    return ModelIdentity.model_validate({**dict(plain), **said})


SOURCE = model(4, "Qwen/Qwen3-14B", COMMITS[0], 1e6)
TARGET = model(3, "Qwen/Qwen3-32B", COMMITS[1], 5e5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``<root>/<mapper_id>``: weights, manifest and sums as their writer puts them there."""
    made = tmp_path / "theirs" / MAPPER_ID
    made.mkdir(parents=True)
    save_file(tensors(), made / "weights.safetensors")
    document = json.dumps(manifest(), indent=2, sort_keys=True) + "\n"
    (made / "manifest.json").write_text(document)
    sums = [f"{digest(made / name)}  {name}" for name in ("manifest.json", "weights.safetensors")]
    (made / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    return made


def manifest() -> dict[str, Any]:
    return {
        "schema_version": 1,
        "mapper_id": MAPPER_ID,
        "compatibility": {
            "source_model": SOURCE.model,
            "source_revision": COMMITS[0],
            "target_model": TARGET.model,
            "target_revision": COMMITS[1],
            "variant": "full_head",
            "precision": "fp16",
            "source_tp": 1,
            "target_tp": 1,
            "head_order": "contiguous",
            "num_kv_heads": HEADS,
            "head_dim": DIM,
        },
        "topk": 3,
        "ridge_alpha": 0.01,
        "centered_inputs": True,
        "rope_stripped_on_keys": True,
        "source_layers_per_target": {"k": SELECTED, "v": SELECTED},
        "calibration": {"num_sequences": 500, "fitting_token_step": 4, "seed": 0},
        "evaluation_report": None,
    }


def tensors() -> dict[str, Floats]:
    drawn, width = np.random.default_rng(7), HEADS * DIM
    found: dict[str, Floats] = {}
    for layer in range(3):
        for channel in "kv":
            name, scale = f"target.{layer}.{channel}", (3 * width) ** -0.5
            found[f"{name}.W"] = drawn.normal(0, scale, (3 * width, width)).astype(np.float32)
            found[f"{name}.b"] = drawn.normal(0, 1, width).astype(np.float32)
    return found


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def turned(keys: NDArray[Any], theta: float, sign: int) -> NDArray[Any]:
    """Keys [T, H, D] with the plain rotary embedding of their positions put on (1) or off (-1)."""
    half = DIM // 2
    angles = np.arange(len(keys))[:, None] / theta ** (np.arange(half) / half)[None]
    cos, sin = np.cos(angles)[:, None], sign * np.sin(angles)[:, None]
    first, second = keys[..., :half], keys[..., half:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def test_it_translates_as_the_rules_say(folder: Path, tmp_path: Path) -> None:
    """Stack the selected layers in their order, all heads; W and b; keys without rotation."""
    imported = artifact.load(import_vsr(folder, tmp_path / "ours", SOURCE, TARGET))
    given = random_cache(4, TOKENS, HEADS, DIM)
    answer = Translator(imported.mapper).translate(given, dtype=torch.float32)
    held = tensors()
    keys = [turned(layer.double().numpy(), 1e6, -1) for layer in given.keys]
    values = [layer.double().numpy() for layer in given.values]
    for layer in range(3):
        for channel, source in (("k", keys), ("v", values)):
            inputs = [source[index].reshape(TOKENS, -1) for index in SELECTED[str(layer)]]
            name = f"target.{layer}.{channel}"
            mapped = np.concatenate(inputs, axis=1) @ held[f"{name}.W"] + held[f"{name}.b"]
            wanted = mapped.reshape(TOKENS, HEADS, DIM)
            if channel == "k":
                wanted = turned(wanted, 5e5, 1)
            found = (answer.keys if channel == "k" else answer.values)[layer]
            np.testing.assert_allclose(found.double().numpy(), wanted, atol=1e-4, rtol=1e-4)


def test_what_we_write_is_as_the_rules_say(folder: Path, tmp_path: Path) -> None:
    """Read back with none of our code: sums, names, shapes, and the same map."""
    imported = artifact.load(import_vsr(folder, tmp_path / "ours", SOURCE, TARGET))
    written = export_vsr(imported, tmp_path / "again")
    names = {"manifest.json", "weights.safetensors"}
    assert {path.name for path in written.iterdir()} == {*names, "SHA256SUMS"}
    lines = (written / "SHA256SUMS").read_text().splitlines()
    assert {tuple(reversed(line.split())) for line in lines} == {
        (name, digest(written / name)) for name in names
    }
    said, wanted = json.loads((written / "manifest.json").read_text()), manifest()
    assert said["mapper_id"] == written.name
    own = {"mapper_id", "calibration", "source_layers_per_target"}
    assert {k: v for k, v in said.items() if k not in own} == {
        k: v for k, v in wanted.items() if k not in own
    }
    chosen = said["source_layers_per_target"]
    assert chosen["k"] == chosen["v"] == {name: sorted(each) for name, each in SELECTED.items()}
    theirs, ours = tensors(), load_file(written / "weights.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if name.endswith(".W"):
            blocks = np.split(tensor, 3)
            tensor = np.concatenate([blocks[i] for i in np.argsort(SELECTED[name.split(".")[1]])])
        assert ours[name].dtype == np.float32
        assert np.array_equal(ours[name], tensor)
