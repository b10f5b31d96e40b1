"""A client's two buffers: leased when first needed, filled, named in a request, read and kept.

Sans-IO: ``translate`` and ``release`` are generators of what has to be done, a request to send or a
piece of work that may block, so that both clients share everything else.

    with Client("http://127.0.0.1:8080") as client, client.buffers() as buffers:
        outcome = client.translate(cache, request, buffers=buffers)

Where there are no buffers to be had (switched off, another host, another user, no budget left) the
body carries the cache as ever; ``why_not`` says which.
"""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import httpx
import torch
from pydantic import ValidationError
from torch import Tensor

from mappers.errors import KVTranslatorError
from mappers.layouts import Geometry
from mappers.stored import AnyCache
from service.allocators import Kind, Memory
from service.answer import (
    BadAnswer,
    OnLayer,
    Outcome,
    Translated,
    bad_answer,
    refusal,
    translated_in,
)
from service.buffer_socket import fetch, fetch_slice
from service.coming import Coming
from service.cuda_ipc import open_slice
from service.schemas import BufferInfo, MapperList, SideInfo, TranslateRequest
from service.side import Side
from service.upload import Upload

Role = Literal["source", "target"]
Result = TypeVar("Result")


class Ask(NamedTuple):
    """A request to send; its response is what the generator wants back."""

    method: str
    path: str
    document: dict[str, Any] | None = None
    meanwhile: Callable[[], None] | None = None
    """To be called again and again until the response is there."""


Steps = Generator[Ask | Callable[[], Any], Any, Result]


@dataclass(slots=True)
class Held:
    """A lease that is mapped here."""

    id: str
    memory: Memory
    ttl_seconds: float
    used_seconds: float


