"""HTTP clients of the service, blocking and asynchronous, with the same methods.

Whatever happens, ``translate`` says what to do next: use the cache, or prefill. A refusal, a
network fault and an answer that is cut short or not what was asked for are all ``Reprefill``,
unless ``strict`` asks for an exception. Nothing is retried: a request carries a whole cache, and
by the time that it could be sent again the target could have prefilled.

    with Client("http://127.0.0.1:8080") as client:
        match client.translate(cache, request):
            case Translated(cache=translated, receipt=receipt):
                ...  # the target reads receipt.native_tail tokens over it
            case Reprefill(reason=reason):
                ...
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from mappers.errors import KVTranslatorError
from mappers.stored import AnyCache
from service.allocators import Kind
from service.answer import (
    BadAnswer,
    OnLayer,
    Outcome,
    Reprefill,
    Translated,
    bad_answer,
    open_answer,
    refusal,
    unreachable,
)
from service.buffer_pair import Ask, BufferPair, Steps
from service.deadline import stated
from service.feedback import FeedbackReceipt, Lists, posted_feedback
from service.schemas import Health, Info, MapperList, Plan, Receipt, TranslateRequest
from service.tail_feedback import Suffix, SuffixReceipt, posted_tail
from service.upload import Upload, announcing

__all__ = ["AsyncClient", "Client", "NotTranslated", "Outcome", "Reprefill", "Translated"]

TIMEOUT = httpx.Timeout(60.0, connect=5.0)
LOOK_SECONDS = 0.001
"""How often a buffer is looked at for target layers that have become ready."""
_HEADERS = {"accept-encoding": "identity"}
Document = TypeVar("Document", bound=BaseModel)
Result = TypeVar("Result")


class NotTranslated(KVTranslatorError):
    """Anything but a usable answer; ``outcome`` says what is known of it."""

    code = "not_translated"

    def __init__(self, outcome: Reprefill) -> None:
        super().__init__(f"{outcome.reason}: {outcome.detail}")
        self.outcome = outcome


class Client:
    """A blocking client; it keeps its connections, so make one and share it between threads.

    ``timeout`` is httpx's: seconds without a byte, not for the whole answer. ``options`` go to
    ``httpx.Client`` (``transport``, ``verify``, ``headers``, ...). With ``digest`` a cache goes out
    with its Content-Digest, so that one that is damaged on the way is refused.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout: httpx.Timeout | float = TIMEOUT,
        digest: bool = False,
        **options: Any,
    ) -> None:
        self._digest = digest
        self._http = httpx.Client(base_url=base_url, timeout=timeout, **options)

    def translate(
        self,
        cache: AnyCache,
        request: TranslateRequest,
        *,
        probe: AnyCache | None = None,
        buffers: BufferPair | None = None,
        on_layer: OnLayer | None = None,
        deadline_seconds: float | None = None,
        strict: bool = False,
    ) -> Outcome:
        """Send ``cache`` (source, [T, H_s, D_s] a layer), get the target's.

        Both are stored as ``request`` says (``mappers.stored.store`` makes 8-bit numbers).
        ``probe`` is the target's own KV of the first tokens, [64, H_t, D_t] a layer: the bound gets
        sharper, and those tokens of the answer are exactly these. With
        ``buffers`` it goes through shared memory where that can be had, and through the body where
        not. ``on_layer`` is called with each target layer as soon as it is here, while later ones
        are computed. What would take longer than ``deadline_seconds`` is a Reprefill at once.
        Raises LayoutError when ``request`` does not describe ``cache``; with ``strict``,
        NotTranslated instead of returning Reprefill.
        """
        request = announcing(request, probe)
        headers = stated(deadline_seconds)
        outcome: Outcome | None = None
        try:
            if buffers is not None:
                steps = buffers.translate(cache, request, probe, on_layer)
                outcome = self._through(steps, headers)
            if outcome is None:
                upload = Upload.of(cache, request, probe)
                outcome = self._by_body(upload, request, on_layer, headers)
        except httpx.HTTPError as error:
            outcome = unreachable(error)
        return _checked(outcome, strict)

    @contextlib.contextmanager
    def buffers(self, *, socket: str | None = None, kind: Kind = "host") -> Iterator[BufferPair]:
        """Shared memory for translations in this block, leased when first used, given back at the
        end. ``socket`` overrides where the service says that its socket is; ``kind`` cuda: memory
        of the GPU that both use."""
        pair = BufferPair(socket, kind)
        try:
            yield pair
        finally:
            with contextlib.suppress(httpx.HTTPError):  # the leases end by themselves
                self._through(pair.release())

    def _by_body(
        self,
        upload: Upload,
        request: TranslateRequest,
        on_layer: OnLayer | None,
        headers: dict[str, str],
    ) -> Outcome:
        digest = upload.digest_headers() if self._digest else {}
        headers = {**_HEADERS, **upload.headers, **digest, **headers}
        with self._http.stream(
            "POST", "/translate", content=iter(upload), headers=headers
        ) as response:
            return self._read(response, request, on_layer)

    def _through(self, steps: Steps[Result], headers: dict[str, str] | None = None) -> Result:
        """Do what a generator asks for, until it has its result."""
        found: Any = None
        while True:
            try:
                step = steps.send(found)
            except StopIteration as end:
                result: Result = end.value
                return result
            if isinstance(step, Ask):
                found = self._ask(step, headers)
            else:
                found = step()

    def _ask(self, ask: Ask, headers: dict[str, str] | None) -> httpx.Response:
        send = partial(self._http.request, ask.method, ask.path, json=ask.document, headers=headers)
        if ask.meanwhile is None:
            return send()
        with ThreadPoolExecutor(1, "kvt-client") as pool:
            running = pool.submit(send)
            while not wait([running], LOOK_SECONDS).done:
                ask.meanwhile()
            return running.result()

    def _read(
        self, response: httpx.Response, request: TranslateRequest, on_layer: OnLayer | None
    ) -> Outcome:
        try:
            answer = open_answer(response.status_code, response.headers, request, on_layer)
            for chunk in response.iter_bytes():
                answer.feed(chunk)
            return answer.outcome()
        except BadAnswer as error:
            return bad_answer(error, response.status_code)

    def feedback(
        self,
        receipt: Receipt,
        *,
        kl: float | None = None,
        native: Lists | None = None,
        translated: Lists | None = None,
    ) -> FeedbackReceipt:
        """Report what the answer was worth, when its ``receipt.shadow`` asks for it.

        ``kl`` in nats a token (NaN is taken as the worst), or for each position the lists of
        ``(token id, log-probability)``. May be repeated. Raises ValueError for an answer that is
        not to be measured, NotTranslated when the service does not take it.
        """
        posted = posted_feedback(receipt, kl, native, translated)
        return self._document(FeedbackReceipt, "POST", "/feedback", **posted)

    def suffix(
        self, answer: Translated, *, tail_nll: float, source_tail_nll: float | None = None
    ) -> Suffix:
        """What the NLL of the native tail, in nats a token, says of the answer: keep it or prefill.

        The mean over the tail's tokens but the first, as the target read them over the answer; the
        source's of the same tokens makes it sharper. May be repeated. Raises ValueError for an
        answer without ``tail_token``, NotTranslated when the service does not take it.
        """
        posted = posted_tail(answer.answer_id, answer.tail_token, tail_nll, source_tail_nll)
        receipt = self._document(SuffixReceipt, "POST", "/feedback", **posted)
        return receipt.suffix

    def plan(self, request: TranslateRequest) -> Plan:
        """The decision so far, without tensors. Raises NotTranslated when there is no plan."""
        body = request.model_dump(mode="json", exclude_defaults=True)
        return self._document(Plan, "POST", "/translate/plan", json=body)

    def mappers(self) -> MapperList:
        """The mappers that the service has. Raises NotTranslated."""
        return self._document(MapperList, "GET", "/mappers")

    def info(self) -> Info:
        """What the service is and its limits. Raises NotTranslated."""
        return self._document(Info, "GET", "/info")

    def health(self) -> Health:
        """Whether it takes requests now. Raises NotTranslated, also while it does not."""
        return self._document(Health, "GET", "/readyz")

    def _document(self, kind: type[Document], method: str, path: str, **body: Any) -> Document:
        try:
            response = self._http.request(method, path, **body)
        except httpx.HTTPError as error:
            raise NotTranslated(unreachable(error)) from error
        return _parsed(kind, response)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio. A layer that is not contiguous is copied on the event loop."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout: httpx.Timeout | float = TIMEOUT,
        digest: bool = False,
        **options: Any,
    ) -> None:
        self._digest = digest
        self._http = httpx.AsyncClient(base_url=base_url, timeout=timeout, **options)

    async def translate(
        self,
        cache: AnyCache,
        request: TranslateRequest,
        *,
        probe: AnyCache | None = None,
        buffers: BufferPair | None = None,
        on_layer: OnLayer | None = None,
        deadline_seconds: float | None = None,
        strict: bool = False,
    ) -> Outcome:
        """As ``Client.translate``."""
        request = announcing(request, probe)
        headers = stated(deadline_seconds)
        outcome: Outcome | None = None
        try:
            if buffers is not None:
                steps = buffers.translate(cache, request, probe, on_layer)
                outcome = await self._through(steps, headers)
            if outcome is None:
                upload = Upload.of(cache, request, probe)
                outcome = await self._by_body(upload, request, on_layer, headers)
        except httpx.HTTPError as error:
            outcome = unreachable(error)
        return _checked(outcome, strict)

    @contextlib.asynccontextmanager
    async def buffers(
        self, *, socket: str | None = None, kind: Kind = "host"
    ) -> AsyncIterator[BufferPair]:
        """As ``Client.buffers``; copies and waiting are done on a thread."""
        pair = BufferPair(socket, kind)
        try:
            yield pair
        finally:
            with contextlib.suppress(httpx.HTTPError):
                await self._through(pair.release())

    async def _by_body(
        self,
        upload: Upload,
        request: TranslateRequest,
        on_layer: OnLayer | None,
        headers: dict[str, str],
    ) -> Outcome:
        digest = await asyncio.to_thread(upload.digest_headers) if self._digest else {}
        headers = {**_HEADERS, **upload.headers, **digest, **headers}
        async with self._http.stream(
            "POST", "/translate", content=aiter(upload), headers=headers
        ) as response:
            return await self._read(response, request, on_layer)

    async def _through(self, steps: Steps[Result], headers: dict[str, str] | None = None) -> Result:
        found: Any = None
        while True:
            try:
                step = steps.send(found)
            except StopIteration as end:
                result: Result = end.value
                return result
            if isinstance(step, Ask):
                found = await self._ask(step, headers)
            else:
                found = await asyncio.to_thread(step)

    async def _ask(self, ask: Ask, headers: dict[str, str] | None) -> httpx.Response:
        send = self._http.request(ask.method, ask.path, json=ask.document, headers=headers)
        running = asyncio.ensure_future(send)
        try:
            while ask.meanwhile is not None and not running.done():
                await asyncio.wait([running], timeout=LOOK_SECONDS)
                ask.meanwhile()
            return await running
        finally:
            running.cancel()

    async def _read(
        self, response: httpx.Response, request: TranslateRequest, on_layer: OnLayer | None
    ) -> Outcome:
        try:
            answer = open_answer(response.status_code, response.headers, request, on_layer)
            async for chunk in response.aiter_bytes():
                answer.feed(chunk)
            return answer.outcome()
        except BadAnswer as error:
            return bad_answer(error, response.status_code)

    async def feedback(
        self,
        receipt: Receipt,
        *,
        kl: float | None = None,
        native: Lists | None = None,
        translated: Lists | None = None,
    ) -> FeedbackReceipt:
        """As ``Client.feedback``."""
        posted = posted_feedback(receipt, kl, native, translated)
        return await self._document(FeedbackReceipt, "POST", "/feedback", **posted)

    async def suffix(
        self, answer: Translated, *, tail_nll: float, source_tail_nll: float | None = None
    ) -> Suffix:
        """As ``Client.suffix``."""
        posted = posted_tail(answer.answer_id, answer.tail_token, tail_nll, source_tail_nll)
        receipt = await self._document(SuffixReceipt, "POST", "/feedback", **posted)
        return receipt.suffix

    async def plan(self, request: TranslateRequest) -> Plan:
        """As ``Client.plan``."""
        body = request.model_dump(mode="json", exclude_defaults=True)
        return await self._document(Plan, "POST", "/translate/plan", json=body)

    async def mappers(self) -> MapperList:
        """As ``Client.mappers``."""
        return await self._document(MapperList, "GET", "/mappers")

    async def info(self) -> Info:
        """As ``Client.info``."""
        return await self._document(Info, "GET", "/info")

    async def health(self) -> Health:
        """As ``Client.health``."""
        return await self._document(Health, "GET", "/readyz")

    async def _document(
        self, kind: type[Document], method: str, path: str, **body: Any
    ) -> Document:
        try:
            response = await self._http.request(method, path, **body)
        except httpx.HTTPError as error:
            raise NotTranslated(unreachable(error)) from error
        return _parsed(kind, response)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


def _checked(outcome: Outcome, strict: bool) -> Outcome:
    if strict and isinstance(outcome, Reprefill):
        raise NotTranslated(outcome)
    return outcome


def _parsed(kind: type[Document], response: httpx.Response) -> Document:
    try:
        if response.status_code == 200:
            return kind.model_validate_json(response.content)
    except ValidationError as error:
        fault = BadAnswer(f"the answer is no {kind.__name__}")
        raise NotTranslated(bad_answer(fault, response.status_code)) from error
    raise NotTranslated(refusal(response.status_code, response.headers, response.content))
