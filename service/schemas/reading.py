"""A document as it is read: sizes and names checked before its fields, and quoted in no error."""

import json
from typing import NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from service.errors import Problem
from service.schemas.buffers import BufferAsk, LeasedClaim
from service.schemas.request import Probe, TokenSample, TranslateRequest

MAX_DOCUMENT_CHARS = 16 * 1024
MAX_DEPTH = 16

Document = TypeVar("Document", bound=BaseModel)


def read_request(text: str) -> TranslateRequest:
    """Parse and check a request document. Raises ``Problem`` 400 or 422; quotes nothing of it."""
    return _read(TranslateRequest, text)


def read_document(kind: type[Document], raw: bytes) -> Document:
    """The same for a document that is a body of its own."""
    try:
        return _read(kind, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Problem("bad_document", "the request document is not UTF-8") from error


def _read(kind: type[Document], text: str) -> Document:
    if len(text) > MAX_DOCUMENT_CHARS:
        raise Problem("bad_document", f"at most {MAX_DOCUMENT_CHARS} characters are read")
    _check_depth(text)
    try:
        json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
    except ValueError as error:
        raise Problem("bad_json", "the request document is not JSON") from error
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise Problem("bad_document", _first_fault(error), errors=_faults(error)) from error


def _check_depth(text: str) -> None:
    # Brackets inside strings count as well: no field of a request has a use for many of them.
    depth = deepest = 0
    for char in text:
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    if deepest > MAX_DEPTH:
        raise Problem("bad_json", f"a document is nested at most {MAX_DEPTH} deep")


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Problem("bad_document", "a name appears twice in one object")
    return found


def _no_constants(name: str) -> NoReturn:
    raise Problem("bad_document", "NaN and Infinity are not JSON")


_OWN_NAMES = frozenset(
    name
    for model in (TranslateRequest, LeasedClaim, TokenSample, Probe, BufferAsk)
    for name in model.model_fields
)
# The text of these may hold what was sent, or comes from our own validators.
_OPAQUE_TYPES = ("value_error", "assertion_error")


def _faults(error: ValidationError) -> list[dict[str, str]]:
    """Where and what, with only names of our own: a surplus name is the caller's text."""
    faults = []
    for fault in error.errors(include_url=False, include_input=False, include_context=False)[:8]:
        place = [str(p) for p in fault["loc"] if p in _OWN_NAMES or isinstance(p, int)]
        what = "not valid" if fault["type"] in _OPAQUE_TYPES else fault["msg"]
        faults.append({"field": ".".join(place) or "document", "fault": what})
    return faults


def _first_fault(error: ValidationError) -> str:
    first = _faults(error)[0]
    return f"{first['field']}: {first['fault']}"
