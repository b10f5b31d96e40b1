"""``kvt bridge sglang`` against SGLang's own ``file`` backend and page hashes; no engine runs.

``make test-sglang`` runs it in an environment that has SGLang, without CUDA.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip(
    "sglang.srt.mem_cache.hicache_storage", reason="make test-sglang installs SGLang"
)

from service.cli import app
from tests.service.pair import PREFIX_IDS, cache
from tests.service.threaded import Running
from tests.sglang.engine import PAGE, Order, backend, hashes, pages, translated

TOKENS = 64


@pytest.mark.parametrize("order", ["layer_first", "page_first"])
def test_pages_of_one_model_become_those_of_the_other(
    running: Running, tmp_path: Path, order: Order
) -> None:
    source = backend(tmp_path / "source", "org/small")
    target = backend(tmp_path / "target", "org/large")
    given, ids = cache(TOKENS, seed=1), [*PREFIX_IDS, *range(100, 98 + TOKENS)]
    assert source.batch_set(hashes(ids), pages(given, order))
    options = {
        "--source": "small",
        "--target": "large",
        "--source-pages": tmp_path / "source",
        "--target-pages": tmp_path / "target",
        "--source-name": "org/small",
        "--target-name": "org/large",
        "--page-tokens": PAGE,
        "--layout": order,
        "--url": running.url,
    }
    arguments = [str(word) for pair in options.items() for word in pair]
    lines = json.dumps({"token_ids": ids}) + "\n"
    result = CliRunner().invoke(app, ["bridge", "sglang", *arguments], input=lines)
    said = [line for line in result.stdout.splitlines() if line.startswith("{")]
    answer: dict[str, Any] = json.loads(said[0])
    assert (answer["decision"], answer["tokens"]) == ("translate", TOKENS - PAGE)
    keys = hashes(ids, answer["cache_salt"])
    assert target.batch_exists(keys) == answer["tokens"] // PAGE
    for key, page in zip(keys, pages(translated(given), order), strict=False):
        found = target.get(key, torch.empty_like(page))
        assert torch.equal(found, page)
    for salt in ("", "tenant"):
        assert target.batch_exists(hashes(ids, salt)) == 0
