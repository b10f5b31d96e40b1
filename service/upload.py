"""The client's request body: a cache as safetensors, sent without a second copy of it."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.cache import DTYPES
from mappers.errors import LayoutError
from mappers.layouts import Layout, scale_names
from mappers.quantize import Stored, in_turn
from mappers.stored import AnyCache
from service import wire
from service.digest import content_digest
from service.schemas import Probe, TranslateRequest

CONTENT_TYPE = "application/vnd.safetensors"
CHUNK_BYTES = 1 << 20
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Upload:
    """Header bytes, then the tensors in layer order, each [T, H, D]; iterate it for the body.

    Scales and zero points, if there are any, come after their layer; a probe's tensors are the
    last. At most one layer's tensor is copied at a time, and only when it is not contiguous or not
    in host memory. It can be iterated again, and also asynchronously.
    """

    header: bytes
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, cache: AnyCache, request: TranslateRequest, probe: AnyCache | None = None
    ) -> "Upload":
        """Raises LayoutError when ``request`` does not describe ``cache`` and ``probe``."""
        _check(cache, request)
        _check_probe(probe, request)
        named = [*_named("layers", cache), *(_named("probe", probe) if probe else ())]
        specs = [(name, _NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in named]
        document = request.model_dump_json(exclude_defaults=True)
        header, _ = wire.write_header(specs, {"kvt": document})
        return cls(header, tuple(tensor for _, tensor in named))

    @property
    def content_length(self) -> int:
        """Bytes of the whole body."""
        return len(self.header) + sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers that go with this body."""
        return {"content-type": CONTENT_TYPE, "content-length": str(self.content_length)}

    def digest_headers(self) -> dict[str, str]:
        """Content-Digest (RFC 9530); the whole body is read for it once."""
        return {"content-digest": content_digest(self)}

    def __iter__(self) -> Iterator[bytes]:
        yield self.header
        for tensor in self.tensors:
            view = memory_of(tensor.detach().cpu().contiguous())
            for start in range(0, len(view), CHUNK_BYTES):
                yield bytes(view[start : start + CHUNK_BYTES])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self:
            yield chunk


def announcing(request: TranslateRequest, probe: AnyCache | None) -> TranslateRequest:
    """The request for a cache that is sent with this probe."""
    if probe is None:
        return request
    return request.model_copy(update={"probe": Probe(tokens=probe.tokens)})


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, as a view of them."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _check(cache: AnyCache, request: TranslateRequest) -> None:
    if request.layout is not Layout.NHD:
        raise LayoutError(f"the client sends layout NHD, not {request.layout.value}")
    if request.tokens != cache.tokens:
        raise LayoutError(f"the request says {request.tokens} tokens, the cache has {cache.tokens}")
    first, last = int(cache.positions[0]), int(cache.positions[-1])
    if first != request.start_position or last - first != cache.tokens - 1:
        raise LayoutError(
            f"the cache's positions run from {first} to {last}, the request says "
            f"{request.tokens} from {request.start_position}"
        )


def _check_probe(probe: AnyCache | None, request: TranslateRequest) -> None:
    announced = 0 if request.probe is None else request.probe.tokens
    given = 0 if probe is None else probe.tokens
    if announced != given:
        raise LayoutError(f"the request announces a probe of {announced} tokens, given are {given}")
    if probe is not None and probe.positions.tolist() != list(range(given)):
        raise LayoutError("a probe holds the prompt's first tokens, from position 0 on")


def _named(stem: str, cache: AnyCache) -> Iterator[tuple[str, Tensor]]:
    for layer in range(cache.num_layers):
        keys, values = (_stored(side[layer]) for side in (cache.keys, cache.values))
        names = (f"layers.{layer}.k", f"layers.{layer}.v", *scale_names(layer, zero_points=True))
        parts = (keys.numbers, values.numbers, *in_turn((keys, values)))
        for name, part in zip(names, parts, strict=False):  # as many as there are
            yield name.replace("layers", stem, 1), part


def _stored(side: Tensor | Stored) -> Stored:
    return side if isinstance(side, Stored) else Stored(side)
