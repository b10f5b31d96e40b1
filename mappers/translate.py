"""Translator: strip the source's rotary embedding, map, apply the target's, layer by layer.

Target layers come out in order. A source layer is stripped once, when the first target layer reads
it, and dropped after the last one has, so a request holds the content of only the source layers
that are between the two. Tokens go through in chunks of a fixed size.

What holds for the bits: the same request gives the same bits, and so do two requests that begin
with the same tokens, for all tokens in chunks that both fill. In a last, partly filled chunk the
matrix product has fewer rows, for which a BLAS may choose another kernel, that is another order of
the same sums: there the results agree to rounding.

Where maps read tokens before their own (``Mapper.lags``), the content begins so many rows earlier
than the mapped tokens. A request's first token is its own predecessor: exact at position 0, where
fits do the same; with a later start position an approximation of the first rows.

Legend: T tokens, H kv heads, D head dim; ``_s`` source, ``_t`` target.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mappers.cache import KVCache, Readable
from mappers.content import Layer, SourceContent, by_head
from mappers.errors import LayoutError, NonFinite
from mappers.geometry import Geometry, head_groups
from mappers.key_norm import restore
from mappers.mapper import LayerMap, Mapper
from mappers.recipes import check_shapes, recipe_of
from mappers.recipes.contract import PreparedMap
from mappers.rope import RotaryTable

OUTPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class _PreparedLayer:
    """The maps of a target layer, ready to apply; ``expiring`` are the sources it reads last."""

    sources: tuple[int, ...]
    keys: PreparedMap
    values: PreparedMap
    key_norm: Tensor | None
    expiring: tuple[int, ...]


class _KeyFinish(NamedTuple):
    """What is done to mapped keys: back onto their norm, if they have one, and rotated."""

    table: RotaryTable
    norm: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """Of ``tokens`` tokens the first ``known`` come from the prefix, the others are mapped.

    The target's table is for the mapped tokens only, the source's for ``read``: from as many tokens
    before them as the maps read back, and ``repeats`` are too few there.
    """

    tokens: int
    known: int
    read: slice
    repeats: int
    prefix: KVCache | None
    dtype: torch.dtype
    source_table: RotaryTable
    target_table: RotaryTable

    @property
    def mapped(self) -> slice:
        return slice(self.known, self.tokens)


class Translator:
    """Applies one mapper. The weights are converted once, here; calls share nothing else, so they
    may run side by side.

    ``compute_dtype`` is that of weights and content: float32 on a CPU; on CUDA bfloat16 (the
    default, with float32 sums), float16 or float32. ``chunk_tokens`` is how many rows one product
    has. Raises LayoutError for a mapper whose tensors do not have its recipe's shapes, ValueError
    for a compute dtype that the device cannot use.
    """

    def __init__(
        self,
        mapper: Mapper,
        *,
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        check_shapes(mapper)
        _check_prefix_table(mapper)
        # Not the mapper itself: its weights are prepared below, and once is enough in memory.
        self.geometry = mapper.geometry
        self._ropes = (mapper.source.rope, mapper.target.rope)
        self.device = torch.device(device)
        self.compute_dtype = _compute_dtype(self.device, compute_dtype)
        # On a CPU what stays in its caches, on a GPU what fills it.
        self.chunk_tokens = chunk_tokens or (1024 if self.device.type == "cpu" else 8192)
        self._recipe = recipe_of(mapper)
        self._joint = self._recipe.structure == "joint"
        self._lags = mapper.lags
        groups = head_groups(self.geometry, self._recipe.structure)
        self._source_apart = self._joint or groups == self.geometry.source_heads > 1
        self._layers = tuple(self._prepare(mapper.layers))
        self._wanted = frozenset(j for layer in mapper.layers for j in layer.sources)

    def tensors(self) -> Iterator[Tensor]:
        """All weights, biases and norms as they are applied."""
        for layer in self._layers:
            for prepared in (layer.keys, layer.values):
                yield from (prepared.weight, prepared.bias)
            if layer.key_norm is not None:
                yield layer.key_norm

    def layers(
        self,
        source: Readable,
        *,
        dtype: torch.dtype,
        prefix: KVCache | None = None,
        tokens: int | None = None,
    ) -> Iterator[Layer]:
        """``stream`` over a cache that is there as a whole; arguments and errors as there."""
        if source.num_layers != self.geometry.source_layers:
            raise LayoutError(
                f"the source has {source.num_layers} layers, not {self.geometry.source_layers}"
            )
        return self.stream(
            source.layers(), source.positions, dtype=dtype, prefix=prefix, tokens=tokens
        )

    def stream(
        self,
        layers: Iterable[Layer],
        positions: Tensor,
        *,
        dtype: torch.dtype,
        prefix: KVCache | None = None,
        tokens: int | None = None,
    ) -> Iterator[Layer]:
        """Keys (as the target caches them) and values of each target layer, in order.

        ``layers`` gives the source's keys and values in order, each ``[T, H_s, D_s]``, any float
        dtype, and is read only as far as the next target layer needs. ``positions``: int64 ``[T]``,
        absolute. ``prefix`` is the target's exact KV of the first tokens, which must be at
        positions 0, 1, ...; it takes the place of the mapped. ``tokens`` limits the answer to the
        first of them; all if None. Yields new tensors ``[tokens, H_t, D_t]`` in ``dtype`` (float32,
        float16 or bfloat16) on the translator's device, contiguous, every element written.

        Raises LayoutError and ValueError at once for arguments that do not fit; while iterating,
        LayoutError for a source layer that does not, and NonFinite in place of a layer that holds a
        NaN or an infinity (or numbers whose sum overflows float32, which is no better).
        """
        steps = self.steps(layers, positions, dtype=dtype, prefix=prefix, tokens=tokens)
        return (layer for layer in steps if layer is not None)

    def steps(
        self,
        layers: Iterable[Layer],
        positions: Tensor,
        *,
        dtype: torch.dtype,
        prefix: KVCache | None = None,
        tokens: int | None = None,
    ) -> Iterator[Layer | None]:
        """``stream``, with None between chunks of tokens: there, as between layers, the caller may
        do other work first. Arguments and errors as there."""
        request = self._plan(positions, dtype, prefix, tokens)
        content = SourceContent(
            iter(layers),
            shape=(positions.shape[0], self.geometry.source_heads, self.geometry.source_dim),
            table=request.source_table,
            rows=request.read,
            wanted=self._wanted,
            dtype=self.compute_dtype,
            chunk_tokens=self.chunk_tokens,
            heads_apart=self._source_apart,
            repeats=request.repeats,
        )
        return self._emit(content, request)

    def translate(
        self,
        source: Readable,
        *,
        dtype: torch.dtype,
        prefix: KVCache | None = None,
        tokens: int | None = None,
    ) -> KVCache:
        """The target's whole cache at once; arguments and errors as for ``stream``."""
        layers = self.layers(source, dtype=dtype, prefix=prefix, tokens=tokens)
        keys, values = zip(*layers, strict=True)
        return KVCache(keys, values, source.positions[: keys[0].shape[0]])

    def _prepare(self, layers: tuple[LayerMap, ...]) -> Iterator[_PreparedLayer]:
        last_reader = {j: index for index, layer in enumerate(layers) for j in layer.sources}
        for index, layer in enumerate(layers):
            keys, values = (
                self._recipe.prepare(
                    affine,
                    layer.sources,
                    self.geometry,
                    device=self.device,
                    dtype=self.compute_dtype,
                )
                for affine in (layer.keys, layer.values)
            )
            expiring = tuple(j for j in layer.sources if last_reader[j] == index)
            norm = None if layer.key_norm is None else layer.key_norm.to(self.device)
            yield _PreparedLayer(layer.sources, keys, values, norm, expiring)

    def _plan(
        self, positions: Tensor, dtype: torch.dtype, prefix: KVCache | None, tokens: int | None
    ) -> _Request:
        given = positions.shape[0] if positions.ndim == 1 else 0
        wanted = given if tokens is None else tokens
        if not 1 <= wanted <= given:
            raise LayoutError(f"{wanted} tokens wanted, of a source with {given}")
        if dtype not in OUTPUT_DTYPES:
            raise ValueError(f"an answer is float32, float16 or bfloat16, not {dtype}")
        known = 0 if prefix is None else _known_tokens(prefix, positions, self.geometry, wanted)
        read = slice(max(0, known - self._lags), wanted)
        # Some types of rotary embedding depend on the length that the model saw, not on ours.
        length, both = int(positions.max()) + 1, (positions[read], positions[known:wanted])
        source_table, target_table = (
            RotaryTable.of(rope, rows, length=length, device=self.device)
            for rope, rows in zip(self._ropes, both, strict=True)
        )
        repeats = self._lags - (known - read.start)
        return _Request(wanted, known, read, repeats, prefix, dtype, source_table, target_table)

    def _emit(self, content: SourceContent, request: _Request) -> Iterator[Layer | None]:
        shape = (self.geometry.target_heads, self.geometry.target_dim)
        workspace = torch.empty(self.chunk_tokens, *shape, device=self.device)
        for index, layer in enumerate(self._layers):
            keys, values = (
                torch.empty(request.tokens, *shape, dtype=request.dtype, device=self.device)
                for _ in range(2)
            )
            checksum = _splice(request, index, keys, values)
            if request.known < request.tokens:
                sources = [content.read(source) for source in layer.sources]
                source_keys, source_values = zip(*sources, strict=True)
                if self._joint:
                    source_keys = source_values = (*source_keys, *source_values)
                table, rows = request.target_table, request.mapped
                finish = _KeyFinish(table, layer.key_norm)
                checksum += yield from self._map(
                    layer.keys, source_keys, keys[rows], workspace, finish
                )
                checksum += yield from self._map(
                    layer.values, source_values, values[rows], workspace, None
                )
                del sources, source_keys, source_values
                for source in layer.expiring:
                    content.drop(source)
            if not bool(checksum.isfinite()):
                raise NonFinite(f"target layer {index} would hold a NaN or an infinity")
            yield keys, values

    def _map(
        self,
        prepared: PreparedMap,
        contents: Sequence[Tensor],
        out: Tensor,
        workspace: Tensor,
        finish: _KeyFinish | None,
    ) -> Generator[None, None, Tensor]:
        """Fill ``out [T, H_t, D_t]``, keys with ``finish``, giving None between chunks; return the
        sum of what was written."""
        checksum = torch.zeros((), device=self.device)
        apart = prepared.weight.shape[0] == self.geometry.target_heads > 1
        if apart:
            workspace = by_head(workspace)
        for start in range(0, out.shape[0], self.chunk_tokens):
            if start:
                yield
            chunk = slice(start, min(start + self.chunk_tokens, out.shape[0]))
            written = out[chunk]
            # Sums are float32 anyway: an answer of the same form gets them in its own memory.
            direct = out.dtype == torch.float32 and not apart
            mapped = written if direct else workspace[: written.shape[0]]
            read = slice(chunk.start, chunk.stop + self._lags)
            self._recipe.apply(prepared, [content[read] for content in contents], mapped)
            if finish is not None:
                if finish.norm is not None:
                    restore(mapped, finish.norm)
                finish.table.slice(chunk.start, chunk.stop).apply(mapped, out=written)
            elif mapped is not written:
                written.copy_(mapped)
            checksum += written.sum(dtype=torch.float32)
        return checksum


