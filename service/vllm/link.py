"""The connector's line to the service: leases of shared memory, and translations between them.

All of it may wait, so it runs on threads of the connector and never on the engine's scheduler.
"""

import contextlib
import os
from dataclasses import dataclass

import httpx
from pydantic import ValidationError

from mappers.errors import KVTranslatorError
from service.answer import BadAnswer, Translated, refusal, translated_in
from service.buffer_socket import fetch
from service.memfd import SharedMemory
from service.schemas import BufferInfo, TranslateRequest
from service.vllm.errors import NotLoaded
from service.vllm.jobs import Shared

_HEADERS = {"accept-encoding": "identity"}


@dataclass(frozen=True, eq=False)
class Leased:
    """A lease, mapped here; its descriptor stays open until ``close``, for the engine's workers."""

    id: str
    memory: SharedMemory

    @property
    def shared(self) -> Shared:
        """As a worker finds it."""
        return Shared(os.getpid(), self.memory.descriptor, self.memory.nbytes)

    def close(self) -> None:
        """Let go of it; the lease itself goes on."""
        self.memory.close()


class Link:
    """``socket``: where the service's socket is for this process, if not where the service says."""

    def __init__(self, url: str, timeout_seconds: float, socket: str | None = None) -> None:
        self._socket = socket
        self._http = httpx.Client(
            base_url=url, timeout=httpx.Timeout(timeout_seconds), headers=_HEADERS
        )

    def lease(self, nbytes: int) -> Leased:
        """A new lease. Raises NotLoaded."""
        return self._mapped(self._info("POST", "/buffers", {"nbytes": nbytes}))

    def find(self, lease_id: str, nbytes: int) -> Leased:
        """A lease that someone else on this host has filled. Raises NotLoaded."""
        info = self._info("GET", f"/buffers/{lease_id}")
        if info.nbytes != nbytes:
            raise NotLoaded("bad_handle", "the lease is of another size than its handle says")
        return self._mapped(info)

    def release(self, leased: Leased) -> None:
        """Give a lease back, whatever has become of it."""
        leased.close()
        self.end(leased.id)

    def end(self, lease_id: str) -> None:
        """The same of one that is not mapped here."""
        with contextlib.suppress(httpx.HTTPError):  # it ends by itself
            self._http.delete(f"/buffers/{lease_id}")

    def translate(self, request: TranslateRequest, source: str, target: Leased) -> Translated:
        """Translate what lies in the lease ``source`` into ``target``. Raises NotLoaded for any
        other answer than a translation, and for none."""
        document = request.model_dump(mode="json", exclude_defaults=True)
        document["source"]["buffer"], document["target"]["buffer"] = source, target.id
        response = self._ask("POST", "/translate", document)
        try:
            if _is_translation(response):
                memory, headers = target.memory.data, response.headers
                return translated_in(memory, target.id, response.content, headers, request)
            raise _refused(response)
        except BadAnswer as error:
            raise NotLoaded("bad_answer", str(error)) from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _ask(self, method: str, path: str, document: object = None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=document)
        except httpx.HTTPError as error:
            raise NotLoaded("unreachable", type(error).__name__) from error

    def _info(self, method: str, path: str, document: object = None) -> BufferInfo:
        response = self._ask(method, path, document)
        if response.status_code not in (200, 201):
            raise _refused(response)
        try:
            return BufferInfo.model_validate_json(response.content)
        except ValidationError as error:
            raise NotLoaded("bad_answer", "the service's lease is not valid") from error

    def _mapped(self, info: BufferInfo) -> Leased:
        try:
            return Leased(info.id, fetch(self._socket or info.socket, info.id, info.nbytes))
        except KVTranslatorError as error:
            raise NotLoaded(error.code, str(error)) from error


def _is_translation(response: httpx.Response) -> bool:
    return response.status_code == 200 and response.headers.get("kvt-decision") == "translate"


def _refused(response: httpx.Response) -> NotLoaded:
    try:
        said = refusal(response.status_code, response.headers, response.content)
    except BadAnswer as error:
        return NotLoaded("bad_answer", str(error))
    return NotLoaded(said.reason, said.detail)
