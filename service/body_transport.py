"""A cache in the body of a request, its translation in the body of the answer."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from starlette.responses import Response

from service import answers
from service.call import Call
from service.errors import Problem
from service.pages import Pages
from service.schemas import TranslateRequest, read_request
from service.settle import settle
from service.side import Side, check_tensors
from service.space import Space
from service.stream import Stream
from service.transport import Approved
from service.wire import LENGTH_BYTES, Header, header_length, parse_header


class BodyTransport:
    """``header`` is the front of the body; its tensors have not been read yet."""

    def __init__(self, call: Call, header: Header, header_bytes: int) -> None:
        self._call, self._header, self._header_bytes = call, header, header_bytes
        self.request: TranslateRequest = read_request(header.metadata["kvt"])

    @classmethod
    async def read(cls, call: Call) -> Self:
        """The front of the body. Raises ``Problem`` or ``ClientGone``."""
        limit = call.service.settings.max_header_bytes
        length = header_length(await call.body.exactly(LENGTH_BYTES), limit=limit)
        if call.declared_bytes is not None and LENGTH_BYTES + length > call.declared_bytes:
            raise Problem("bad_safetensors", "the header is longer than the body")
        header = parse_header(await call.body.exactly(length))
        if header.metadata.keys() != {"kvt"}:
            raise Problem(
                "bad_metadata", "__metadata__ holds the request document as kvt, and no more"
            )
        return cls(call, header, LENGTH_BYTES + length)

    def reserve(self, sent: list[Side], target: Side, held: AsyncExitStack) -> Space:
        """Memory of our own, within the budget."""
        check_tensors(self._header, *sent)
        sent_bytes = sum(side.nbytes for side in sent)
        self._check_length(self._header_bytes + sent_bytes)
        held.enter_context(self._call.service.worker.memory(sent_bytes + target.nbytes))
        try:
            pages = Pages(sent_bytes)
            answer = torch.from_numpy(np.empty(target.nbytes, np.uint8))
        except (MemoryError, OSError) as error:
            raise Problem("out_of_memory", "there is no memory for this request now") from error
        return Space(pages.data, answer, self._header.tensors, let_go=pages.let_go)

    def _check_length(self, expected: int) -> None:
        declared = self._call.declared_bytes
        if declared is not None and declared != expected:
            code = "truncated_body" if declared < expected else "bad_safetensors"
            raise Problem(code, f"the tensors end at byte {expected}, the body at {declared}")

    async def ingest(
        self, space: Space, milestones_bytes: Sequence[int], arrived: Callable[[int], None]
    ) -> None:
        """Read the rest of the body, to where it lies from now on."""
        data = space.received.numpy().data
        for begin, end in pairwise((0, *milestones_bytes)):
            await self._call.body.into(data[begin:end])
            arrived(end)
        await self._call.body.end()

    async def answer(self, approved: Approved, held: AsyncExitStack) -> Response:
        """The answer; from here on it holds what was ``held``, which a fault before releases."""
        running, settings = approved.running, self._call.service.settings
        head, headers = answers.translated_head(approved, running.work.target)
        return Stream(
            head,
            headers,
            running=running,
            held=held.pop_all(),
            given=approved.given,
            ended=lambda cut: settle(approved, cut),
            grace_seconds=settings.body_grace_seconds,
            bytes_per_second=settings.body_bytes_per_second,
        )
