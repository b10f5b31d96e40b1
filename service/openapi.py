"""What /docs and /openapi.json say about bodies that FastAPI cannot see: raw bytes and problems."""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.responses import Response

from service import deadline
from service.answers import MAPPER_HEADER, SAFETENSORS
from service.errors import CODES
from service.feedback import Feedback
from service.problems import MEDIA_TYPE
from service.schemas import (
    BufferAsk,
    BufferReceipt,
    BufferRequest,
    ProblemBody,
    Receipt,
    Reprefill,
    TranslateRequest,
)
from service.tail_feedback import TailFeedback

JSON = "application/json"
OCTETS = "application/octet-stream"

EXAMPLE_REQUEST: dict[str, Any] = {
    "source": {"model": "small", "version": "r1", "rope_theta": 10000.0, "dtype": "bfloat16"},
    "target": {"model": "large", "version": "r1", "rope_theta": 1000000.0, "dtype": "bfloat16"},
    "tokens": 2,
    "layout": "NHD",
    "max_kl": 0.05,
    "max_native_tail": 512,
    "reprefill_ms": 850.0,
    "prefix_token_ids": [1, 4093],
}
_EXAMPLE_BUFFERS: dict[str, Any] = {
    **EXAMPLE_REQUEST,
    "source": {**EXAMPLE_REQUEST["source"], "buffer": "0f" * 16},
    "target": {**EXAMPLE_REQUEST["target"], "buffer": "1e" * 16},
}
_EXAMPLE_REPREFILL = {
    "decision": "reprefill",
    "reason": "length_not_certified",
    "detail": "the mapper was not measured on prompts of this length",
    "kl_bound": None,
    "max_kl": 0.05,
    "mapper": "small-large-full_head-b1",
    "digest": "sha256:6d3c...",
    "request_id": "5f0c2a9e6f3f4f0b8b1f0e6b7a1d2c3e",
}
_EXAMPLE_PROBLEM = {
    "type": "urn:kv-translator:problem:identity_mismatch",
    "title": "The cache is of another model",
    "status": 409,
    "detail": "source.rope_theta: the mapper was fitted for 10000.0, not 500000.0",
    "instance": "urn:kv-translator:request:5f0c2a9e6f3f4f0b8b1f0e6b7a1d2c3e",
    "code": "identity_mismatch",
    "decision": "reprefill",
    "retryable": False,
    "request_id": "5f0c2a9e6f3f4f0b8b1f0e6b7a1d2c3e",
}
_ANSWER = {"answer_id": "5f0c2a9e6f3f4f0b8b1f0e6b7a1d2c3e"}
_EXAMPLES_FEEDBACK = {
    "kl": {"summary": "A KL", "value": {**_ANSWER, "kl": 0.031}},
    "tail": {
        "summary": "The native tail's NLL",
        "value": {**_ANSWER, "tail_nll": 2.71, "source_tail_nll": 2.94},
    },
}
_BODY_TEXT = """A safetensors file, read as it arrives: 8 bytes with the length of the header
(little-endian), the JSON header, the tensors. In the header, `__metadata__.kvt` is the request
document (schema `TranslateRequest`) as a string. Tensor names follow from `layout`:
`layers.{i}.k` and `layers.{i}.v`, or `layers.{i}.kv`, or `kv`.

A cache whose `kv_scales` are not `none` holds 8-bit numbers q that stand for (q - zero) * scale.
Its scales are float32 tensors `layers.{i}.k_scale` and `layers.{i}.v_scale`, in every layout: `[1]`
for `per_tensor`, `[kv heads]` for `per_head`, `[tokens, kv heads]` for `per_token_head`. With
`kv_zero_points`, which only int8 has, there are `layers.{i}.k_zero` and `layers.{i}.v_zero` too, of
the same shape, from -128 to 127; otherwise zero is 0.

A request with a `probe` holds the target's own KV of the first 64 tokens as well, in the form of
the answer, under the same names with `probe` in place of `layers` (`probe.{i}.k`, ...,
`probe.{i}.k_scale`, ..., `probe.kv`).

Where the service has buffers, a request whose caches lie in two of them is the document alone, as
JSON (schema `BufferRequest`)."""
_BODY_EXAMPLE = (
    '\\x10\\x02\\x00\\x00\\x00\\x00\\x00\\x00{"__metadata__":{"kvt":"{\\"source\\":{...},'
    '\\"target\\":{...},\\"tokens\\":2,\\"layout\\":\\"NHD\\"}"},"layers.0.k":{"dtype":"BF16",'
    '"shape":[2,4,32],"data_offsets":[0,512]},...} and the bytes of the tensors'
)
_ANSWER_TEXT = """Translated: safetensors, tensors in the order of the layers, a layer's scales and
zero points after it, sent while later ones are computed. `__metadata__.kvt` is the `Receipt` as a
string. In buffers the tensors lie there, and the answer is the `BufferReceipt`. Re-prefill: JSON,
no tensors."""
_ANSWER_EXAMPLE = _BODY_EXAMPLE.replace(
    '\\"source\\":{...},\\"target\\":{...}', '\\"decision\\":\\"translate\\",\\"native_tail\\":1'
)


