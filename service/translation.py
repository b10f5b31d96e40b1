"""One translation: its sizes, its two buffers, and the work that the device thread does on them."""

import math
import time
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from mappers.cache import DTYPES, KVCache, consecutive
from mappers.errors import NonFinite
from mappers.identity import IdentityClaim, ModelIdentity
from mappers.layouts import Geometry, Layout, read_layer, tensor_names, tensor_shape, write_layer
from service.errors import Problem
from service.schemas import TranslateRequest
from service.store import Loaded
from service.wire import ITEM_BYTES, Header, TensorSpec
from service.worker import Emission

# A rotation adds at most two numbers, and scaling factors (YaRN) lie well below 4.
ROTARY_MARGIN = 8.0
# Every float dtype reads this byte, repeated, as NaN: rows that were never written are found.
POISON = 0xFF


@dataclass(frozen=True, slots=True)
class Side:
    """Names, shape, dtype and size of one cache on the wire."""

    layout: Layout
    geometry: Geometry
    dtype: str

    @classmethod
    def of(
        cls, identity: ModelIdentity, claim: IdentityClaim, request: TranslateRequest, tokens: int
    ) -> Self:
        """The cache of ``tokens`` rows that the request declares. May raise ``LayoutError``."""
        geometry = Geometry(
            identity.num_layers,
            tokens,
            identity.num_kv_heads,
            identity.head_dim,
            request.block_tokens,
        )
        return cls(request.layout, geometry, claim.kv_dtype or claim.dtype)

    @property
    def names(self) -> list[str]:
        """Tensor names in layer order."""
        layers = range(self.geometry.layers)
        every = (name for i in layers for name in tensor_names(self.layout, i))
        return list(dict.fromkeys(every))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of every tensor."""
        return tensor_shape(self.layout, self.geometry)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return len(self.names) * math.prod(self.shape) * ITEM_BYTES[self.dtype]


def check_tensors(header: Header, side: Side) -> None:
    """The header must hold exactly the declared tensors. Raises ``Problem`` 422."""
    names, shape = set(side.names), side.shape
    if header.tensors.keys() != names:
        raise Problem(
            "layer_set",
            f"{side.geometry.layers} layers in layout {side.layout.value} are {len(names)} "
            f"tensors; the body holds {len(header.tensors)}, or others",
        )
    for spec in header.tensors.values():
        if spec.dtype != side.dtype:
            raise Problem(
                "dtype_unsupported", f"declared are {side.dtype} tensors, one is {spec.dtype}"
            )
        if spec.shape != shape:
            raise Problem(
                "bad_shape", f"declared are tensors of {list(shape)}, one is {list(spec.shape)}"
            )


class Translation:
    """The buffers of one request and what the device thread does with them.

    Memory: the source as received and the target as sent, once each. ``run`` ends with ``refusal``
    None, or with a reason from the closed list; ``facts`` are what the content gate measured.
    """

    def __init__(
        self,
        loaded: Loaded,
        source: Side,
        target: Side,
        request: TranslateRequest,
        domain: str | None,
        prefix: KVCache | None,
    ) -> None:
        self.target = target
        self._loaded, self._source = loaded, source
        self._request, self._domain, self._prefix = request, domain, prefix
        self._received = np.empty(source.nbytes, np.uint8)
        self._answer = np.empty(target.nbytes, np.uint8)
        self.seconds: dict[str, float] = {}
        self.facts: dict[str, float | str] = {}
        self.refusal: str | None = None
        self.proven_finite = False

    @property
    def input(self) -> memoryview:
        """Where the source's bytes go, in the order of the request's header."""
        return self._received.data

    @property
    def output(self) -> memoryview:
        """The answer's bytes, after its header."""
        return self._answer.data

    def run(self, tensors: dict[str, TensorSpec], emission: Emission) -> None:
        """On the device thread: inspect the source, then translate layer by layer."""
        started = time.perf_counter()
        source = self._read(tensors)
        inspection = self._loaded.content.inspect(source, self._request, self._domain)
        inspected = time.perf_counter()
        self.seconds["content_gate"] = inspected - started
        self.refusal, self.facts = inspection.reason, inspection.facts
        if self.refusal is not None:
            return
        self.proven_finite = self._bounded(inspection.largest)
        try:
            self._translate(source, emission)
        except NonFinite:
            self.refusal = "non_finite"
        self.seconds["translate"] = time.perf_counter() - inspected

    def _read(self, tensors: dict[str, TensorSpec]) -> KVCache:
        side = self._source
        raw = torch.from_numpy(self._received)
        parts = {
            name: raw[spec.begin : spec.end].view(DTYPES[spec.dtype]).view(spec.shape)
            for name, spec in tensors.items()
        }
        layers = range(side.geometry.layers)
        pairs = [read_layer(side.layout, parts, i, side.geometry) for i in layers]
        keys, values = zip(*pairs, strict=True)
        return KVCache(
            keys, values, consecutive(side.geometry.tokens, self._request.start_position)
        )

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
            emission.advance(self._final_bytes(done))
        if done != side.geometry.layers:
            raise Problem(
                "internal_invariant", f"{done} of {side.geometry.layers} layers were translated"
            )

    def _parts(self) -> dict[str, Tensor]:
        side = self.target
        whole = torch.from_numpy(self._answer).fill_(POISON).view(DTYPES[side.dtype])
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
