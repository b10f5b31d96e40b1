"""A cache in one lease, its translation into another: nothing of either goes through HTTP.

The source is read where its client wrote it, layer by layer, and the target is written where its
client will read it. A client that writes into a source meanwhile spoils its own answer and no
other: sizes and offsets are ours, the numbers of a cache are only ever computed with.
"""

from contextlib import AsyncExitStack
from typing import Self

from starlette.responses import Response

from service import answers
from service.allocators import Memory
from service.body import ClientGone
from service.buffers import Buffers
from service.call import Call
from service.errors import Problem
from service.schemas import BufferRequest, read_document
from service.settle import settle
from service.side import Side
from service.state import buffers_of
from service.stream import Running
from service.translation import Space
from service.transport import Approved
from service.wire import laid_out

MAX_DOCUMENT_BYTES = 64 * 1024


class BufferTransport:
    """The request document names two leases of the client that sends it."""

    def __init__(self, call: Call, buffers: Buffers, request: BufferRequest) -> None:
        self._call, self._buffers = call, buffers
        self.request: BufferRequest = request
        self._target: Memory | None = None

    @classmethod
    async def read(cls, call: Call) -> Self:
        """The request document, which is the whole body. Raises ``Problem`` or ``ClientGone``."""
        buffers = await buffers_of(call.service)
        raw = await call.body.rest(MAX_DOCUMENT_BYTES)
        return cls(call, buffers, read_document(BufferRequest, raw))

    def reserve(self, sent: list[Side], target: Side, held: AsyncExitStack) -> Space:
        """Both leases, which cannot end while they are ``held``; the counter starts at 0."""
        tensors, sent_bytes = laid_out(part for side in sent for part in side.tensors)
        source = self._buffers.find(self.request.source.buffer, self._call.client)
        wanted = self._buffers.find(self.request.target.buffer, self._call.client)
        if source is wanted:
            raise Problem("bad_buffer", "source and target are two buffers")
        received = held.enter_context(self._buffers.reading(source))
        answer = held.enter_context(self._buffers.writing(wanted))
        _check_size("source", received, sent_bytes)
        _check_size("target", answer, target.nbytes)
        answer.ready_layers = 0
        self._target = answer
        return Space(received.data[:sent_bytes], answer.data[: target.nbytes], tensors)

    async def ingest(self, space: Space) -> None:
        """Everything is there already."""

    async def answer(self, approved: Approved, held: AsyncExitStack) -> Response:
        """Say in the target's memory how far it is, and in the answer that all of it is there."""
        running = approved.running
        try:
            await self._follow(running)
        except BaseException:
            self._publish(0)
            raise
        settle(approved.judged, running, None)
        # Before the client hears of it, so that it can give the leases back at once.
        await held.aclose()
        return answers.translated_receipt(approved, self.request.target.buffer)

    async def _follow(self, running: Running) -> None:
        while not running.future.done():
            self._publish(running.work.ready_layers)
            if running.gone.done():
                raise ClientGone
            await running.emission.news(running.gone, running.future)
        running.future.result()
        if running.work.refusal is not None:  # against what the content gate had proven
            raise Problem("internal_invariant", "a layer came out with values that are not finite")
        self._publish(running.work.ready_layers)

    def _publish(self, layers: int) -> None:
        if self._target is not None:
            self._target.ready_layers = layers


def _check_size(side: str, memory: Memory, needed_bytes: int) -> None:
    if memory.nbytes < needed_bytes:
        raise Problem(
            "bad_buffer",
            f"{side}: {needed_bytes} bytes are needed, the buffer has {memory.nbytes}",
            needed_bytes=needed_bytes,
        )