def _binary(example: str) -> dict[str, Any]:
    schema = {"type": "string", "format": "binary"}
    return {"schema": schema, "examples": {"file": {"summary": "A file", "value": example}}}


def _problems(codes: Iterable[str]) -> dict[int | str, dict[str, Any]]:
    """Responses by status, with the codes that come with it."""
    by_status: dict[int | str, list[str]] = {}
    for code in codes:
        by_status.setdefault(CODES[code].status, []).append(code)
    return {status: _problem(codes) for status, codes in sorted(by_status.items(), key=str)}


def _problem(codes: list[str]) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": f"`code`: {', '.join(f'`{code}`' for code in codes)}",
        "content": {MEDIA_TYPE: {"schema": _ref(ProblemBody), "example": _EXAMPLE_PROBLEM}},
    }
    if any(CODES[code].retryable for code in codes):
        response["headers"] = {"Retry-After": _header("Seconds")}
    return response


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _header(text: str) -> dict[str, Any]:
    return {"description": text, "schema": {"type": "string"}}


_ANSWER_HEADERS = {
    "KVT-Decision": _header("translate or reprefill"),
    "KVT-Reason": _header("Why re-prefill, from the closed list"),
    "KVT-Mapper": _header("Id of the mapper"),
    "KVT-Mapper-Digest": _header("Digest of its artifact"),
    "KVT-Tokens": _header("Rows answered"),
    "KVT-Native-Tail": _header("Rows that the target reads itself"),
    "KVT-KL-Bound": _header("Certified KL in nats a token"),
    "KVT-Answer-Id": _header("Id of the answer, the same as that of the request"),
    "KVT-Shadow": _header("requested: measure the KL of this answer and post it to /feedback"),
    "KVT-Suffix": _header("accepted: /feedback tells from the native tail's NLL what to do"),
    "KVT-Feedback-Token": _header("Goes with either post, as a header of the same name"),
    "KVT-Unproven": _header("true when there is no evidence behind the answer"),
    "x-vsr-kv-transfer-status": _header("applied or fallback_reprefill"),
    MAPPER_HEADER: _header("Id of the mapper"),
    "X-Request-Id": _header("Our id of the request"),
}
_DOCUMENT_CODES = ("bad_json", "bad_document")
_PAIR_CODES = ("bad_probe", "pair_not_found", "identity_mismatch", "mapper_not_ready", "draining")
_MEDIA_CODES = (
    "unsupported_media_type",
    "unsupported_encoding",
    "body_too_large",
    "body_too_slow",
    "digest_mismatch",
)
_TENSOR_CODES = (
    "bad_request",
    "bad_safetensors",
    "truncated_body",
    "header_too_large",
    "too_many_tokens",
    "bad_metadata",
    "bad_tensor_name",
    "bad_shape",
    "bad_scales",
    "layer_set",
    "dtype_unsupported",
    "layout_error",
    "overloaded",
    "buffer_not_found",
    "buffer_in_use",
    "bad_buffer",
    "out_of_memory",
    "internal",
    "internal_invariant",
)