class BufferPair:
    """For one translation at a time. ``socket``: where the service's socket is for this process, if
    that is not where the service says (another mount). ``kind``: cuda, where caches lie on a GPU
    that client and service share, and the service leases memory of it."""

    def __init__(self, socket: str | None = None, kind: Kind = "host") -> None:
        self._socket, self._kind = socket, kind
        self._held: dict[Role, Held] = {}
        self._targets: dict[tuple[str, str], SideInfo] = {}
        self._given_up = False
        self.why_not: str | None = None

    @property
    def ready_layers(self) -> int | None:
        """How many target layers of the translation under way can be read in the target buffer;
        None when it was refused or has failed.

        They are the translation's only if it ends as ``Translated``.
        """
        held = self._held.get("target")
        return 0 if held is None else held.memory.ready_layers

    def translate(
        self,
        cache: AnyCache,
        request: TranslateRequest,
        probe: AnyCache | None,
        on_layer: OnLayer | None = None,
    ) -> Steps[Outcome | None]:
        """The outcome, its tensors views of the target buffer; None: use the body.

        Raises LayoutError when ``request`` does not describe ``cache`` and ``probe``.
        """
        tensors = Upload.of(cache, request, probe).tensors
        target_bytes = 0 if self._given_up else (yield from self._target_bytes(request))
        if not target_bytes:
            return None
        source = yield from self._lease("source", sum(part.nbytes for part in tensors))
        target = None if source is None else (yield from self._lease("target", target_bytes))
        if source is None or target is None:
            yield from self.release()  # one of the two is of no use to us, but may be to others
            return None
        yield partial(fill, source.memory.data, tensors)
        target.memory.ready_layers = 0
        coming = self._coming(target, request, on_layer)
        said = _document(request, source.id, target.id)
        response = yield Ask("POST", "/translate", said, coming)
        source.used_seconds = target.used_seconds = time.monotonic()
        outcome = self._outcome(response, request, target)
        if coming is not None and isinstance(outcome, Translated):
            coming()  # what became ready since it was last asked
        return outcome

    def release(self) -> Steps[None]:
        """Give both leases back; tensors that lie in them stay what they are."""
        ids = [held.id for held in self._held.values()]
        self._held.clear()  # unmapped first: the memory counts until it is
        for lease_id in ids:
            yield Ask("DELETE", f"/buffers/{lease_id}")

    def _coming(
        self, target: Held, request: TranslateRequest, on_layer: OnLayer | None
    ) -> Coming | None:
        if on_layer is None:
            return None
        info = self._targets[request.target.model, request.target.version]
        return Coming(target.memory, request, info, on_layer)

    def _target_bytes(self, request: TranslateRequest) -> Steps[int]:
        """Bytes of an answer with all tokens; 0 for a model that the service does not know."""
        key = request.target.model, request.target.version
        if key not in self._targets:
            response = yield Ask("GET", "/mappers")
            self._targets |= _known_targets(response)
        found = self._targets.get(key)
        if found is None:
            self.why_not = "pair_not_found"
            return 0
        sizes = found.num_layers, request.tokens, found.num_kv_heads, found.head_dim
        geometry = Geometry(*sizes, request.block_tokens)
        return Side(request.layout, geometry, request.target.storage).nbytes

    def _lease(self, role: Role, nbytes: int) -> Steps[Held | None]:
        """A lease of at least this size that has not ended; None where there is none to be had."""
        held = self._held.get(role)
        if held is not None and held.memory.nbytes >= nbytes and (yield from self._alive(held)):
            return held
        if held is not None:
            lease_id = self._held.pop(role).id
            held = None  # unmapped first: the memory counts until it is
            yield Ask("DELETE", f"/buffers/{lease_id}")
        response = yield Ask("POST", "/buffers", {"nbytes": nbytes, "kind": self._kind})
        info = self._granted(response)
        if info is None:
            return None
        memory = yield partial(_fetched, self._socket or info.socket, info)
        if isinstance(memory, KVTranslatorError):
            self.why_not, self._given_up = memory.code, True
            yield Ask("DELETE", f"/buffers/{info.id}")
            return None
        self._held[role] = Held(info.id, memory, info.ttl_seconds, time.monotonic())
        self.why_not = None
        return self._held[role]

    def _alive(self, held: Held) -> Steps[bool]:
        """Whether the lease lasts; the service is asked, which renews it, when half is over."""
        if time.monotonic() - held.used_seconds < held.ttl_seconds / 2:
            return True
        response = yield Ask("GET", f"/buffers/{held.id}")
        held.used_seconds = time.monotonic()
        return bool(response.status_code == 200)

    def _granted(self, response: httpx.Response) -> BufferInfo | None:
        try:
            if response.status_code == 201:
                return BufferInfo.model_validate_json(response.content)
        except ValidationError:
            self.why_not, self._given_up = "bad_answer", True
            return None
        said = refusal(response.status_code, response.headers, response.content)
        self.why_not = said.reason
        # A budget is free again some time; whether there are buffers at all does not change.
        self._given_up = not said.retryable and response.status_code != 413
        return None

    def _outcome(
        self, response: httpx.Response, request: TranslateRequest, target: Held
    ) -> Outcome | None:
        try:
            decision = response.headers.get("kvt-decision")
            if response.status_code == 200 and decision == "translate":
                return translated_in(
                    target.memory.data, target.id, response.content, response.headers, request
                )
            said = refusal(response.status_code, response.headers, response.content)
        except BadAnswer as error:
            return bad_answer(error, response.status_code)
        if said.code == "buffer_not_found":  # the service was started again
            self._held.clear()
            self.why_not = said.code
            return None
        return said


def fill(memory: Tensor, tensors: tuple[Tensor, ...]) -> None:
    """Write tensors end to end into uint8 memory, from any device and with any strides."""
    at = 0
    for tensor in tensors:
        part, at = memory[at : at + tensor.nbytes], at + tensor.nbytes
        if part.storage_offset() % tensor.itemsize:
            part.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
        else:
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    if memory.is_cuda:  # another process reads it, which no stream of ours makes wait
        torch.cuda.synchronize(memory.device)


def _fetched(socket: str, info: BufferInfo) -> Memory | KVTranslatorError:
    memory: Memory
    try:
        if info.kind == "cuda":
            memory = fetch_slice(socket, info.id, info.nbytes, open_slice)
        else:
            memory = fetch(socket, info.id, info.nbytes)
    except KVTranslatorError as error:
        return error
    memory.close()
    return memory


def _known_targets(response: httpx.Response) -> dict[tuple[str, str], SideInfo]:
    try:
        found = MapperList.model_validate_json(response.content).mappers
    except ValidationError:
        return {}
    sides = [mapper.target for mapper in found if mapper.target is not None]
    return {(side.model, side.version): side for side in sides}


def _document(request: TranslateRequest, source: str, target: str) -> dict[str, Any]:
    document = request.model_dump(mode="json", exclude_defaults=True)
    document["source"]["buffer"] = source
    document["target"]["buffer"] = target
    return document
