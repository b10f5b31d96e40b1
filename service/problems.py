"""The one renderer of refusals: problem+json (RFC 9457) for every route and every cause."""

import http

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from mappers.errors import IdentityMismatch, KVTranslatorError, UnsupportedModel
from service.errors import CODES, Problem
from service.schemas import ProblemBody

MEDIA_TYPE = "application/problem+json"
_CODE_OF_STATUS = {404: "not_found", 405: "method_not_allowed"}
_DETAIL_OF_STATUS = {404: "no such address", 405: "see the Allow header"}


def render(problem: Problem, request_id: str) -> Response:
    """The answer to a refusal."""
    kind = problem.kind
    body = ProblemBody(
        type=f"urn:kv-translator:problem:{problem.code}",
        title=kind.title,
        status=kind.status,
        detail=problem.detail,
        instance=f"urn:kv-translator:request:{request_id}",
        code=problem.code,
        decision="reprefill",
        retryable=kind.retryable,
        request_id=request_id,
        **problem.members,
    )
    headers = {"KVT-Decision": "reprefill", "X-Request-Id": request_id}
    if kind.unsupported:
        headers["x-vsr-kv-transfer-status"] = "unsupported"
    if kind.retryable:
        headers["Retry-After"] = str(problem.retry_after_seconds or 1)
    if kind.status == http.HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(
        body.model_dump(mode="json"), kind.status, headers=headers, media_type=MEDIA_TYPE
    )


def as_problem(error: BaseException) -> Problem:
    """Any error as a refusal; what is not known to be the caller's is a fault of ours."""
    match error:
        case Problem():
            return error
        case IdentityMismatch():
            return Problem(
                "identity_mismatch",
                str(error),
                side=error.side,
                field=error.field,
                expected=error.expected,
                given=error.given,
            )
        case UnsupportedModel():
            return Problem("unsupported_model", str(error), reason=error.reason)
        case KVTranslatorError():
            return Problem(error.code if error.code in CODES else "internal", str(error))
        case RequestValidationError():
            return Problem("bad_document", "the request does not have the form that is expected")
        case HTTPException():
            code = _CODE_OF_STATUS.get(error.status_code, "bad_request")
            return Problem(code, _DETAIL_OF_STATUS.get(error.status_code, "not understood"))
        case _:
            return Problem("internal", "the service has a fault; it has been logged")


def install(app: FastAPI) -> None:
    """Make every error of this application come out as problem+json."""

    async def handle(request: Request, error: Exception) -> Response:
        answer = render(as_problem(error), request.scope["kvt.request_id"])
        if isinstance(error, HTTPException) and "Allow" in (error.headers or {}):
            answer.headers["Allow"] = (error.headers or {})["Allow"]
        return answer

    causes = (Problem, KVTranslatorError, RequestValidationError, HTTPException, Exception)
    for cause in causes:
        app.add_exception_handler(cause, handle)
