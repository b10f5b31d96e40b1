"""A cache in one lease, its translation into another: nothing of either goes through HTTP.

The source is read where its client wrote it, layer by layer, and the target is computed where its
client will read it. A client that writes into either meanwhile spoils its own answer and no
other: sizes and offsets are ours, the numbers of a cache are only ever computed with.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Self

import torch
from starlette.responses import Response
from torch import Tensor

from service import answers
from service.allocators import Memory
from service.body import ClientGone
from service.buffers import Buffers
from service.call import Call
from service.errors import Problem
from service.output import POISON
from service.schemas import BufferRequest, read_document
from service.settle import settle
from service.side import Side
from service.space import Space
from service.state import buffers_of
from service.stream import Running
from service.transport import Approved
from service.wire import laid_out
from service.worker import ended

MAX_DOCUMENT_BYTES = 64 * 1024


class BufferTransport:
    """The request document names two leases of the client that sends it."""

    def __init__(self, call: Call, buffers: Buffers, request: BufferRequest) -> None:
        self._call, self._buffers = call, buffers
        self.request: BufferRequest = request
        self._target: Memory | None = None
        self._given = False

    @classmethod
    async def read(cls, call: Call) -> Self:
        """The request document, which is the whole body. Raises ``Problem`` or ``ClientGone``."""
        buffers = await buffers_of(call.service)
        raw = await call.body.rest(MAX_DOCUMENT_BYTES)
        return cls(call, buffers, read_document(BufferRequest, raw))

    def reserve(self, sent: list[Side], target: Side, held: AsyncExitStack) -> Space:
        """Both leases, which cannot end while they are ``held``; no layer is ready."""
        tensors, sent_bytes = laid_out(part for side in sent for part in side.tensors)
        source = self._buffers.find(self.request.source.buffer, self._call.client)
        wanted = self._buffers.find(self.request.target.buffer, self._call.client)
        if source is wanted:
            raise Problem("bad_buffer", "source and target are two buffers")
        received = held.enter_context(self._buffers.reading(source))
        answer = held.enter_context(self._buffers.writing(wanted))
        _check_size("source", received, sent_bytes)
        _check_size("target", answer, target.nbytes)
        answer.ready_layers, self._target = 0, answer
        space = Space(received.data[:sent_bytes], answer.data[: target.nbytes], tensors)
        held.push_async_callback(self._leave, space)
        return space

    async def ingest(
        self, space: Space, milestones_bytes: Sequence[int], arrived: Callable[[int], None]
    ) -> None:
        """Everything is there already."""
        arrived(space.received.numel())

    async def answer(self, approved: Approved, held: AsyncExitStack) -> Response:
        """Say in the target's memory how far it is, and in the answer that all of it is there."""
        running = approved.running
        await self._follow(running)
        receipt = answers.translated_receipt(approved, self.request.target.buffer)
        approved.given()
        settle(approved, None)
        self._given = True
        # Before the client hears of it, so that it can give the leases back at once.
        await held.aclose()
        return receipt

    async def _follow(self, running: Running) -> None:
        while not running.future.done():
            self._publish(running)
            if running.gone.done():
                raise ClientGone
            await running.emission.news(running.gone, running.future)
        running.future.result()
        if running.gone.done():  # there is nobody to whom it could be given
            raise ClientGone
        if running.work.refusal is not None:  # against what the content gate had proven
            raise Problem("internal_invariant", "a layer came out with values that are not finite")
        done, layers = running.work.ready_layers, running.work.target.geometry.layers
        if done != layers:
            raise Problem("internal_invariant", f"{done} of {layers} layers were translated")
        self._publish(running)

    def _publish(self, running: Running) -> None:
        if self._target is not None:
            self._target.ready_tokens = running.work.target.geometry.tokens
            self._target.ready_layers = running.work.ready_layers

    async def _leave(self, space: Space) -> None:
        """Unless the answer is given, say where it would lie that there is none, and leave nothing
        of it there; the device has stopped writing, and the lease is still ours."""
        if self._given or self._target is None:
            return
        self._target.ready_layers = None
        if space.begun:
            poisoned = asyncio.get_running_loop().run_in_executor(None, _poison, space.answer)
            await ended(poisoned)
            poisoned.result()


def _poison(answer: Tensor) -> None:
    answer.fill_(POISON)
    if answer.is_cuda:  # not later, when the lease may be somebody else's
        torch.cuda.synchronize(answer.device)


def _check_size(side: str, memory: Memory, needed_bytes: int) -> None:
    if memory.nbytes < needed_bytes:
        raise Problem(
            "bad_buffer",
            f"{side}: {needed_bytes} bytes are needed, the buffer has {memory.nbytes}",
            needed_bytes=needed_bytes,
        )
