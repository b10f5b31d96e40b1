"""The target layers of one request, in order: source content times the maps, chunk by chunk."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.blocks import block_tokens
from mappers.content import SourceContent
from mappers.content_memory import Layer, by_head
from mappers.errors import NonFinite
from mappers.finish import Finish, put
from mappers.geometry import Geometry
from mappers.recipes.contract import PreparedMap, Recipe
from mappers.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class PreparedLayer:
    """The maps of a target layer, ready to apply; ``expiring`` are the sources it reads last."""

    sources: tuple[int, ...]
    keys: PreparedMap
    values: PreparedMap
    key_norm: Tensor | None
    expiring: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedMapper:
    """All maps of a mapper on their device, and what is to be known of it to apply them."""

    recipe: Recipe
    geometry: Geometry
    lags: int
    layers: tuple[PreparedLayer, ...]
    device: torch.device

    @property
    def joint(self) -> bool:
        """Whether keys and values are inputs together."""
        return self.recipe.structure == "joint"


class TargetLayers:
    """Iterates over keys and values of each target layer, with None between chunks of tokens.

    Products of ``chunk_tokens`` rows at most wait in a workspace for what is done to them, unless
    they are the answer as they are. Raises NonFinite in place of a layer that would hold a NaN or
    an infinity.
    """

    def __init__(
        self, mapper: PreparedMapper, content: SourceContent, request: Request, chunk_tokens: int
    ) -> None:
        self._mapper, self._content, self._request = mapper, content, request
        self._chunk_tokens = chunk_tokens
        heads, dim = mapper.geometry.target_heads, mapper.geometry.target_dim
        self._block_tokens = block_tokens(heads * dim, chunk_tokens, mapper.device)
        self._shape = (request.tokens, heads, dim)
        rows = min(chunk_tokens, request.tokens)
        self._workspace = torch.empty((rows, heads, dim), dtype=torch.float32, device=mapper.device)

    def __iter__(self) -> Iterator[Layer | None]:
        try:
            for index in range(len(self._mapper.layers)):
                yield (yield from self._layer(index))
        finally:
            self._content.close()

    def _layer(self, index: int) -> Generator[None, None, Layer]:
        answer, layers = self._request.answer, self._mapper.layers
        keys, values = answer[index] if answer else self._new_layer()
        proof = _splice(self._request, index, keys, values)
        if self._request.known < self._request.tokens:
            rows = self._request.mapped
            yield from self._map_layer(layers[index], keys[rows], values[rows], proof)
            # Before the host waits for the proof, that is for this layer.
            for following in layers[index + 1 : index + 2]:
                self._content.send_ahead(following.sources)
        if not bool(proof.isfinite()):
            raise NonFinite(f"target layer {index} would hold a NaN or an infinity")
        return keys, values

    def _map_layer(
        self, layer: PreparedLayer, keys: Tensor, values: Tensor, proof: Tensor
    ) -> Iterator[None]:
        """Fill keys and values of the mapped tokens."""
        source_keys, source_values = self._content.read_all(layer.sources)
        if self._mapper.joint:
            source_keys = source_values = (*source_keys, *source_values)
        finish = Finish(norm=layer.key_norm, table=self._request.target_table)
        yield from self._map(layer.keys, source_keys, keys, finish, proof)
        yield from self._map(layer.values, source_values, values, Finish(), proof)
        del source_keys, source_values
        for source in layer.expiring:
            self._content.drop(source)

    def _map(
        self,
        prepared: PreparedMap,
        contents: Sequence[Tensor],
        out: Tensor,
        finish: Finish,
        proof: Tensor,
    ) -> Iterator[None]:
        """Fill ``out [T, H_t, D_t]``, giving None between chunks."""
        apart = prepared.weight.shape[0] == self._mapper.geometry.target_heads > 1
        # Sums are float32 anyway: values of the same form get them in their own memory.
        rotated = finish.table is not None
        direct = not rotated and out.dtype == torch.float32 and not apart and out.is_contiguous()
        for start in range(0, out.shape[0], self._chunk_tokens):
            if start:
                yield
            chunk = slice(start, min(start + self._chunk_tokens, out.shape[0]))
            mapped = out[chunk] if direct else self._workspace[: chunk.stop - start]
            mapped = by_head(mapped) if apart else mapped
            read = slice(chunk.start, chunk.stop + self._mapper.lags)
            read_rows = [content[read] for content in contents]
            bias = self._mapper.recipe.apply(prepared, read_rows, mapped)
            for first in range(start, chunk.stop, self._block_tokens):
                rows = slice(first, min(first + self._block_tokens, chunk.stop))
                part = mapped[first - start : rows.stop - start]
                put(part, out[rows], finish.of(rows, bias), proof)

    def _new_layer(self) -> Layer:
        dtype, device = self._request.dtype, self._mapper.device
        keys, values = (torch.empty(self._shape, dtype=dtype, device=device) for _ in range(2))
        return keys, values


def _splice(request: Request, layer: int, keys: Tensor, values: Tensor) -> Tensor:
    """Copy the known tokens of a target layer into place; return the sum of what was written, the
    beginning of the proof that all of the layer is finite."""
    proof = torch.zeros((), dtype=torch.float32, device=keys.device)
    if request.prefix is None:
        return proof
    for out, exact in ((keys, request.prefix.keys[layer]), (values, request.prefix.values[layer])):
        written = out[: request.known].copy_(exact[: request.known])
        proof += written.sum(dtype=torch.float32)
    return proof
