"""The client's side of an answer: read as strictly as the service reads requests.

Sans-IO: ``open_answer`` looks at status and headers, then the answer is fed with the body's
chunks, whoever reads them. Tensors are allocated once, when the header has been checked, and
filled in place.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from pydantic import ValidationError
from torch import Tensor

from mappers.cache import DTYPES, KVCache
from mappers.errors import KVTranslatorError, LayoutError
from mappers.layouts import Geometry, Layout
from mappers.quantize import Stored
from mappers.stored import AnyCache, restored
from service import wire
from service.errors import Problem
from service.schemas import BufferReceipt, Receipt, TranslateRequest
from service.side import Form, Side
from service.upload import CONTENT_TYPE, memory_of

MAX_ANSWER_BYTES = 64 << 30
MAX_JSON_BYTES = 1 << 20


class BadAnswer(KVTranslatorError):
    """An answer that is incomplete or not what was asked for; nothing of it may be used."""

    code = "bad_answer"


@dataclass(frozen=True)
class Translated:
    """The target's cache of the first ``receipt.tokens`` tokens; it reads the rest itself.

    ``stored`` is what came: 8-bit numbers with their scales, if the request asked for that.
    ``tail_token`` is there when the service can judge the answer by the likelihood of that rest.
    ``transport`` is the way it came: by ``buffers``, it lies in the target's and is overwritten by
    the next translation through the same ones.
    """

    stored: AnyCache
    receipt: Receipt
    answer_id: str = ""
    tail_token: str | None = None
    transport: Literal["body", "buffers"] = "body"

    @cached_property
    def cache(self) -> KVCache:
        """The numbers that it stands for, float32 where it has scales; made when first read."""
        return restored(self.stored)


@dataclass(frozen=True)
class Reprefill:
    """No translation: prefill as if there were no service.

    ``reason`` is one of the service's reasons, the ``code`` of a refusal, or ``unreachable`` or
    ``bad_answer``, which only the client says. ``status`` is None when there was no HTTP answer.
    ``retryable``: the same request may be translated later, after ``retry_after_seconds`` if that
    is given. ``kl_bound`` and ``max_kl`` (nats a token) are there when the KL was what decided.
    """

    reason: str
    detail: str
    status: int | None = None
    code: str | None = None
    retryable: bool = False
    retry_after_seconds: float | None = None
    kl_bound: float | None = None
    max_kl: float | None = None
    mapper: str | None = None


Outcome = Translated | Reprefill

OnLayer = Callable[[int, Stored, Stored], None]
"""Told of each target layer, in order, as soon as it is here: its number, keys and values. They are
the translation's only if the call ends as ``Translated``; then all have been told."""


