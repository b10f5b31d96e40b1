"""One cache on the wire: names, dtypes, shapes and size of its tensors, and reading them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

from torch import Tensor

from mappers.cache import DTYPES, KVCache, consecutive
from mappers.errors import LayoutError
from mappers.identity import IdentityClaim, ModelIdentity
from mappers.layouts import (
    Geometry,
    Layout,
    read_layer,
    scale_names,
    tensor_names,
    tensor_shape,
)
from mappers.quantize import Storage, Stored
from mappers.stored import AnyCache, StoredCache
from service.errors import Problem
from service.schemas import TranslateRequest
from service.wire import ITEM_BYTES, Header, TensorSpec


class Form(NamedTuple):
    """What a tensor is: dtype by our name, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Side:
    """What a request declares of one cache; the names of a probe's tensors begin with ``probe``."""

    layout: Layout
    geometry: Geometry
    storage: Storage
    stem: str = "layers"

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
        return cls(request.layout, geometry, claim.storage)

    def with_tokens(self, tokens: int) -> Self:
        """The same cache with so many rows."""
        return replace(self, geometry=replace(self.geometry, tokens=tokens))

    @cached_property
    def forms(self) -> dict[str, Form]:
        """All tensors by name in layer order, a layer's scales and zero points after it."""
        numbers = Form(self.storage.dtype, tensor_shape(self.layout, self.geometry))
        found: dict[str, Form] = {}
        for layer in range(self.geometry.layers):
            found |= {self.named(name): numbers for name in tensor_names(self.layout, layer)}
            for name in self.scale_names(layer):
                shape = self.storage.scale_shape(self.geometry.tokens, self.geometry.kv_heads)
                found[name] = Form("float32", shape)
        return found

    def scale_names(self, layer: int) -> list[str]:
        """Names of a layer's scales and zero points: scales of keys and values come first."""
        if not self.storage.scaled:
            return []
        found = scale_names(layer, zero_points=self.storage.zero_points)
        return [self.named(name) for name in found]

    @property
    def tensors(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of each, in the order in which they lie."""
        return [(name, *form) for name, form in self.forms.items()]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(form.nbytes for form in self.forms.values())

    def read(self, data: Tensor, specs: Mapping[str, TensorSpec], start_position: int) -> AnyCache:
        """The cache as views of ``data``, the bytes of all of a body's tensors.

        Raises ``Problem`` 422 for scales or zero points that cannot be used.
        """
        parts = {name: tensor_in(data, specs[name]) for name in self.forms}
        try:
            return self.assembled(parts, start_position)
        except LayoutError as error:
            of = "probe, " if self.stem == "probe" else ""
            raise Problem("bad_scales", f"{of}{error}") from error

    def assembled(self, parts: Mapping[str, Tensor], start_position: int) -> AnyCache:
        """The cache that these tensors are; may raise ``LayoutError``."""
        pairs = [self.layer(parts, layer) for layer in range(self.geometry.layers)]
        keys, values = zip(*pairs, strict=True)
        positions = consecutive(self.geometry.tokens, start_position)
        if self.storage.scaled:
            return StoredCache(self.storage, keys, values, positions)
        plain = [tuple(stored.numbers for stored in side) for side in (keys, values)]
        return KVCache(plain[0], plain[1], positions)

    def layer(self, parts: Mapping[str, Tensor], layer: int) -> tuple[Stored, Stored]:
        """Keys and values of a layer as they are stored: views, but in layout ``vllm_hn2d``."""
        numbers = {name: parts[self.named(name)] for name in tensor_names(self.layout, layer)}
        pair = read_layer(self.layout, numbers, layer, self.geometry)
        scales = [parts[name] for name in self.scale_names(layer)]
        # Those of keys and of values take turns.
        keys, values = (Stored(pair[kind], *scales[kind::2]) for kind in (0, 1))
        return keys, values

    def names(self, layer: int) -> list[str]:
        """Names of the tensors in which a layer lies, its scales and zero points after it."""
        numbers = [self.named(name) for name in tensor_names(self.layout, layer)]
        return [*numbers, *self.scale_names(layer)]

    def spans(self, layer: int, specs: Mapping[str, TensorSpec]) -> list[tuple[int, int]]:
        """First byte and end of all that a layer consists of, in a body's tensors."""
        places = [specs[name] for name in self.names(layer)]
        if self.layout is not Layout.LMCACHE:
            return [(spec.begin, spec.end) for spec in places]
        whole, *scales = places
        layers = self.geometry.layers
        size = (whole.end - whole.begin) // (2 * layers)
        starts = [whole.begin + at * size for at in (layer, layers + layer)]
        return [*((at, at + size) for at in starts), *((s.begin, s.end) for s in scales)]

    def named(self, name: str) -> str:
        """A layout's own name for a tensor as it is on the wire."""
        return name if self.stem == "layers" else f"{self.stem}.{name.removeprefix('layers.')}"


def check_tensors(header: Header, *sides: Side) -> None:
    """The header must hold exactly the declared tensors. Raises ``Problem`` 422."""
    expected = {name: (side, form) for side in sides for name, form in side.forms.items()}
    if header.tensors.keys() != expected.keys():
        declared = " and ".join(_described(side) for side in sides)
        raise Problem("layer_set", f"{declared}; the body holds {len(header.tensors)}, or others")
    for name, spec in header.tensors.items():
        _check_tensor(spec, *expected[name])


def _described(side: Side) -> str:
    of = " of a probe" if side.stem == "probe" else ""
    layers, layout, storage = side.geometry.layers, side.layout.value, side.storage
    scales = f" with {storage.scales} scales" if storage.scaled else ""
    zeros = " and zero points" if storage.zero_points else ""
    return f"{layers} layers{of} in layout {layout}{scales}{zeros} are {len(side.forms)} tensors"


def _check_tensor(spec: TensorSpec, side: Side, form: Form) -> None:
    declared = "declared for the probe are" if side.stem == "probe" else "declared are"
    if spec.dtype != form.dtype:
        raise Problem("dtype_unsupported", f"{declared} {form.dtype} tensors, one is {spec.dtype}")
    if spec.shape != form.shape:
        raise Problem(
            "bad_shape", f"{declared} tensors of {list(form.shape)}, one is {list(spec.shape)}"
        )


def tensor_in(data: Tensor, spec: TensorSpec) -> Tensor:
    """One tensor of a body's: a view, or a copy where it begins between two of its numbers."""
    dtype, part = DTYPES[spec.dtype], data[spec.begin : spec.end]
    # Only whole numbers from the front can be viewed, and what lies before may be of another width.
    aligned = part if spec.begin % dtype.itemsize == 0 else part.clone()
    return aligned.view(dtype).view(spec.shape)