_DEADLINE = {
    "name": deadline.HEADER,
    "in": "header",
    "required": False,
    "description": "Milliseconds, from now on, that the caller waits for all to be computed: "
    "would_miss_deadline as soon as it is known that it takes longer",
    "schema": {"type": "number", "minimum": 0},
}
_NAMED_MAPPER = {
    "name": MAPPER_HEADER,
    "in": "header",
    "required": False,
    "description": "Id of the only mapper that will do: pair_not_found where the pair has another",
    "schema": {"type": "string"},
}

TRANSLATE: dict[str, Any] = {
    "response_model": None,
    "response_class": Response,
    "openapi_extra": {
        "parameters": [_DEADLINE, _NAMED_MAPPER],
        "requestBody": {
            "required": True,
            "description": _BODY_TEXT,
            "content": {
                SAFETENSORS: _binary(_BODY_EXAMPLE),
                OCTETS: _binary(_BODY_EXAMPLE),
                JSON: {"schema": _ref(BufferRequest), "example": _EXAMPLE_BUFFERS},
            },
        },
    },
    "responses": {
        200: {
            "description": _ANSWER_TEXT,
            "headers": _ANSWER_HEADERS,
            "content": {
                SAFETENSORS: _binary(_ANSWER_EXAMPLE),
                JSON: {
                    "schema": {"anyOf": [_ref(Reprefill), _ref(BufferReceipt)]},
                    "example": _EXAMPLE_REPREFILL,
                },
            },
        },
        **_problems((*_DOCUMENT_CODES, *_PAIR_CODES, *_MEDIA_CODES, *_TENSOR_CODES)),
    },
}
PLAN: dict[str, Any] = {
    "openapi_extra": {
        "parameters": [_DEADLINE, _NAMED_MAPPER],
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": _ref(TranslateRequest), "example": EXAMPLE_REQUEST}},
        },
    },
    "responses": _problems(
        (*_DOCUMENT_CODES, *_PAIR_CODES, *_MEDIA_CODES, "layout_error", "bad_request")
    ),
}
FEEDBACK: dict[str, Any] = {
    "openapi_extra": {
        "parameters": [
            {
                "name": "KVT-Feedback-Token",
                "in": "header",
                "required": True,
                "schema": {"type": "string"},
            }
        ],
        "requestBody": {
            "required": True,
            "content": {
                JSON: {
                    "schema": {"anyOf": [_ref(Feedback), _ref(TailFeedback)]},
                    "examples": _EXAMPLES_FEEDBACK,
                }
            },
        },
    },
    "responses": _problems(
        (
            "bad_request",
            "bad_document",
            "unauthorized",
            "wrong_feedback_token",
            "answer_not_found",
            "feedback_differs",
            "answer_expired",
            "state_unavailable",
            *_MEDIA_CODES,
        )
    ),
}
READ_ONE: dict[str, Any] = {"responses": _problems(("mapper_not_found",))}
_LEASE_CODES = ("buffers_off", "buffer_not_found")
LEASE: dict[str, Any] = {
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": _ref(BufferAsk), "example": {"nbytes": 1 << 20}}},
        }
    },
    "responses": _problems(
        (
            *_DOCUMENT_CODES,
            *_MEDIA_CODES,
            "bad_request",
            "buffers_off",
            "buffer_too_large",
            "buffer_budget",
            "out_of_memory",
            "draining",
        )
    ),
}
BUFFER: dict[str, Any] = {"responses": _problems(_LEASE_CODES)}
RELEASE: dict[str, Any] = {
    "response_model": None,
    "responses": _problems((*_LEASE_CODES, "buffer_in_use")),
}
ADMIN: dict[str, Any] = {
    "responses": _problems(("unauthorized", "admin_off", "mapper_not_found", "busy", "internal"))
}


def install(app: FastAPI) -> None:
    """Complete the document with the schemas that only raw bodies refer to."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, summary=app.summary, routes=app.routes
            )
            known = schema.setdefault("components", {}).setdefault("schemas", {})
            for model in (
                TranslateRequest,
                BufferRequest,
                BufferReceipt,
                BufferAsk,
                Receipt,
                Reprefill,
                ProblemBody,
                Feedback,
                TailFeedback,
            ):
                own = model.model_json_schema(ref_template="#/components/schemas/{model}")
                known |= own.pop("$defs", {})
                known[model.__name__] = own
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