def _splice(request: _Request, layer: int, keys: Tensor, values: Tensor) -> Tensor:
    """Copy the known tokens of a target layer into place; return the sum of what was written."""
    checksum = torch.zeros((), device=keys.device)
    if request.prefix is None:
        return checksum
    for out, exact in ((keys, request.prefix.keys[layer]), (values, request.prefix.values[layer])):
        written = out[: request.known].copy_(exact[: request.known])
        checksum += written.sum(dtype=torch.float32)
    return checksum


def _known_tokens(prefix: KVCache, positions: Tensor, geometry: Geometry, tokens: int) -> int:
    """How many tokens the prefix gives; LayoutError where it cannot stand before the others."""
    given = (prefix.num_layers, prefix.num_kv_heads, prefix.head_dim)
    expected = (geometry.target_layers, geometry.target_heads, geometry.target_dim)
    if given != expected:
        raise LayoutError(f"the prefix has (layers, kv heads, head dim) {given}, not {expected}")
    known = min(prefix.tokens, tokens)
    if not torch.equal(positions[:known], torch.arange(known, device=positions.device)):
        raise LayoutError("an exact prefix needs a source that begins at position 0")
    return known


def _check_prefix_table(mapper: Mapper) -> None:
    g = mapper.geometry
    mapper.prefixes.check_geometry(g.target_layers, g.target_heads, g.target_dim)


def _compute_dtype(device: torch.device, asked: torch.dtype | None) -> torch.dtype:
    allowed = (torch.float32,) if device.type == "cpu" else OUTPUT_DTYPES
    if asked is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if asked not in allowed:
        raise ValueError(f"a {device.type} device computes in one of {allowed}, not in {asked}")
    return asked
