"""The stack, started once: all processes at the same time."""

import json
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from tokenizers import Tokenizer

from tests.vllm.asking import export, plan
from tests.vllm.stack import FAMILY, Stack

FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> list[str]:
    """Lines that are printed at the end: what was measured and is not asserted."""
    return request.config.stash.setdefault(FIGURES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print them."""
    for line in terminalreporter.config.stash.get(FIGURES, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Everything runs and is ready. KVT_PYTHON: the interpreter of the project's environment."""
    if find_spec("vllm") is None:
        pytest.skip("only make test-vllm installs vLLM")
    folder = tmp_path_factory.mktemp("stack")
    made = Stack.of(folder, os.environ.get("KVT_PYTHON", sys.executable))
    try:
        for process in made.processes:
            process.start()
        for process in made.processes:
            process.wait_ready()
        yield made
    finally:
        for process in reversed(made.processes):
            process.stop()


@pytest.fixture(scope="session")
def texts() -> list[list[int]]:
    """Held-out texts as token ids, each long enough for any of the tests."""
    tokenizer = Tokenizer.from_file(str(FAMILY / "tokenizer.json"))
    lines = (FAMILY / "text" / "held_out.jsonl").read_text().splitlines()
    encoded = (tokenizer.encode(json.loads(line)["text"]).ids for line in lines)
    return [ids for ids in encoded if len(ids) >= 1000]


@pytest.fixture(scope="session")
def digest(stack: Stack, texts: list[list[int]]) -> str:
    """Of the mapper from small to large."""
    return plan(stack, export(stack.small, texts[0][:480]), "large").digest
