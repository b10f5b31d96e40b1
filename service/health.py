"""Health and metadata, for Kubernetes, for KServe's Open Inference Protocol v2, and for people."""

from importlib.metadata import version
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from mappers.cache import DTYPES
from mappers.layouts import Layout
from service.schemas import REASONS, Health, Info
from service.state import Service, service_of

NAME = "kv-translator"

router = APIRouter()
metrics_router = APIRouter()
TheService = Annotated[Service, Depends(service_of)]


def current_version() -> str:
    """Version of the installed distribution."""
    return version(NAME)


def _answer(health: Health) -> Response:
    return JSONResponse(health.model_dump(), 200 if health.status == "ok" else 503)


def _readiness(service: Service) -> Health:
    states = {entry.id: entry.state for entry in service.store.entries}
    if service.lifecycle.draining:
        return Health(status="draining", mappers=states)
    if service.lifecycle.starting:
        return Health(status="starting", mappers=states)
    return Health(status="ok" if service.store.ready else "no_mapper", mappers=states)


_READY: dict[str, Any] = {"response_model": Health, "responses": {503: {"model": Health}}}


@router.get("/livez")
@router.get("/v2/health/live", include_in_schema=False)
async def live() -> Health:
    """The process answers."""
    return Health(status="ok")


@router.get("/readyz", **_READY)
@router.get("/health", **_READY)
@router.get("/v2/health/ready", include_in_schema=False)
async def ready(service: TheService) -> Response:
    """The preload list, or at least one mapper without a list, is verified and on a device that
    gave the golden answer of the self-test, and requests are taken."""
    return _answer(_readiness(service))


@router.get("/startupz", **_READY)
async def started(service: TheService) -> Response:
    """Every configured mapper has been tried."""
    return _answer(Health(status="starting" if service.lifecycle.starting else "ok"))


@router.get("/v2", include_in_schema=False)
async def server_metadata() -> dict[str, Any]:
    """Server metadata of the Open Inference Protocol."""
    return {"name": NAME, "version": current_version(), "extensions": []}


@router.get("/info")
async def info(service: TheService) -> Info:
    """What this process is and which limits it applies."""
    settings = service.settings
    return Info(
        name=NAME,
        version=current_version(),
        device=settings.device,
        torch=torch.__version__,
        mappers=[entry.id for entry in service.store.entries],
        max_kl=settings.max_kl,
        alpha=settings.alpha,
        delta=settings.delta,
        buffers=settings.buffers is not None,
        queue_requests=settings.queue_requests,
        queue_seconds=settings.queue_seconds,
        max_body_bytes=settings.max_body_bytes,
        max_header_bytes=settings.max_header_bytes,
        max_inflight_bytes=settings.max_inflight_bytes,
        layouts=[layout.value for layout in Layout],
        dtypes=list(DTYPES),
        reasons=list(REASONS),
    )


@metrics_router.get("/metrics", include_in_schema=False)
async def metrics(service: TheService) -> Response:
    """Prometheus text format."""
    text = generate_latest(service.metrics.registry)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})
