"""A mapper that reads the token before, served: what the row before the first mapped one is."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from starlette.testclient import TestClient
from typer.testing import CliRunner

from mappers.mapper import AffineMap, Heads, LayerMap, Mapper
from mappers.translate import Translator
from service.app import create_app
from service.cli import app
from service.settings import Settings
from tests.service.live import SAFETENSORS
from tests.service.pair import PREFIX_IDS, cache, good, mapper, publish


def lagged() -> Mapper:
    """All heads of a target layer read a key, and two heads of the token before."""
    generator = torch.Generator().manual_seed(5)

    def affine(heads: Heads) -> AffineMap:
        weight = torch.randn(3 * 8, 2 * 8, generator=generator) / 5
        return AffineMap(weight, torch.randn(2 * 8, generator=generator), heads)

    keys, values = ((1, 12 + 0, 12 + 9),), ((2, 12 + 4, 12 + 11),)
    layers = tuple(LayerMap((0, 1, 2), affine(keys), affine(values)) for _ in range(4))
    return replace(mapper(), recipe="top_heads", layers=layers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("lagged"), lagged())


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    settings = Settings(artifacts=(folder,), shadow_rate=0)
    with TestClient(create_app(settings), raise_server_exceptions=False) as running:
        while running.get("/startupz").status_code != 200:
            pass
        yield running


@pytest.mark.parametrize(
    ("start", "first", "known"), [(0, PREFIX_IDS, True), (0, [1, 2], False), (24, [], False)]
)
def test_the_row_before_is_the_requests_own_or_its_first(
    client: TestClient, start: int, first: list[int], known: bool
) -> None:
    request = good(40, start_position=start, prefix_token_ids=list(first))
    answer = client.post("/translate", content=request.body, headers=SAFETENSORS)
    assert answer.headers["kvt-decision"] == "translate", answer.text
    tensors = safetensors.torch.load(answer.content)
    size = int.from_bytes(answer.content[:8], "little")
    receipt = json.loads(json.loads(answer.content[8 : 8 + size])["__metadata__"]["kvt"])
    prefix = lagged().prefixes.longest_match((7, 9)) if known else None
    wanted = Translator(lagged()).translate(
        cache(40, start_position=start),
        tokens=receipt["tokens"],
        prefix=prefix[1] if prefix else None,
        dtype=torch.float32,
    )
    for layer in range(4):
        assert torch.equal(tensors[f"layers.{layer}.k"], wanted.keys[layer])
        assert torch.equal(tensors[f"layers.{layer}.v"], wanted.values[layer])


def test_inspect_says_what_is_read(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(folder)]).stdout
    assert "top_heads, 3 source heads a target layer, up to 1 tokens back" in shown
