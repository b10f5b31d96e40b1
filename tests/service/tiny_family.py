"""A family like the embedded one, small enough to be fitted while the tests run.

Two Qwen3 models with random weights, on disk, where each large layer is a small one (the even ones)
or does next to nothing (the odd ones), so that a linear map can translate; text that nobody wrote;
and the mappers of both directions, made by ``kvt fit`` itself.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

import mappers.demo
from service.cli import app

TOKENS = 128
DOCUMENTS = 30
SYLLABLES = [consonant + vowel for consonant in "bcdfghklmnprstvw" for vowel in "aeiou"]
FIT = """\
windows: 24
window-tokens: 160
stride: 1
documents: 30
lengths: [128]
native-tails: [1, 32]
k: 2
"""


def family(factory: pytest.TempPathFactory) -> Path:
    """The folder, made by the first test that asks for it."""
    folder = factory.getbasetemp() / "family"
    # Tiny tensors: more threads only wait for each other, above all on a busy machine.
    torch.set_num_threads(1)
    if not (folder / "artifacts").exists():
        folder.mkdir(exist_ok=True)
        save_models(folder)
        save_texts(folder / "text")
        (folder / "fit.yaml").write_text(FIT)
        for source, target in (("small", "large"), ("large", "small")):
            fitted = CliRunner().invoke(app, fit_arguments(folder, source, target))
            assert fitted.exit_code == 0, fitted.output
    return folder


def fit_arguments(folder: Path, source: str, target: str, root: str = "artifacts") -> list[str]:
    """The command line of ``kvt fit`` for one direction."""
    text = folder / "text"
    options = {
        "--config": folder / "fit.yaml",
        "--source": folder / source,
        "--target": folder / target,
        "--calibration": text / "calibration.jsonl",
        "--held-out": f"in_domain={text / 'held_out.jsonl'}",
        "--root": folder / root,
    }
    return ["fit", *(str(part) for option in options.items() for part in option)]


def save_models(folder: Path) -> None:
    """``small`` of 2 layers and ``large`` of 4, with other rope_thetas, as transformers saves."""
    torch.manual_seed(11)
    small = Qwen3ForCausalLM(config(layers=2, theta=10_000.0))
    large = Qwen3ForCausalLM(config(layers=4, theta=20_000.0))
    given = small.state_dict()
    grown = {}
    for name, tensor in large.state_dict().items():
        parts = name.split(".")
        if parts[1] == "layers":
            layer, parts[2] = int(parts[2]), str(int(parts[2]) // 2)
            silent = layer % 2 and parts[-2] in ("o_proj", "down_proj")
            tensor = given[".".join(parts)] * (0.02 if silent else 1.0)
        else:
            tensor = given[name]
        grown[name] = tensor.clone()
    large.load_state_dict(grown)
    tokenizer_file = Path(mappers.demo.__file__).parent / "tokenizer.json"
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_file=str(tokenizer_file))
    for name, model in (("small", small), ("large", large)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def config(*, layers: int, theta: float) -> Qwen3Config:
    """2 kv heads x 16; weights large enough for the context to matter."""
    return Qwen3Config(
        vocab_size=4_096,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def save_texts(folder: Path) -> None:
    """Calibration texts, and two held-out texts for each of enough documents."""
    folder.mkdir(exist_ok=True)
    sources = {"calibration": 24, "held_out": 2 * DOCUMENTS}
    for seed, (name, count) in enumerate(sources.items()):
        lines = [
            json.dumps({"name": f"{name}-{number // 2}", "text": text(1000 * seed + number)})
            for number in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def text(seed: int) -> str:
    """About 200 tokens of nonsense words, with repeats so that there is something to attend to."""
    chosen = random.Random(seed)
    words = ["".join(chosen.choices(SYLLABLES, k=2)) for _ in range(12)]
    return " ".join(chosen.choices(words, k=90))
