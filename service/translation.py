"""One translation: the work that the device thread does on the memory of one request."""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mappers.cache import DTYPES, KVCache, Layer
from mappers.errors import NonFinite
from mappers.probe import translation_error
from mappers.sample import largest
from mappers.stored import AnyCache, restored
from service.copied_output import output_for
from service.errors import Problem
from service.gate import Ruling
from service.loaded import Loaded
from service.output import Output
from service.probing import Probing
from service.reading_order import ReadingOrder
from service.received import Received
from service.schemas import TranslateRequest
from service.side import Side
from service.space import Space
from service.turns import Steps
from service.worker import Emission, WorkingAhead

# A rotation adds at most two numbers, and scaling factors (YaRN) lie well below 4.
ROTARY_MARGIN = 8.0


class Translation:
    """The memory of one request and what the device thread does with it.

    ``space``: the source and the probe as received and the target as sent, once each. ``run`` ends
    with ``refusal`` None, or with a reason from the closed list; ``facts`` are what the content
    gate measured. With a probe ``target`` is the largest that the answer can be, until the probe's
    error is known and the gate has ruled again: that is ``ruling`` then.
    """

    def __init__(
        self,
        loaded: Loaded,
        source: Side,
        target: Side,
        space: Space,
        request: TranslateRequest,
        domain: str | None,
        prefix: KVCache | None,
        probing: Probing | None = None,
    ) -> None:
        self.target, self.space = target, space
        self._loaded, self._probing = loaded, probing
        self._request, self._domain, self._prefix = request, domain, prefix
        self._source = Received(source, space.received, space.tensors, request.start_position)
        self._order = ReadingOrder.of(loaded.mapper)
        self._inspection = loaded.content.begin(request)
        self._output: Output | None = None
        self._layers: Iterator[Layer | None] = iter(())
        self._overflowed = False
        self.seconds: dict[str, float] = {}
        self._paused_seconds = 0.0
        self.facts: dict[str, float | str] = {}
        self.refusal: str | None = None
        self.ruling: Ruling | None = None
        self.proven_finite = False
        self.ready_layers = 0

    @property
    def output(self) -> memoryview:
        """The answer's bytes, after its header."""
        answer: memoryview = self._answer.numpy().data
        return answer

    @property
    def complete(self) -> bool:
        """Whether all target layers are written."""
        return self.refusal is None and self.ready_layers == self.target.geometry.layers

    @property
    def milestones_bytes(self) -> list[int]:
        """Ends of the parts of ``space.received`` with which there is something more to do."""
        return sorted({*self._source.needed_bytes, self.space.received.numel()})

    def run(self, emission: Emission, too_late: Callable[[], bool], ahead: WorkingAhead) -> Steps:
        """For the device thread: look at each source layer when it has arrived, rule when all have,
        translate. While some are still to come, target layers that need none of them are
        translated; nobody sees them before the ruling. ``too_late`` is asked before that."""
        try:
            yield from self._look(emission, ahead)
            ahead.give_back(self)
            if too_late():
                self.refusal = "would_miss_deadline"
                return
            self._rule()
            if self.refusal is None:
                yield from self._translate(self.target.geometry.layers, emission)
        except NonFinite:
            self.refusal = "non_finite"
        finally:
            ahead.give_back(self)
            self._layers = iter(())  # a client that reads slowly is to hold no workspace
            self._leave_output()

    def _look(self, emission: Emission, ahead: WorkingAhead) -> Steps:
        """Show the content gate all layers, as they arrive."""
        for layer, needed_bytes in enumerate(self._source.needed_bytes):
            yield from self._arrival(needed_bytes)
            with self._timed("content_gate"):
                self._inspection.add(*self._source.layer(layer))
            yield from self._work_ahead(emission, ahead)
        yield from self._arrival(self.space.received.numel())

    def _arrival(self, needed_bytes: int) -> Steps:
        """Let others have the device until so many bytes are there."""
        while self.space.arrived_bytes < needed_bytes:
            yield lambda: self.space.arrived_bytes >= needed_bytes

    def _work_ahead(self, emission: Emission, ahead: WorkingAhead) -> Steps:
        """Translate what can be, unless a ruling is as good as there: it comes first."""
        while self._may_work_ahead() and ahead.take(self):
            try:
                yield from self._translate(self.ready_layers + 1, emission)
            except NonFinite:
                self._overflowed = True  # the gate may know a better reason

    def _may_work_ahead(self) -> bool:
        """Whether there is a layer that can be translated before all of the source is here.

        With a probe there is none. It says how many rows the answer has, which decides where each
        layer lies and how its products are cut, so all would have to be guessed, and moved or made
        again where the guess was wrong, with other bits. Scales over all tokens take its rows in.
        And it is compared with a translation of source layers that would be gone by then.
        """
        layers = self.target.geometry.layers
        if self.space.complete or self._probing is not None or self._overflowed:
            return False
        if self.ready_layers == layers:
            return False
        return self._order.needed_layers[self.ready_layers] <= self._inspection.layers

    def _rule(self) -> None:
        with self._timed("content_gate"):
            inspected = self._inspection.result(self._domain)
            overflow = "non_finite" if self._overflowed else None
            self.refusal, self.facts = inspected.reason or overflow, inspected.facts
            self.proven_finite = self._bounded(inspected.largest)
            if self._probing is not None and self.refusal is None:
                self._compare(self._probing)

    def _compare(self, probing: Probing) -> None:
        """Have the gate rule again, now that the probe shows how far off the translation is."""
        sent: AnyCache = probing.side.read(self.space.received, self.space.tensors, 0)
        native = restored(sent)
        if not bool(largest(native).isfinite().all()):
            self.refusal = "non_finite"
            return
        error = translation_error(probing.queries, self._loaded.translator, self._source, native)
        self.facts["probe_error"] = error
        self.ruling = probing.rule(error)
        self.refusal = self.ruling.reason
        if self.refusal is None:
            self.target = self.target.with_tokens(self.ruling.tokens)
            self._prefix = native

    def _translate(self, layers: int, emission: Emission) -> Steps:
        """Have so many target layers ready, and say so of each."""
        output = self._output or self._begin()
        emission.advance(output.final_bytes(self.ready_layers))
        with self._timed("translate"):
            while self.ready_layers < layers:
                if output.ended_layers < layers:
                    yield from self._next_layer(output)
                else:
                    output.arrive()
                self.ready_layers = output.ready_layers
                last = self.ready_layers == layers
                emission.advance(output.final_bytes(self.ready_layers), last=last)

    def _begin(self) -> Output:
        translator = self._loaded.translator
        output = self._output = output_for(self.target, self._answer, translator.device)
        self._layers = translator.steps(
            self._source.layers(),
            self._source.positions,
            prefix=self._prefix,
            tokens=self.target.geometry.tokens,
            dtype=self._emitted_dtype(),
            answer=output.in_place(translator.device),
            arrived=lambda layer: self._source.needed_bytes[layer] <= self.space.arrived_bytes,
        )
        self.space.begun = True
        return output

    def _next_layer(self, output: Output) -> Steps:
        """Translate it, and let go of the source layers that were read for the last time."""
        yield from self._pause()
        done = output.ended_layers
        output.begin(done)
        for layer in self._layers:
            if layer is not None:
                output.end(done, *layer)
                for read in self._order.expiring[done]:
                    for begin, end in self._source.spans[read]:
                        self.space.let_go(begin, end)
                return
            yield from self._pause()
        layers = self.target.geometry.layers
        raise Problem("internal_invariant", f"{done} of {layers} layers were translated")

    def _leave_output(self) -> None:
        """Nothing is written into the answer's memory any more."""
        if self._output is not None:
            self._output.arrive()
            self._output = None

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Count what the block takes, without what others took in its pauses."""
        started, paused = time.perf_counter(), self._paused_seconds
        try:
            yield
        finally:
            own = time.perf_counter() - started - (self._paused_seconds - paused)
            self.seconds[stage] = self.seconds.get(stage, 0.0) + own

    def _pause(self) -> Steps:
        """Let others have the device."""
        started = time.perf_counter()
        yield None
        self._paused_seconds += time.perf_counter() - started

    def _bounded(self, largest: float) -> bool:
        """Whether no value of the answer can leave the range of its dtype."""
        bound = ROTARY_MARGIN * (self._loaded.gain * largest * ROTARY_MARGIN + self._loaded.offset)
        return bound < torch.finfo(self._emitted_dtype()).max

    @property
    def _answer(self) -> Tensor:
        return self.space.answer[: self.target.nbytes]

    def _emitted_dtype(self) -> torch.dtype:
        # 8-bit numbers are rounded from float32 when they are written; nothing computes in them.
        storage = self.target.storage
        return torch.float32 if storage.eight_bits else DTYPES[storage.dtype]
