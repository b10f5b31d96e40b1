"""Everything that the service refuses, and how it says so: one list of codes, one exception.

A ``Problem`` becomes an ``application/problem+json`` body (RFC 9457) in ``service/problems.py``,
the only place that renders one. Its ``detail`` may hold numbers that the caller sent and names that
we own, never the caller's text.
"""

from typing import NamedTuple


class Kind(NamedTuple):
    """What a code means over HTTP; ``unsupported`` says that no mapper fits the pair."""

    status: int
    title: str
    retryable: bool = False
    unsupported: bool = False


CODES: dict[str, Kind] = {
    "bad_request": Kind(400, "The request is not well-formed HTTP"),
    "bad_safetensors": Kind(400, "The body is not a safetensors file"),
    "truncated_body": Kind(400, "The body ended too early"),
    "bad_json": Kind(400, "The document is not JSON"),
    "digest_mismatch": Kind(400, "The body is not what was sent", retryable=True),
    "unauthorized": Kind(401, "The bearer token is missing or wrong"),
    "wrong_feedback_token": Kind(403, "The token is not that of the answer"),
    "buffers_off": Kind(403, "Buffers are switched off"),
    "admin_off": Kind(403, "The admin routes are switched off"),
    "not_found": Kind(404, "There is nothing at this address"),
    "mapper_not_found": Kind(404, "There is no such mapper"),
    "buffer_not_found": Kind(404, "There is no such buffer"),
    "answer_not_found": Kind(404, "There is no such answer to be measured"),
    "pair_not_found": Kind(404, "No mapper translates between these models", unsupported=True),
    "method_not_allowed": Kind(405, "This address does not take that method"),
    "body_too_slow": Kind(408, "The body arrived too slowly", retryable=True),
    "identity_mismatch": Kind(409, "The cache is of another model", unsupported=True),
    "busy": Kind(409, "The mapper is being loaded", retryable=True),
    "buffer_in_use": Kind(409, "A translation uses the buffer", retryable=True),
    "feedback_differs": Kind(409, "Another KL was posted before"),
    "answer_expired": Kind(410, "The time to measure this answer is over"),
    "body_too_large": Kind(413, "The body is too large"),
    "buffer_too_large": Kind(413, "No client may have so large a buffer"),
    "header_too_large": Kind(413, "The safetensors header is too large"),
    "too_many_tokens": Kind(413, "The prompt is longer than the models allow"),
    "unsupported_media_type": Kind(415, "This content type is not read"),
    "unsupported_encoding": Kind(415, "Compressed bodies are not read"),
    "bad_document": Kind(422, "The request document is not valid"),
    "bad_probe": Kind(422, "The probe cannot be used"),
    "bad_buffer": Kind(422, "The buffer cannot be used for this"),
    "bad_metadata": Kind(422, "The safetensors metadata is not valid"),
    "bad_tensor_name": Kind(422, "A tensor has a name that no cache has"),
    "bad_shape": Kind(422, "A tensor has a shape that does not fit"),
    "bad_scales": Kind(422, "The scales or zero points cannot be used"),
    "layer_set": Kind(422, "The tensors are not those of the declared layers"),
    "dtype_unsupported": Kind(422, "A tensor has a dtype that does not fit"),
    "unsupported_model": Kind(422, "This kind of model cannot be translated", unsupported=True),
    "layout_error": Kind(422, "The tensors do not fit the declared layout"),
    "head_too_large": Kind(431, "The request's head is too large"),
    "overloaded": Kind(429, "Too many requests are in flight", retryable=True),
    "buffer_budget": Kind(429, "The client has as many buffers as it may", retryable=True),
    "client_disconnect": Kind(499, "The client went away"),
    "internal": Kind(500, "The service has a fault"),
    "internal_invariant": Kind(500, "A translation came out incomplete"),
    "draining": Kind(503, "The service is shutting down", retryable=True),
    "mapper_not_ready": Kind(503, "The mapper is not loaded", retryable=True),
    "state_unavailable": Kind(503, "The state file cannot be written", retryable=True),
    "out_of_memory": Kind(507, "There is no memory for this request now", retryable=True),
}


class Problem(Exception):
    """A refusal: one of ``CODES``, a safe sentence, and safe extra members of the body."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        retry_after_seconds: int | None = None,
        **members: object,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.retry_after_seconds = retry_after_seconds
        self.members = members

    @property
    def kind(self) -> Kind:
        """Status and title of the code."""
        return CODES[self.code]
