"""``kvt bridge sglang`` against SGLang's own ``file`` backend and page hashes; no engine runs.

``make test-sglang`` runs it in an environment that has SGLang, without CUDA.
"""

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip(
    "sglang.srt.mem_cache.hicache_storage", reason="make test-sglang installs SGLang"
)

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.utils import get_storage_hash_str

from mappers.cache import KVCache
from mappers.translate import Translator
from service.cli import app
from service.settings import Settings
from tests.service.pair import PREFIX_IDS, cache, mapper, publish
from tests.service.threaded import Running, serving

TOKENS, PAGE = 64, 16
Order = Literal["layer_first", "page_first"]


class Key:
    """What SGLang hashes of a request (its RadixKey needs a GPU's packages)."""

    extra_key = None

    def __init__(self, ids: list[int], salt: str) -> None:
        self.token_ids, self.cache_salt = array("q", ids), salt or None

    def __len__(self) -> int:
        return len(self.token_ids)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("artifacts")
    publish(root)
    with serving(Settings(artifacts=(root,), shadow_rate=0)) as found:
        yield found


def backend(folder: Path, model: str) -> HiCacheFile:
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=model,
    )
    return HiCacheFile(config, file_path=str(folder))


def hashes(ids: list[int], salt: str = "") -> list[str]:
    found: list[str] = get_storage_hash_str(Key(ids, salt), None, page_size=PAGE)
    return found


def pages(given: KVCache, order: Order) -> list[Tensor]:
    """Flat, as the engine's host pool hands them to its storage."""
    states = torch.stack((torch.stack(given.keys), torch.stack(given.values)))
    cut = [page for page in states.split(PAGE, dim=2) if page.shape[2] == PAGE]
    return [(p.transpose(1, 2) if order == "page_first" else p).flatten() for p in cut]


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
    built = mapper()
    match = built.prefixes.longest_match(PREFIX_IDS)
    assert match is not None
    wanted = Translator(built).translate(
        given, tokens=TOKENS - 1, prefix=match[1], dtype=torch.float32
    )
    keys = hashes(ids, answer["cache_salt"])
    assert target.batch_exists(keys) == answer["tokens"] // PAGE
    for key, page in zip(keys, pages(wanted, order), strict=False):
        found = target.get(key, torch.empty_like(page))
        assert torch.equal(found, page)
    for salt in ("", "tenant"):
        assert target.batch_exists(hashes(ids, salt)) == 0
