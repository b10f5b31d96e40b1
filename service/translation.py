"""One translation: its sizes, its memory, and the work that the device thread does on it."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mappers.cache import DTYPES, KVCache
from mappers.errors import NonFinite
from mappers.layouts import Layout, read_layer, write_layer
from mappers.probe import translation_error
from mappers.quantize import INT8_LARGEST, in_turn, quantize
from mappers.sample import largest
from mappers.stored import AnyCache, restored
from service.errors import Problem
from service.gate import Ruling
from service.loaded import Loaded
from service.probing import Probing
from service.schemas import TranslateRequest
from service.side import Side
from service.turns import Steps
from service.wire import TensorSpec
from service.worker import Emission

# A rotation adds at most two numbers, and scaling factors (YaRN) lie well below 4.
ROTARY_MARGIN = 8.0
# Rows that were never written are found: every float dtype reads this byte, repeated, as NaN, and
# int8 the other as a number that is never stored.
POISON, INT8_POISON = 0xFF, 0x80


class Space(NamedTuple):
    """The memory of one request, uint8: ``received`` holds ``tensors``, ``answer`` the target's."""

    received: Tensor
    answer: Tensor
    tensors: Mapping[str, TensorSpec]


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
        self._loaded, self._source, self._probing = loaded, source, probing
        self._request, self._domain, self._prefix = request, domain, prefix
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

    def run(self, emission: Emission) -> Steps:
        """For the device thread: inspect what was sent, then translate layer by layer."""
        data, tensors = self.space.received, self.space.tensors
        source = self._source.read(data, tensors, self._request.start_position)
        try:
            with self._timed("content_gate"):
                self._inspect(source)
                if self._probing is not None and self.refusal is None:
                    self._compare(self._probing, source, self._probing.side.read(data, tensors, 0))
            if self.refusal is None:
                yield None
                with self._timed("translate"):
                    yield from self._translate(source, emission)
        except NonFinite:
            self.refusal = "non_finite"
            if not self.proven_finite:  # nothing of it is out, and nobody is to find half of it
                self._answer.fill_(POISON)

    def _inspect(self, source: AnyCache) -> None:
        inspection = self._loaded.content.inspect(source, self._request, self._domain)
        self.refusal, self.facts = inspection.reason, inspection.facts
        self.proven_finite = self._bounded(inspection.largest)

    def _compare(self, probing: Probing, source: AnyCache, sent: AnyCache) -> None:
        """Have the gate rule again, now that the probe shows how far off the translation is."""
        native = restored(sent)
        if not bool(largest(native).isfinite().all()):
            self.refusal = "non_finite"
            return
        error = translation_error(probing.queries, self._loaded.translator, source, native)
        self.facts["probe_error"] = error
        self.ruling = probing.rule(error)
        self.refusal = self.ruling.reason
        if self.refusal is None:
            self.target = self.target.with_tokens(self.ruling.tokens)
            self._prefix = native

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Count what the block takes, without what others took in its pauses."""
        started, paused = time.perf_counter(), self._paused_seconds
        try:
            yield
        finally:
            paused_meanwhile = self._paused_seconds - paused
            self.seconds[stage] = time.perf_counter() - started - paused_meanwhile

    def _pause(self) -> Steps:
        """Let others have the device."""
        started = time.perf_counter()
        yield None
        self._paused_seconds += time.perf_counter() - started

    def _bounded(self, largest: float) -> bool:
        """Whether no value of the answer can leave the range of its dtype."""
        bound = ROTARY_MARGIN * (self._loaded.gain * largest * ROTARY_MARGIN + self._loaded.offset)
        return bound < torch.finfo(self._emitted_dtype()).max

    def _translate(self, source: AnyCache, emission: Emission) -> Steps:
        side, done = self.target, 0
        parts = self._parts()
        steps = self._loaded.translator.steps(
            source.layers(),
            source.positions,
            prefix=self._prefix,
            tokens=side.geometry.tokens,
            dtype=self._emitted_dtype(),
        )
        for layer in steps:
            if layer is not None:
                self._write(parts, done, *layer)
                done += 1
                self.ready_layers = done
                emission.advance(self._final_bytes(done))
            if done < side.geometry.layers:  # whoever waits for the end is not to wait for others
                yield from self._pause()
        if done != side.geometry.layers:
            raise Problem(
                "internal_invariant", f"{done} of {side.geometry.layers} layers were translated"
            )

    def _write(self, parts: dict[str, Tensor], layer: int, keys: Tensor, values: Tensor) -> None:
        """Put a layer where it leaves from, and look at it there: what is missing is poison."""
        side = self.target
        if side.storage.eight_bits:
            stored = [quantize(states, side.storage) for states in (keys, values)]
            keys, values = (one.numbers for one in stored)
            for name, scale in zip(side.scale_names(layer), in_turn(stored), strict=True):
                parts[name].copy_(scale.view(-1).view(torch.uint8))
        write_layer(side.layout, parts, layer, keys, values, side.geometry)
        scales = [parts[name].clone().view(torch.float32) for name in side.scale_names(layer)]
        written = read_layer(side.layout, parts, layer, side.geometry)
        if not all(map(_sound, (*written, *scales))):
            raise NonFinite(f"target layer {layer} holds values that are not finite")

    @property
    def _answer(self) -> Tensor:
        return self.space.answer[: self.target.nbytes]

    def _parts(self) -> dict[str, Tensor]:
        """Views of the answer's tensors by name; of scales their bytes, which are not aligned."""
        forms = self.target.forms
        pieces = torch.split(self._answer, [form.nbytes for form in forms.values()])
        parts = dict(zip(forms, pieces, strict=True))
        for name, form in forms.items():
            parts[name].fill_(INT8_POISON if form.dtype == "int8" else POISON)
            if form.dtype == self.target.storage.dtype:
                parts[name] = parts[name].view(DTYPES[form.dtype]).view(form.shape)
        return parts

    def _emitted_dtype(self) -> torch.dtype:
        # 8-bit numbers are rounded from float32 when they are written; nothing computes in them.
        storage = self.target.storage
        return torch.float32 if storage.eight_bits else DTYPES[storage.dtype]

    def _final_bytes(self, layers: int) -> int:
        """Bytes from the front that are final when so many layers are written."""
        if self.target.layout is Layout.LMCACHE and layers < self.target.geometry.layers:
            return 0  # one tensor, values after all keys
        return self.target.nbytes * layers // self.target.geometry.layers


def _sound(tensor: Tensor) -> bool:
    """Whether all of it was written and is finite."""
    if tensor.dtype == torch.int8:
        return int(tensor.amin()) >= -INT8_LARGEST
    extremes = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    return all(math.isfinite(float(extreme)) for extreme in extremes)
