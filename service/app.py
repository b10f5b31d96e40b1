"""create_app: the parts put together. Nothing is read, chosen or registered at import."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import structlog
from fastapi import FastAPI
from prometheus_client import start_http_server

from service import buffer_routes, health, openapi, problems, routes
from service.breaker_metrics import BreakerCollector
from service.context import RequestContext
from service.guards import Guards
from service.metrics import Metrics
from service.settings import Settings
from service.sharing import sharing_of
from service.state import Service
from service.store import Store
from service.store_metrics import StoreCollector
from service.watch import Watch
from service.worker import Worker

log = structlog.get_logger("service.app")

SUMMARY = "Translates one model's KV cache into another's, or says re-prefill"


def create_app(settings: Settings) -> FastAPI:
    """An application of its own: several can live in one process."""
    app = FastAPI(
        title="kv-translator",
        summary=SUMMARY,
        version=health.current_version(),
        lifespan=_lifespan,
        # A redirect would repeat the Host header that the client chose.
        redirect_slashes=False,
    )
    metrics = Metrics(version=health.current_version())
    worker = Worker(settings, metrics)
    store = Store(settings, worker.on_device)
    sharing = sharing_of(settings, metrics)
    service = Service(settings, metrics, store, worker, Guards(settings), sharing)
    app.state.service = service
    metrics.registry.register(BreakerCollector(store, service.guards))
    metrics.registry.register(StoreCollector(store))
    app.include_router(routes.router)
    app.include_router(buffer_routes.router)
    app.include_router(health.router)
    if settings.metrics_port is None:
        app.include_router(health.metrics_router)
    problems.install(app)
    openapi.install(app)
    app.add_middleware(RequestContext)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    loading = asyncio.create_task(_load(service))
    with _metrics_server(service):
        sharing = service.sharing.running() if service.sharing else contextlib.nullcontext()
        async with sharing, _watched(service):
            yield
    await loading
    service.store.close()
    service.worker.stop()
    service.guards.close()


async def _load(service: Service) -> None:
    """Meanwhile the port is open: /livez answers, /readyz says that we are starting."""
    await asyncio.to_thread(service.store.load_all)
    for entry in service.store.entries:
        facts = {"id": entry.id, "state": entry.state, "error": entry.error}
        log.info("mapper", **facts, why_not_servable=entry.why_not_servable)
    for name in service.guards.policies.unused({entry.id for entry in service.store.entries}):
        log.warning("policy of a mapper that is not there", id=name)
    service.lifecycle.starting = False


@contextlib.asynccontextmanager
async def _watched(service: Service) -> AsyncIterator[None]:
    """Look for new and changed artifacts, where that is switched on."""
    every_seconds = service.settings.watch_seconds
    if every_seconds is None:
        yield
        return
    watching = asyncio.create_task(Watch(service.store).run(every_seconds))
    try:
        yield
    finally:
        watching.cancel()


@contextlib.contextmanager
def _metrics_server(service: Service) -> Iterator[None]:
    """Prometheus on a port and thread of its own, so that a scrape never waits for a request."""
    port = service.settings.metrics_port
    if port is None:
        yield
        return
    server, thread = start_http_server(
        port, service.settings.host, registry=service.metrics.registry
    )
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
