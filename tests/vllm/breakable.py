"""The connector, with copies that break where a test says so: at requests whose id has "broken"."""

from service.vllm.errors import NotLoaded
from service.vllm.jobs import Load
from service.vllm.worker import RankCache
from service.vllm_connector import KVTranslationConnector

_load = RankCache.load


def _breakable(cache: RankCache, job: Load) -> None:
    """Half of the way: some blocks are written, then it fails."""
    _load(cache, job)
    if "broken" in job.request_id:
        raise NotLoaded("broken")


class BreakableConnector(KVTranslationConnector):
    """Found by vLLM by this name."""


RankCache.load = _breakable  # type: ignore[method-assign]
