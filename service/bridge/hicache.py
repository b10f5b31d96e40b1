"""SGLang's own ``file`` backend (0.5.23), which has jobs translated when their pages are wanted.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvt", "module_path": "service.bridge.hicache",
        "class_name": "TranslatedPages", "file_storage_path": "target-pages",
        "kvt": {"source": "small", "target": "large", "url": "http://127.0.0.1:8080",
                "source_pages": "source-pages", "jobs": "jobs"}}'

SGLang asks a storage for pages by their hashes, which tell neither tokens nor salt; a job
(inbox.py) tells both. What is translated lies under the salt that names the mapper, so a request
without that salt never asks for it. Whatever goes wrong is a miss, and the engine prefills.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)

from mappers.cache import DTYPES
from mappers.errors import KVTranslatorError
from service.bridge.carry import Bridge, Carried, Job, not_carried
from service.bridge.inbox import Inbox
from service.bridge.pages import PageLayout, Pages, PagesError
from service.client import Client
from service.listed import claims_of, sides_between

logger = logging.getLogger(__name__)
_LAYOUTS: dict[str, PageLayout] = {
    "layer_first": "layer_first",
    "page_first": "page_first",
    "page_first_direct": "layer_first",
}


class HostPool(Protocol):
    """What is used of SGLang's ``HostKVCache``."""

    page_size: int
    layout: str
    dtype: torch.dtype
    storage_format_tag: str | None


class Places(BaseModel):
    """``kvt`` of the extra config. ``deadline_seconds`` is how long a look-up may wait for a
    translation: less than ``prefetch_timeout_base``, after which the engine prefills anyway."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    target: str
    url: str
    source_pages: Path
    jobs: Path
    source_name: str | None = Field(None, description="--served-model-name, if not the model's.")
    deadline_seconds: float = Field(0.75, gt=0, le=600, allow_inf_nan=False)


class TranslatedPages(HiCacheFile):  # type: ignore[misc]
    """The target's pages. What cannot be served raises PagesError or ValidationError when the
    engine starts; later on it is a miss."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        super().__init__(storage_config)
        self._places = Places.model_validate((storage_config.extra_config or {}).get("kvt"))
        self._name = storage_config.model_name or ""
        if self.config_suffix != f"_{self._name.replace('/', '-')}_0_1":
            raise PagesError("the model has to be on one rank, and not of MLA")
        self._client = Client(self._places.url, timeout=self._places.deadline_seconds)
        self._worker = ThreadPoolExecutor(1, "kvt-pages")

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """As SGLang's, once the pages are of a known order."""
        if mem_pool_host.layout not in _LAYOUTS or mem_pool_host.storage_format_tag:
            raise PagesError(f"--hicache-mem-layout has to be one of {', '.join(_LAYOUTS)}")
        super().register_mem_pool_host(mem_pool_host)
        self._inbox = Inbox(self._places.jobs, mem_pool_host.page_size)

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """How many of these pages, from the first on, are there: after a translation, if a job for
        this prompt waits and more are asked for than there are."""
        found: int = super().batch_exists(keys, extra_info)
        job = self._inbox.take(keys[found:])
        if job is None or self._carried(job).decision != "translate":
            return found
        return int(super().batch_exists(keys, extra_info))

    def close(self) -> None:
        """Give up what runs, and the connections."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _carried(self, job: Job) -> Carried:
        """Within the deadline. What has begun by then goes on: its pages serve a later request."""
        running = self._worker.submit(self._carry, job)
        try:
            carried = running.result(self._places.deadline_seconds)
        except TimeoutError:
            running.cancel()
            carried = not_carried("deadline", "the translation takes too long")
        logger.info("kvt: %s", carried.model_dump_json(exclude_none=True))
        return carried

    def _carry(self, job: Job) -> Carried:
        try:
            return self._bridge().carry(job)
        except KVTranslatorError as error:
            return not_carried(error.code, str(error))

    def _bridge(self) -> Bridge:
        """Asked of the service for each job, as its mappers may change."""
        places, host = self._places, self.mem_pool_host
        sides = sides_between(self._client.mappers().mappers, places.source, places.target)
        if DTYPES.get(sides[1].kv_dtype) != host.dtype:
            raise PagesError(f"the engine has {host.dtype}, expected {sides[1].kv_dtype}")
        folders = (places.source_pages, Path(self.file_path))
        names = (places.source_name or sides[0].model, self._name)
        layout, page_tokens = _LAYOUTS[host.layout], host.page_size
        source, target = (
            Pages(folder, name, side, page_tokens=page_tokens, layout=layout)
            for folder, name, side in zip(folders, names, sides, strict=True)
        )
        return Bridge(self._client, claims_of(sides), source, target, places.deadline_seconds)
