"""A tiny pair with random weights and text to read: what the tests of the library share."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from mappers.demo import __file__ as demo_package
from mappers.identity import ModelIdentity, tokenizer_digest
from mappers.models import LoadedModel

DEMO = Path(demo_package).parent
SYLLABLES = [consonant + vowel for consonant in "bcdfghklmnprstvw" for vowel in "aeiou"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: a pool of threads costs more than it gives, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The demo family's tokenizer, which puts its end-of-text token (0) in front of a text."""
    return PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"))


def tiny_model(
    tokenizer: PreTrainedTokenizerFast, *, layers: int, theta: float, seed: int
) -> LoadedModel:
    """A Qwen3 of 2 kv heads x 16 whose weights are large enough for its context to matter."""
    config = Qwen3Config(
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
        initializer_range=0.4,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).train(False)
    identity = ModelIdentity.from_config(
        config,
        model=f"tiny-{layers}",
        version=f"seed-{seed}",
        dtype="float32",
        tokenizer_digest=tokenizer_digest(tokenizer),
    )
    return LoadedModel(model, tokenizer, identity)


@pytest.fixture(scope="session")
def source(tokenizer: PreTrainedTokenizerFast) -> LoadedModel:
    return tiny_model(tokenizer, layers=2, theta=10_000.0, seed=1)


@pytest.fixture(scope="session")
def target(tokenizer: PreTrainedTokenizerFast) -> LoadedModel:
    return tiny_model(tokenizer, layers=3, theta=500_000.0, seed=2)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with 12 text files of about 300 tokens, no two alike."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        syllables = random.Random(number).choices(SYLLABLES, k=300)
        words = ["".join(syllables[i : i + 2]) for i in range(0, 300, 2)]
        (folder / f"{number:02d}.txt").write_text(" ".join(words))
    return folder
