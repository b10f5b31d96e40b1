"""POST /translate and its plan, and the mappers; every function here is a thin edge."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import SecretStr
from starlette.responses import Response

from service import deadline, openapi, pipeline
from service.answers import MAPPER_HEADER, SAFETENSORS
from service.body import Body, ClientGone
from service.body_transport import BodyTransport
from service.buffer_transport import BufferTransport
from service.call import Call
from service.deadline import Deadline
from service.digest import ContentDigest
from service.entry import Entry
from service.errors import Problem
from service.feedback import MAX_FEEDBACK_BYTES, FeedbackReceipt
from service.ledger import Ledger
from service.openapi import JSON, OCTETS
from service.schemas import MapperInfo, MapperList, Plan, TranslateRequest, read_document
from service.state import Service, service_of
from service.tail_feedback import SuffixReceipt, TailFeedback, read_posted
from service.transport import Transport

MAX_DOCUMENT_BYTES = 64 * 1024

router = APIRouter()
TheService = Annotated[Service, Depends(service_of)]


@router.post("/translate", **openapi.TRANSLATE)
@router.post("/v1/translate", include_in_schema=False)
async def translate(request: Request, service: TheService) -> Response:
    """Translate a KV cache, or say that the caller had better compute the prompt itself.

    Whoever treats everything but `200` with `KVT-Decision: translate` as "re-prefill" is right.
    """
    with Ledger(service.metrics, request.scope["kvt.facts"]) as ledger:
        transports = _transports(service)
        body, declared = _open(request, service, tuple(transports))
        request_id, client = request.scope["kvt.request_id"], client_of(request, service)
        limits = _deadline(request), request.headers.get(MAPPER_HEADER)
        call = Call(service, body, declared, request_id, client, ledger, *limits)
        try:
            return await pipeline.translate(call, transports[_media_type(request)])
        except ClientGone:
            ledger.close("disconnected", "client_disconnect")
            return Response(status_code=499)


def _transports(service: Service) -> dict[str, Callable[[Call], Awaitable[Transport]]]:
    """How a request of each content type comes in."""
    found: dict[str, Callable[[Call], Awaitable[Transport]]] = {
        SAFETENSORS: BodyTransport.read,
        OCTETS: BodyTransport.read,
    }
    if service.sharing is not None:
        found[JSON] = BufferTransport.read
    return found


@router.post("/translate/plan", **openapi.PLAN)
@router.post("/v1/translate/plan", include_in_schema=False)
async def plan(request: Request, service: TheService) -> Plan:
    """What would become of this request: the same document, without tensors."""
    raw = await small_document(request, service, MAX_DOCUMENT_BYTES)
    asked = read_document(TranslateRequest, raw)
    limits = _deadline(request), request.headers.get(MAPPER_HEADER)
    return pipeline.plan(service, asked, client_of(request, service), *limits)


@router.get("/mappers")
async def list_mappers(service: TheService) -> MapperList:
    """All mappers that this service knows."""
    return MapperList(mappers=[_info(service, entry) for entry in service.store.entries])


@router.get("/mappers/{mapper_id}", **openapi.READ_ONE)
async def get_mapper(mapper_id: str, service: TheService) -> MapperInfo:
    """One mapper, with its breakers."""
    return _info(service, service.store.by_id(mapper_id))


@router.post("/feedback", **openapi.FEEDBACK)
@router.post("/v1/feedback", include_in_schema=False)
async def feedback(request: Request, service: TheService) -> FeedbackReceipt | SuffixReceipt:
    """Report the KL of an answer that came with `KVT-Shadow: requested`, or the NLL of the native
    tail over one that came with `KVT-Suffix: accepted`; once, or the same again.

    `KVT-Feedback-Token` is the header of that answer.
    """
    counter, facts = service.metrics.feedback, request.scope["kvt.facts"]
    try:
        if (bearer := service.settings.feedback_token) is not None:
            _bearer(request, bearer)
        posted = read_posted(await small_document(request, service, MAX_FEEDBACK_BYTES))
        token = request.headers.get("kvt-feedback-token", "")
        if isinstance(posted, TailFeedback):
            return _judge_tail(service, posted, token)
        mapper_id, receipt = await service.guards.report(posted, token)
    except Problem as problem:
        counter.labels("unknown", problem.code).inc()
        facts.update(outcome="refused", reason=problem.code)
        raise
    outcome = "violation" if receipt.violation else "good"
    counter.labels(mapper_id, outcome).inc()
    facts.update(pair=mapper_id, outcome=outcome, kl=receipt.kl, breaker=receipt.breaker)
    return receipt


def _judge_tail(service: Service, posted: TailFeedback, token: str) -> SuffixReceipt:
    mapper_id, first, receipt = service.guards.judge_tail(posted, token)
    if first:
        service.metrics.suffixes.labels(mapper_id, receipt.suffix.decision).inc()
    return receipt


async def _admin(request: Request, service: TheService) -> None:
    token = service.settings.admin_token
    if token is None:
        raise Problem("admin_off", "no admin token is configured")
    _bearer(request, token)


def _bearer(request: Request, token: SecretStr) -> None:
    given = request.headers.get("authorization", "").encode()
    expected = f"Bearer {token.get_secret_value()}".encode()
    if not hmac.compare_digest(given, expected):
        raise Problem("unauthorized", "send Authorization: Bearer and the token of this route")


@router.post("/mappers/{mapper_id}/load", dependencies=[Depends(_admin)], **openapi.ADMIN)
async def load_mapper(mapper_id: str, service: TheService) -> MapperInfo:
    """Load a mapper, or load it again from disk; on failure the old one keeps serving."""
    entry = service.store.by_id(mapper_id)
    await asyncio.to_thread(service.store.load, entry)
    return _info(service, entry)


@router.post("/mappers/{mapper_id}/unload", dependencies=[Depends(_admin)], **openapi.ADMIN)
async def unload_mapper(mapper_id: str, service: TheService) -> MapperInfo:
    """Free a mapper's memory; requests that use it finish first."""
    entry = service.store.by_id(mapper_id)
    await asyncio.to_thread(service.store.unload, entry)
    return _info(service, entry)