class Answer(Protocol):
    """Fed with every chunk of the body in order, then asked once for the outcome."""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes. Raises BadAnswer."""
        ...

    def outcome(self) -> Outcome:
        """What the whole body says. Raises BadAnswer when it is not complete."""
        ...


def open_answer(
    status: int,
    headers: Mapping[str, str],
    request: TranslateRequest,
    on_layer: OnLayer | None = None,
) -> Answer:
    """The reader for an answer with this status and these headers (names in lower case).

    Only 200 with ``KVT-Decision: translate`` holds tensors. Raises BadAnswer for compressed ones.
    """
    if headers.get("content-encoding", "identity") != "identity":
        raise BadAnswer("the answer is compressed, which was not asked for")
    if status != 200 or headers.get("kvt-decision") != "translate":
        return _Document(status, headers)
    kind = headers.get("content-type", "").partition(";")[0].strip()
    if kind != CONTENT_TYPE:
        raise BadAnswer(f"a translation comes as {CONTENT_TYPE}, this answer does not")
    return _Tensors(request, headers, on_layer)


def translated_in(
    memory: Tensor,
    buffer: str,
    body: bytes,
    headers: Mapping[str, str],
    request: TranslateRequest,
) -> Translated:
    """A translation that lies in uint8 ``memory``, the caller's lease ``buffer``, as views of it.

    Values are not looked at again: the service has, where they lie. Raises BadAnswer.
    """
    try:
        receipt = BufferReceipt.model_validate_json(body)
    except ValidationError as error:
        raise BadAnswer("the answer has no valid receipt") from error
    _check_receipt(receipt, request)
    if receipt.buffer != buffer:
        raise BadAnswer("the answer is about another buffer")
    header = _header_of(receipt)
    side = _checked_side(header, receipt, request)
    if wire.laid_out(side.tensors) != (header.tensors, header.data_bytes):
        raise BadAnswer("the answer's tensors do not lie end to end")
    if header.data_bytes > len(memory):
        raise BadAnswer("the answer's tensors are larger than their buffer")
    try:
        stored = side.read(memory, header.tensors, receipt.start_position)
    except Problem as problem:
        raise BadAnswer(f"the answer is not readable: {problem.detail}") from problem
    return Translated(stored, receipt, *_tokens(headers), transport="buffers")


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> Reprefill:
    """What an answer without tensors says. Raises BadAnswer when it is far too large."""
    document = _Document(status, headers)
    document.feed(body)
    return document.outcome()


def unreachable(error: Exception) -> Reprefill:
    """No HTTP answer, or one that broke off; only the kind of fault is told."""
    return Reprefill("unreachable", f"no complete answer: {type(error).__name__}", retryable=True)


def bad_answer(error: BadAnswer, status: int) -> Reprefill:
    """An answer of which nothing may be used."""
    return Reprefill("bad_answer", str(error), status=status)


class _Document:
    """A small JSON body: re-prefill, or RFC 9457's problem; anything else is a refusal as well."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        self._status, self._headers = status, headers
        self._body = bytearray()

    def feed(self, chunk: bytes) -> None:
        self._body += chunk
        if len(self._body) > MAX_JSON_BYTES:
            raise BadAnswer(f"more than {MAX_JSON_BYTES} bytes came where a small document belongs")

    def outcome(self) -> Reprefill:
        document = self._document()
        code = _text(document, "code")
        return Reprefill(
            reason=_text(document, "reason") or code or f"http_{self._status}",
            detail=_text(document, "detail") or f"the server answered {self._status}",
            status=self._status,
            code=code,
            retryable=document.get("retryable") is True,
            retry_after_seconds=_number(self._headers.get("retry-after")),
            kl_bound=_number(document.get("kl_bound")),
            max_kl=_number(document.get("max_kl")),
            mapper=_text(document, "mapper"),
        )

    def _document(self) -> dict[str, object]:
        # A proxy's HTML page means the same as any other refusal.
        try:
            found = json.loads(self._body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


class _Tensors:
    """Length, header, data: each part complete and checked before the next is looked at."""

    def __init__(
        self,
        request: TranslateRequest,
        headers: Mapping[str, str],
        on_layer: OnLayer | None,
    ) -> None:
        self._request, self._headers, self._on_layer = request, headers, on_layer
        self._declared_bytes = _number(headers.get("content-length"))
        self._head = bytearray()
        self._head_bytes = wire.LENGTH_BYTES
        self._receipt: Receipt | None = None
        self._side: Side | None = None
        self._tensors: dict[str, Tensor] = {}
        self._names: list[str] = []
        self._views: list[memoryview] = []
        self._at = self._filled = self._layer = 0

    def feed(self, chunk: bytes) -> None:
        rest = memoryview(chunk)
        while rest:
            taken = self._fill(rest) if self._receipt else self._collect(rest)
            rest = rest[taken:]

    def outcome(self) -> Translated:
        if self._receipt is None or self._side is None or self._at < len(self._views):
            raise BadAnswer("the answer ended before its declared size")
        try:
            stored = self._side.assembled(self._tensors, self._receipt.start_position)
        except LayoutError as error:
            raise BadAnswer(f"the answer's scales cannot be used: {error}") from error
        return Translated(stored, self._receipt, *_tokens(self._headers))

    def _collect(self, rest: memoryview) -> int:
        taken = min(len(rest), self._head_bytes - len(self._head))
        self._head += rest[:taken]
        if len(self._head) == self._head_bytes:
            self._head_complete()
        return taken

    def _head_complete(self) -> None:
        try:
            if self._head_bytes == wire.LENGTH_BYTES:
                self._head_bytes += wire.header_length(bytes(self._head))
                return
            header = wire.parse_header(bytes(self._head[wire.LENGTH_BYTES :]))
        except Problem as problem:
            raise BadAnswer(f"the answer is not readable: {problem.detail}") from problem
        receipt = _receipt(header)
        _check_receipt(receipt, self._request)
        self._side = _checked_side(header, receipt, self._request)
        self._check_size(len(self._head) + header.data_bytes)
        self._tensors = {
            name: torch.empty(form.shape, dtype=DTYPES[form.dtype])
            for name, form in self._side.forms.items()
        }
        self._names = list(self._tensors)
        self._views = [memory_of(tensor) for tensor in self._tensors.values()]
        self._receipt = receipt

    def _check_size(self, size: int) -> None:
        if size > MAX_ANSWER_BYTES or self._declared_bytes not in (None, size):
            raise BadAnswer(f"the answer's header describes {size} bytes, which cannot be right")

    def _fill(self, rest: memoryview) -> int:
        if self._at == len(self._views):
            raise BadAnswer("there are bytes after the last tensor")
        view = self._views[self._at]
        taken = min(len(rest), len(view) - self._filled)
        view[self._filled : self._filled + taken] = rest[:taken]
        self._filled += taken
        if self._filled == len(view):
            self._at, self._filled = self._at + 1, 0
            self._tensor_complete()
        return taken

    def _tensor_complete(self) -> None:
        """Look at the tensor that has just come, and hand on the layer that it completes."""
        name = self._names[self._at - 1]
        tensor = self._tensors[name]
        if not bool(torch.isfinite(tensor.float() if tensor.itemsize == 1 else tensor).all()):
            raise BadAnswer("the answer holds values that are not finite")
        if self._side is None or name != self._side.names(self._layer)[-1]:
            return
        if self._on_layer is not None:
            self._on_layer(self._layer, *self._side.layer(self._tensors, self._layer))
        self._layer += 1


def _tokens(headers: Mapping[str, str]) -> tuple[str, str | None]:
    """The answer's id, and the token to have its tail judged with."""
    judged = headers.get("kvt-suffix") == "accepted"
    return headers.get("kvt-answer-id", ""), headers.get("kvt-feedback-token") if judged else None


def _header_of(receipt: BufferReceipt) -> wire.Header:
    """What the header of a body with these tensors would be."""
    try:
        tensors = {
            name: wire.TensorSpec(
                wire.WIRE_DTYPES[place.dtype][0], tuple(place.shape), *place.data_offsets
            )
            for name, place in receipt.tensors.items()
        }
    except KeyError as error:
        raise BadAnswer("the answer's tensors have a dtype that no cache has") from error
    return wire.Header(tensors, {}, max((spec.end for spec in tensors.values()), default=0))


def _receipt(header: wire.Header) -> Receipt:
    try:
        return Receipt.model_validate_json(header.metadata["kvt"])
    except (KeyError, ValidationError) as error:
        raise BadAnswer("the answer has no valid receipt") from error


def _check_receipt(receipt: Receipt, request: TranslateRequest) -> None:
    """The answer is about the request that was sent, and covers all but the native tail of it."""
    storage = request.target.storage
    expected = {
        "tokens": request.tokens - receipt.native_tail,
        "start_position": request.start_position,
        "layout": request.layout,
        "dtype": storage.dtype,
        "kv_scales": storage.scales,
        "kv_zero_points": storage.zero_points,
        "token_ids_sha256": request.token_ids_sha256,
    }
    for field, value in expected.items():
        if getattr(receipt, field) != value:
            raise BadAnswer(f"the receipt's {field} is not what was asked for")
    if request.probe is not None and receipt.prefix_tokens != request.probe.tokens:
        raise BadAnswer("the answer does not begin with the probe")
    if receipt.native_tail < 0 or receipt.tokens < 1:
        raise BadAnswer("the receipt covers no tokens")


def _checked_side(header: wire.Header, receipt: Receipt, request: TranslateRequest) -> Side:
    """Exactly the keys and values of some layers, of one shape, with their scales, in order."""
    target, first = request.target, header.tensors.get("layers.0.k")
    if first is None or len(first.shape) != 3 or first.shape[0] != receipt.tokens:
        raise BadAnswer(f"the answer's tensors do not hold {receipt.tokens} tokens")
    sizes = _layers(header), *first.shape[1:]
    claimed = (target.num_layers, target.num_kv_heads, target.head_dim)
    for given, found in zip(claimed, sizes, strict=True):
        if given is not None and given != found:
            raise BadAnswer(f"the answer has {found} where the target has {given}")
    geometry = Geometry(sizes[0], receipt.tokens, *first.shape[1:])
    side = Side(Layout.NHD, geometry, target.storage)
    ordered = sorted(header.tensors.items(), key=lambda item: item[1].begin)
    if [name for name, _ in ordered] != list(side.forms):
        raise BadAnswer("the answer's tensors are not the keys and values of each layer in order")
    if [Form(spec.dtype, spec.shape) for _, spec in ordered] != list(side.forms.values()):
        raise BadAnswer("the answer's tensors differ in dtype or shape")
    return side


def _layers(header: wire.Header) -> int:
    return sum(name.endswith(".k") for name in header.tensors)


def _text(document: Mapping[str, object], name: str) -> str | None:
    value = document.get(name)
    return value if isinstance(value, str) else None


def _number(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, str | int | float) else None
    except ValueError:
        return None
