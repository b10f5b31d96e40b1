"""One cache on the wire: names, shape, dtype and size of its tensors, and reading them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from mappers.cache import DTYPES, KVCache, consecutive
from mappers.identity import IdentityClaim, ModelIdentity
from mappers.layouts import Geometry, Layout, read_layer, tensor_names, tensor_shape
from service.errors import Problem
from service.schemas import TranslateRequest
from service.wire import ITEM_BYTES, Header, TensorSpec


@dataclass(frozen=True, slots=True)
class Side:
    """What a request declares of one cache; the names of a probe's tensors begin with ``probe``."""

    layout: Layout
    geometry: Geometry
    dtype: str
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
        return cls(request.layout, geometry, claim.kv_dtype or claim.dtype)

    def with_tokens(self, tokens: int) -> Self:
        """The same cache with so many rows."""
        return replace(self, geometry=replace(self.geometry, tokens=tokens))

    @property
    def names(self) -> list[str]:
        """Tensor names in layer order."""
        layers = range(self.geometry.layers)
        every = (self._named(name) for i in layers for name in tensor_names(self.layout, i))
        return list(dict.fromkeys(every))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of every tensor."""
        return tensor_shape(self.layout, self.geometry)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return len(self.names) * math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def read(self, data: Tensor, specs: Mapping[str, TensorSpec], start_position: int) -> KVCache:
        """The cache as views of ``data``, the bytes of all of a body's tensors."""
        layers, layout, geometry = range(self.geometry.layers), self.layout, self.geometry
        names = dict.fromkeys(name for i in layers for name in tensor_names(layout, i))
        parts = {name: _tensor(data, specs[self._named(name)]) for name in names}
        keys, values = zip(*(read_layer(layout, parts, i, geometry) for i in layers), strict=True)
        return KVCache(keys, values, consecutive(geometry.tokens, start_position))

    def _named(self, name: str) -> str:
        """A layout's own name for a tensor as it is on the wire."""
        return name if self.stem == "layers" else f"{self.stem}.{name.removeprefix('layers.')}"


def check_tensors(header: Header, *sides: Side) -> None:
    """The header must hold exactly the declared tensors. Raises ``Problem`` 422."""
    expected = {name: (side, side.shape) for side in sides for name in side.names}
    if header.tensors.keys() != expected.keys():
        declared = " and ".join(_described(side) for side in sides)
        raise Problem("layer_set", f"{declared}; the body holds {len(header.tensors)}, or others")
    for name, spec in header.tensors.items():
        _check_tensor(spec, *expected[name])


def _described(side: Side) -> str:
    of = " of a probe" if side.stem == "probe" else ""
    layers, layout = side.geometry.layers, side.layout.value
    return f"{layers} layers{of} in layout {layout} are {len(side.names)} tensors"


def _check_tensor(spec: TensorSpec, side: Side, shape: tuple[int, ...]) -> None:
    declared = "declared for the probe are" if side.stem == "probe" else "declared are"
    if spec.dtype != side.dtype:
        raise Problem("dtype_unsupported", f"{declared} {side.dtype} tensors, one is {spec.dtype}")
    if spec.shape != shape:
        raise Problem(
            "bad_shape", f"{declared} tensors of {list(shape)}, one is {list(spec.shape)}"
        )


def _tensor(data: Tensor, spec: TensorSpec) -> Tensor:
    dtype, part = DTYPES[spec.dtype], data[spec.begin : spec.end]
    # Only whole numbers from the front can be viewed, and what lies before may be of another width.
    aligned = part if spec.begin % dtype.itemsize == 0 else part.clone()
    return aligned.view(dtype).view(spec.shape)
