"""A tiny pair with random weights, and what the benchmark reads of it."""

import pytest
from transformers import PreTrainedTokenizerFast

from mappers.corpus import Corpus
from tests.bench.recipe_bench.fitted import Models
from tests.bench.recipe_bench.reading import Readings, read_pair
from tests.bench.recipe_bench.sums import corpus_of
from tests.mappers.conftest import one_thread, tiny_model, tokenizer

__all__ = ["one_thread", "tokenizer"]

DOCUMENTS = 2


@pytest.fixture(scope="session")
def models(tokenizer: PreTrainedTokenizerFast) -> Models:
    source = tiny_model(tokenizer, layers=4, theta=10_000.0, seed=1)
    return Models(source, tiny_model(tokenizer, layers=3, theta=500_000.0, seed=2))


@pytest.fixture(scope="session")
def corpus(models: Models) -> Corpus:
    return corpus_of(models.target, windows=6, window_tokens=72)


@pytest.fixture(scope="session")
def readings(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Readings:
    folder = tmp_path_factory.mktemp("readings")
    return read_pair(models.source, models.target, folder, documents=DOCUMENTS)
