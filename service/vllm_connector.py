"""vLLM's KV connector: exports KV for translation, and loads what was translated for this model.

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "KVTranslationConnector",
        "kv_connector_module_path": "service.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": "http://127.0.0.1:8080", "model": "small"}}'

vLLM makes one of these in its scheduler's process and one in each worker. Both only pass on what
they are asked to ``service/vllm/``, which knows nothing of vLLM. The interface is the one of
``vllm/distributed/kv_transfer/kv_connector/v1/base.py``.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.request import RequestStatus

from service.vllm.counters import Counters
from service.vllm.engine import (
    Geometry,
    Options,
    check_engine,
    claim_of_engine,
    geometry_of,
    read_options,
)
from service.vllm.errors import EngineRefused
from service.vllm.exports import Exports
from service.vllm.jobs import Jobs
from service.vllm.layout import BlockLayout, measure
from service.vllm.link import Link
from service.vllm.loads import Loads
from service.vllm.scheduler import SchedulerSide
from service.vllm.stats import KVTranslationMetrics, KVTranslationStats
from service.vllm.translating import Translating
from service.vllm.worker import RankCache, WorkerSide

IDLE_SECONDS = 0.001
TRANSLATIONS, LEASES = 4, 4
"""That wait for the service at the same time."""


class Step(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler hands to the workers with each engine step."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs


class KVTranslationConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Raises EngineRefused at the start in an engine that it does not know (see README)."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._options = read_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_engine(vllm_config, len(groups), vllm.__version__, self._options)
        self._geometry = geometry_of(vllm_config, groups[0].kv_cache_spec)
        self._counters = Counters()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            transfer = vllm_config.kv_transfer_config
            self._scheduler = _scheduler_side(
                vllm_config, self._options, self._geometry, self._counters, transfer
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost export is a prefill elsewhere, no reason to compute anything again."""
        return False

    # In the scheduler's process.

    def on_new_request(self, request: Any) -> None:
        """Begin what takes time."""
        if self._scheduler is not None:
            self._scheduler.new(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """None while a translation runs, then whole blocks, or none."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The engine has taken up what it was told it could load."""
        if self._scheduler is not None:
            ids = list(blocks.get_block_ids()[0])
            self._scheduler.allocated(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The new jobs. A step in which nothing runs is one in which the engine waits for us."""
        if scheduler_output.total_num_scheduled_tokens == 0:
            # It asks again at once, and would keep Python's lock from the threads that answer.
            time.sleep(IDLE_SECONDS)
        return Step(self._scheduler.jobs() if self._scheduler is not None else Jobs())

    def update_connector_output(self, connector_output: Any) -> None:
        """What all workers have ended."""
        if self._scheduler is not None:
            self._scheduler.done(
                set(connector_output.finished_sending or ()),
                set(connector_output.finished_recving or ()),
                set(connector_output.failed_recving or ()),
            )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks are still to be copied, and what the answer says."""
        if self._scheduler is None:
            return False, None
        whole = request.status not in (
            RequestStatus.FINISHED_ABORTED,
            RequestStatus.FINISHED_ERROR,
        )
        return self._scheduler.finished(request, list(block_ids), whole=whole)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same; there is one group."""
        return self.request_finished(request, block_ids[0])

    def get_kv_connector_stats(self) -> KVTranslationStats | None:
        """What was counted since the last time; all of it is counted in the scheduler's process."""
        return KVTranslationStats(data=self._counters.take()) if self._scheduler else None

    # In a worker's process.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Measure how the backend lays KV out. Raises LayoutError or EngineRefused."""
        layers = sorted(kv_caches, key=extract_layer_index)
        if len(layers) != self._geometry.layers:
            raise EngineRefused(
                f"{len(layers)} layers with a KV cache: the model has {self._geometry.layers}"
            )
        caches = [kv_caches[name] for name in layers]
        layouts = [self._measured(name, kv_caches[name]) for name in layers]
        rank = get_tensor_model_parallel_rank()
        self._worker = WorkerSide(RankCache(caches, layouts, rank, self._geometry.kv_heads))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Take up this step's jobs; none of them is for this step's forward pass."""
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, Step):
            self._worker.start(metadata.jobs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done before the request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Exports begin when the request has finished."""

    def wait_for_save(self) -> None:
        """An export keeps its request's blocks until it is reported as finished."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What has ended; a load that failed is among those, and is computed again."""
        if self._worker is None:
            return KVConnectorTransferResults()
        return KVConnectorTransferResults(*self._worker.finished())

    # In either.

    def shutdown(self) -> None:
        """The engine ends."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTranslationStats:
        """Stats from what another process has sent."""
        return KVTranslationStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KVTranslationMetrics:
        """The engine's ``/metrics`` have our counters too."""
        return KVTranslationMetrics(*arguments)

    def _measured(self, name: str, cache: Tensor) -> BlockLayout:
        layer = self._vllm_config.compilation_config.static_forward_context[name]
        block = self._geometry.block_tokens
        inside = torch.arange(block, device=cache.device)

        def write(keys: Tensor, values: Tensor, block_id: int) -> None:
            layer.impl.do_kv_cache_update(layer, keys, values, cache, block_id * block + inside)

        return measure(
            cache,
            write,
            num_blocks=self._kv_cache_config.num_blocks,
            block_tokens=block,
            kv_heads=self._geometry.kv_heads // self._geometry.ranks,
            head_dim=self._geometry.head_dim,
        )


def _scheduler_side(
    config: Any, options: Options, geometry: Geometry, counters: Counters, transfer: Any
) -> SchedulerSide:
    claim = claim_of_engine(config, options)
    link = Link(options.url, options.deadline_seconds, options.socket)
    exports = Exports(
        claim,
        geometry,
        link,
        ThreadPoolExecutor(LEASES, "kvt-leases"),
        counters,
        # What takes as long as the link waits at most ends with an error, and is no answer.
        lease_seconds=min(options.lease_seconds, options.deadline_seconds),
    )
    loads = Loads(
        Translating(link, claim, geometry),
        link.release,
        ThreadPoolExecutor(TRANSLATIONS, "kvt-translations"),
        counters,
        block_tokens=geometry.block_tokens,
        deadline_seconds=options.deadline_seconds,
    )
    return SchedulerSide(
        exports if transfer.is_kv_producer else None,
        loads if transfer.is_kv_consumer else None,
        answer_tokens=options.answer_tokens,
    )