def _info(service: Service, entry: Entry) -> MapperInfo:
    breakers = service.guards.breakers(entry.id, entry.digest)
    return entry.info().model_copy(update={"breakers": breakers})


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _deadline(request: Request) -> Deadline:
    return Deadline.of_header(request.headers.getlist(deadline.HEADER))


def client_of(request: Request, service: Service) -> str:
    """What our books call the caller."""
    return service.guards.client(request.client.host if request.client else None)


async def small_document(request: Request, service: Service, limit_bytes: int) -> bytes:
    """A small JSON body."""
    body, _ = _open(request, service, (JSON,))
    try:
        return await body.rest(limit_bytes)
    except ClientGone as error:
        raise Problem("client_disconnect", "the client went away") from error


def _open(request: Request, service: Service, accepted: tuple[str, ...]) -> tuple[Body, int | None]:
    """Judge the request by its headers, before any byte of the body is asked for."""
    if _media_type(request) not in accepted:
        raise Problem("unsupported_media_type", f"accepted: {', '.join(accepted)}")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise Problem("unsupported_encoding", "send the body as it is")
    limit = service.settings.max_body_bytes
    length = request.headers.get("content-length")
    if length is not None and not length.isdecimal():
        raise Problem("bad_request", "Content-Length is not a number")
    declared = None if length is None else int(length)
    if declared is not None and declared > limit:
        raise Problem("body_too_large", f"at most {limit} bytes are read")
    body = Body(
        request.receive,
        limit_bytes=limit,
        grace_seconds=service.settings.body_grace_seconds,
        bytes_per_second=service.settings.body_bytes_per_second,
        digest=ContentDigest.of_header(request.headers.getlist("content-digest")),
    )
    return body, declared
