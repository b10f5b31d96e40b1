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
from mappers.sample import largest
from service.errors import Problem
from service.gate import Ruling
from service.probing import Probing
from service.schemas import TranslateRequest
from service.side import Side
from service.store import Loaded
from service.wire import TensorSpec
from service.worker import Emission

# A rotation adds at most two numbers, and scaling factors (YaRN) lie well below 4.
ROTARY_MARGIN = 8.0
# Every float dtype reads this byte, repeated, as NaN: rows that were never written are found.
POISON = 0xFF


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

    def run(self, emission: Emission) -> None:
        """On the device thread: inspect what was sent, then translate layer by layer."""
        data, tensors = self.space.received, self.space.tensors
        source = self._source.read(data, tensors, self._request.start_position)
        try:
            with self._timed("content_gate"):
                self._inspect(source)
                if self._probing is not None and self.refusal is None:
                    self._compare(self._probing, source, self._probing.side.read(data, tensors, 0))
            if self.refusal is None:
                with self._timed("translate"):
                    self._translate(source, emission)
        except NonFinite:
            self.refusal = "non_finite"
            if not self.proven_finite:  # nothing of it is out, and nobody is to find half of it
                self._answer.fill_(POISON)

    def _inspect(self, source: KVCache) -> None:
        inspection = self._loaded.content.inspect(source, self._request, self._domain)
        self.refusal, self.facts = inspection.reason, inspection.facts
        self.proven_finite = self._bounded(inspection.largest)

    def _compare(self, probing: Probing, source: KVCache, native: KVCache) -> None:
        """Have the gate rule again, now that the probe shows how far off the translation is."""
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
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = time.perf_counter() - started

    def _bounded(self, largest: float) -> bool:
        """Whether no value of the answer can leave the range of its dtype."""
        bound = ROTARY_MARGIN * (self._loaded.gain * largest * ROTARY_MARGIN + self._loaded.offset)
        return bound < torch.finfo(DTYPES[self.target.dtype]).max

    def _translate(self, source: KVCache, emission: Emission) -> None:
        side, done = self.target, 0
        parts = self._parts()
        layers = self._loaded.translator.layers(
            source, prefix=self._prefix, tokens=side.geometry.tokens, dtype=self._emitted_dtype()
        )
        for keys, values in layers:
            write_layer(side.layout, parts, done, keys, values, side.geometry)
            # Looked at where it leaves from: what was not written is still poison there.
            written = read_layer(side.layout, parts, done, side.geometry)
            if not math.isfinite(_largest(written)):
                raise NonFinite(f"target layer {done} holds values that are not finite")
            done += 1
            self.ready_layers = done
            emission.advance(self._final_bytes(done))
        if done != side.geometry.layers:
            raise Problem(
                "internal_invariant", f"{done} of {side.geometry.layers} layers were translated"
            )

    @property
    def _answer(self) -> Tensor:
        return self.space.answer[: self.target.nbytes]

    def _parts(self) -> dict[str, Tensor]:
        side = self.target
        whole = self._answer.fill_(POISON).view(DTYPES[side.dtype])
        return dict(zip(side.names, whole.view(len(side.names), *side.shape), strict=True))

    def _emitted_dtype(self) -> torch.dtype:
        # float8 is rounded from float32 when it is written; nothing computes in it.
        dtype = DTYPES[self.target.dtype]
        return torch.float32 if dtype.itemsize == 1 else dtype

    def _final_bytes(self, layers: int) -> int:
        """Bytes from the front that are final when so many layers are written."""
        if self.target.layout is Layout.LMCACHE and layers < self.target.geometry.layers:
            return 0  # one tensor, values after all keys
        return self.target.nbytes * layers // self.target.geometry.layers


def _largest(tensors: tuple[Tensor, ...]) -> float:
    """Largest absolute value of all; NaN where there is one."""
    extremes = [torch.stack(torch.aminmax(_computable(t))).abs().amax().float() for t in tensors]
    return float(torch.stack(extremes).amax())


def _computable(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.element_size() == 1 else tensor
