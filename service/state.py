"""What one application holds: settings, mappers, worker, guards, and where it is in its life."""

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from service.buffers import Buffers
from service.errors import Problem
from service.guards import Guards
from service.metrics import Metrics
from service.settings import Settings
from service.sharing import Sharing
from service.store import Store
from service.worker import Worker


@dataclass(slots=True)
class Lifecycle:
    """``starting`` until the configured mappers were tried; ``draining`` from SIGTERM on."""

    starting: bool = True
    draining: bool = False

    def check_open(self) -> None:
        """Raises ``Problem`` 503 for a request that comes too late."""
        if self.draining:
            raise Problem("draining", "the service is shutting down", retry_after_seconds=5)


@dataclass(slots=True)
class Service:
    """Made by ``create_app``, found by routes through ``service_of``; ``sharing`` None: no
    buffers."""

    settings: Settings
    metrics: Metrics
    store: Store
    worker: Worker
    guards: Guards
    sharing: Sharing | None = None
    lifecycle: Lifecycle = field(default_factory=Lifecycle)


async def service_of(request: Request) -> Service:
    """The service behind a request; a coroutine, since FastAPI gives plain functions a thread."""
    service: Service = request.app.state.service
    return service


async def buffers_of(service: Annotated[Service, Depends(service_of)]) -> Buffers:
    """The leases behind a request. Raises ``Problem`` 403 where they are switched off."""
    if service.sharing is None:
        raise Problem("buffers_off", "this service was started without buffers")
    return service.sharing.buffers
