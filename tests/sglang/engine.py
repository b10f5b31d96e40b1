"""What an SGLang engine does with its storage: its own backend, page hashes and pages."""

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.utils import get_storage_hash_str
from torch import Tensor

from mappers.cache import KVCache
from mappers.translate import Translator
from tests.service.pair import PREFIX_IDS, mapper

PAGE = 16
Order = Literal["layer_first", "page_first"]


class Key:
    """What SGLang hashes of a request (its RadixKey needs a GPU's packages)."""

    extra_key = None

    def __init__(self, ids: list[int], salt: str) -> None:
        self.token_ids, self.cache_salt = array("q", ids), salt or None

    def __len__(self) -> int:
        return len(self.token_ids)


def config(model: str, **changes: Any) -> HiCacheStorageConfig:
    """Of an engine on one rank."""
    own = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": model,
    }
    return HiCacheStorageConfig(**(own | changes))


def host(layout: str = "layer_first", **changes: Any) -> SimpleNamespace:
    """What is read of an engine's host pool (SGLang's own needs a GPU's packages)."""
    own = {"page_size": PAGE, "layout": layout, "dtype": torch.float32, "storage_format_tag": None}
    return SimpleNamespace(**(own | changes))


def backend(folder: Path, model: str) -> HiCacheFile:
    """SGLang's own."""
    return HiCacheFile(config(model), file_path=str(folder))


def hashes(ids: list[int], salt: str = "") -> list[str]:
    """Of the whole pages of a request."""
    found: list[str] = get_storage_hash_str(Key(ids, salt), None, page_size=PAGE)
    return found


def pages(given: KVCache, order: Order) -> list[Tensor]:
    """Flat, as the engine's host pool hands them to its storage."""
    states = torch.stack((torch.stack(given.keys), torch.stack(given.values)))
    cut = [page for page in states.split(PAGE, dim=2) if page.shape[2] == PAGE]
    return [(p.transpose(1, 2) if order == "page_first" else p).flatten() for p in cut]


def translated(given: KVCache) -> KVCache:
    """By the mapper of the tests' pair, without a service: what the target's pages have to hold."""
    built = mapper()
    match = built.prefixes.longest_match(PREFIX_IDS)
    if match is None:
        raise LookupError("the pair knows its prefix")
    return Translator(built).translate(
        given, tokens=given.tokens - 1, prefix=match[1], dtype=torch.float32
    )
