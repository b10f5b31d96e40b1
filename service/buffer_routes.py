"""Leases of shared memory over HTTP: ask for one, look at it, give it back."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from service import openapi
from service.buffers import Buffers
from service.lease import Lease
from service.memfd import file_bytes, progress_offset
from service.routes import MAX_DOCUMENT_BYTES, TheService, client_of, small_document
from service.schemas import BufferAsk, BufferInfo, read_document
from service.state import Service, buffers_of

router = APIRouter()
TheBuffers = Annotated[Buffers, Depends(buffers_of)]


@router.post("/buffers", status_code=201, **openapi.LEASE)
async def lease(request: Request, service: TheService, buffers: TheBuffers) -> BufferInfo:
    """Lease shared memory: for a source cache, or for the target's.

    It holds no memory until it is fetched over the socket, which has to be soon.
    """
    service.lifecycle.check_open()
    raw = await small_document(request, service, MAX_DOCUMENT_BYTES)
    asked = read_document(BufferAsk, raw)
    leased = await buffers.open(client_of(request, service), asked.nbytes, asked.kind)
    return _info(service, buffers, leased)


@router.get("/buffers/{lease_id}", **openapi.BUFFER)
async def look(
    lease_id: str, request: Request, service: TheService, buffers: TheBuffers
) -> BufferInfo:
    """A lease of one's own; this counts as a use of it."""
    return _info(service, buffers, buffers.find(lease_id, client_of(request, service)))


@router.delete("/buffers/{lease_id}", status_code=204, **openapi.RELEASE)
async def release(
    lease_id: str, request: Request, service: TheService, buffers: TheBuffers
) -> Response:
    """Give a lease back. What its client has mapped stays, and counts, until it lets go of it."""
    await buffers.release(lease_id, client_of(request, service))
    return Response(status_code=204)


def _info(service: Service, buffers: Buffers, leased: Lease) -> BufferInfo:
    in_file = leased.nbytes if leased.kind == "host" else 0
    return BufferInfo(
        id=leased.id,
        kind=leased.kind,
        nbytes=leased.nbytes,
        file_bytes=file_bytes(in_file),
        progress_offset=progress_offset(in_file),
        expires_seconds=buffers.left_seconds(leased),
        ttl_seconds=service.settings.buffer_seconds,
        in_use=leased.in_use,
        socket=str(service.settings.buffers),
    )
