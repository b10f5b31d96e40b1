"""Translator: strip the source's rotary embedding, map, apply the target's, layer by layer.

Target layers come out in order. A source layer is stripped once, when the first target layer reads
it, and dropped after the last one has, so a request holds the content of only the source layers
that are between the two. Tokens go through in chunks of a fixed size, as many rows as one product
has; what is done number by number is done to blocks of a chunk, which stay in a core's cache.

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
from mappers.content import SourceContent
from mappers.content_memory import Apart, ContentMemory, InSlots, Layer, by_head
from mappers.errors import LayoutError, NonFinite
from mappers.geometry import Geometry, head_groups
from mappers.key_norm import restore
from mappers.mapper import LayerMap, Mapper
from mappers.recipes import check_shapes, recipe_of
from mappers.recipes.contract import PreparedMap
from mappers.rope import RotaryTable
from mappers.slots import Slots

OUTPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDE_NUMBERS = 512
"""From so many of each source layer on, a CPU adds products up at no loss."""
BLOCK_NUMBERS = 1 << 17
"""What is done number by number is done to so many at a time: they stay in a core's cache."""


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
    answer: Sequence[Layer] | None
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
        # On a CPU what its caches like, on a GPU what fills it.
        self.chunk_tokens = chunk_tokens or (1024 if self.device.type == "cpu" else 8192)
        self._recipe = recipe_of(mapper)
        self._joint = self._recipe.structure == "joint"
        self._lags = mapper.lags
        self._groups = head_groups(self.geometry, self._recipe.structure)
        self._slots = self._side_by_side(mapper.layers)
        self._layers = tuple(self._prepare(mapper.layers))
        self._wanted = frozenset(j for layer in mapper.layers for j in layer.sources)

    def weights(self) -> Iterator[Tensor]:
        """The weights of all maps as they are multiplied, ``[G, inputs, outputs of a group]``."""
        for layer in self._layers:
            yield from (layer.keys.weight, layer.values.weight)

    def tensors(self) -> Iterator[Tensor]:
        """All weights, biases and norms as they are applied."""
        yield from self.weights()
        for layer in self._layers:
            yield from (layer.keys.bias, layer.values.bias)
            if layer.key_norm is not None:
                yield layer.key_norm

    def layers(
        self,
        source: Readable,
        *,
        dtype: torch.dtype,
        prefix: KVCache | None = None,
        tokens: int | None = None,
        answer: Sequence[Layer] | None = None,
    ) -> Iterator[Layer]:
        """``stream`` over a cache that is there as a whole; arguments and errors as there."""
        if source.num_layers != self.geometry.source_layers:
            raise LayoutError(
                f"the source has {source.num_layers} layers, not {self.geometry.source_layers}"
            )
        layers, positions = source.layers(), source.positions
        return self.stream(
            layers, positions, dtype=dtype, prefix=prefix, tokens=tokens, answer=answer
        )

    def stream(
        self,
        layers: Iterable[Layer],
        positions: Tensor,
        *,
        dtype: torch.dtype,
        prefix: KVCache | None = None,
        tokens: int | None = None,
        answer: Sequence[Layer] | None = None,
    ) -> Iterator[Layer]:
        """Keys (as the target caches them) and values of each target layer, in order.

        ``layers`` gives the source's keys and values in order, each ``[T, H_s, D_s]``, any float
        dtype, and is read only as far as the next target layer needs. ``positions``: int64 ``[T]``,
        absolute. ``prefix`` is the target's exact KV of the first tokens, which must be at
        positions 0, 1, ...; it takes the place of the mapped. ``tokens`` limits the answer to the
        first of them; all if None. Yields tensors ``[tokens, H_t, D_t]`` in ``dtype`` (float32,
        float16 or bfloat16) on the translator's device, every element written: those of ``answer``
        (keys and values of all target layers, any strides), or else new ones, contiguous.

        Raises LayoutError and ValueError at once for arguments that do not fit; while iterating,
        LayoutError for a source layer that does not, and NonFinite in place of a layer that holds a
        NaN or an infinity (or numbers whose sum overflows float32, which is no better).
        """
        steps = self.steps(
            layers, positions, dtype=dtype, prefix=prefix, tokens=tokens, answer=answer
        )
        return (layer for layer in steps if layer is not None)

    def steps(
        self,
        layers: Iterable[Layer],
        positions: Tensor,
        *,
        dtype: torch.dtype,
        prefix: KVCache | None = None,
        tokens: int | None = None,
        answer: Sequence[Layer] | None = None,
    ) -> Iterator[Layer | None]:
        """``stream``, with None between chunks of tokens: there, as between layers, the caller may
        do other work first. Arguments and errors as there."""
        request = self._plan(positions, dtype, prefix, tokens, answer)
        content = SourceContent(
            iter(layers),
            shape=(positions.shape[0], self.geometry.source_heads, self.geometry.source_dim),
            table=request.source_table,
            rows=request.read,
            wanted=self._wanted,
            dtype=self.compute_dtype,
            block_tokens=self._block_tokens(self.geometry.source_width),
            memory=self._memory(request),
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

    def _side_by_side(self, layers: tuple[LayerMap, ...]) -> Slots | None:
        """Slots for the source layers, where one product over several is faster than several."""
        one_or_all = self._groups in (1, self.geometry.source_heads) and not self._joint
        narrow = self.geometry.source_width // self._groups < WIDE_NUMBERS
        if one_or_all and (narrow or self.device.type != "cpu"):
            return Slots.of([layer.sources for layer in layers])
        return None

    def _memory(self, request: _Request) -> ContentMemory:
        """Room for the content of one request."""
        geometry, rows = self.geometry, request.repeats + request.read.stop - request.read.start
        shape = (rows, geometry.source_heads, geometry.source_dim)
        given = (shape, self.compute_dtype, self.device)
        if self._slots is not None:
            return InSlots(*given, slots=self._slots, groups=self._groups)
        return Apart(*given, heads_apart=self._joint)

    def _block_tokens(self, width: int) -> int:
        """How many rows of so many numbers are worked on at a time."""
        if self.device.type != "cpu":
            return self.chunk_tokens
        return min(self.chunk_tokens, max(1, BLOCK_NUMBERS // width))

    def _prepare(self, layers: tuple[LayerMap, ...]) -> Iterator[_PreparedLayer]:
        last_reader = {j: index for index, layer in enumerate(layers) for j in layer.sources}
        for index, layer in enumerate(layers):
            sources = self._slots.in_order(layer.sources) if self._slots else layer.sources
            keys, values = (
                self._recipe.prepare(
                    affine,
                    sources,
                    self.geometry,
                    device=self.device,
                    dtype=self.compute_dtype,
                )
                for affine in (layer.keys, layer.values)
            )
            expiring = tuple(j for j in layer.sources if last_reader[j] == index)
            norm = None if layer.key_norm is None else layer.key_norm.to(self.device)
            yield _PreparedLayer(sources, keys, values, norm, expiring)

    def _plan(
        self,
        positions: Tensor,
        dtype: torch.dtype,
        prefix: KVCache | None,
        tokens: int | None,
        answer: Sequence[Layer] | None,
    ) -> _Request:
        given = positions.shape[0] if positions.ndim == 1 else 0
        wanted = given if tokens is None else tokens
        if not 1 <= wanted <= given:
            raise LayoutError(f"{wanted} tokens wanted, of a source with {given}")
        if dtype not in OUTPUT_DTYPES:
            raise ValueError(f"an answer is float32, float16 or bfloat16, not {dtype}")
        if answer is not None:
            self._check_answer(answer, wanted, dtype)
        known = 0 if prefix is None else _known_tokens(prefix, positions, self.geometry, wanted)
        read = slice(max(0, known - self._lags), wanted)
        # Some types of rotary embedding depend on the length that the model saw, not on ours.
        length, both = int(positions.max()) + 1, (positions[read], positions[known:wanted])
        source_table, target_table = (
            RotaryTable.of(rope, rows, length=length, device=self.device)
            for rope, rows in zip(self._ropes, both, strict=True)
        )
        repeats = self._lags - (known - read.start)
        return _Request(
            wanted, known, read, repeats, prefix, dtype, answer, source_table, target_table
        )

    def _check_answer(self, answer: Sequence[Layer], tokens: int, dtype: torch.dtype) -> None:
        geometry = self.geometry
        shape = (tokens, geometry.target_heads, geometry.target_dim)
        forms = {(tuple(t.shape), t.dtype, t.device.type) for layer in answer for t in layer}
        if len(answer) != geometry.target_layers or forms != {(shape, dtype, self.device.type)}:
            raise LayoutError(
                f"an answer's memory must be {geometry.target_layers} layers of {dtype} "
                f"{list(shape)} on {self.device.type}"
            )

    def _emit(self, content: SourceContent, request: _Request) -> Iterator[Layer | None]:
        workspace = self._workspace(request)
        for index, layer in enumerate(self._layers):
            keys, values = request.answer[index] if request.answer else self._new_layer(request)
            checksum = _splice(request, index, keys, values)
            if request.known < request.tokens:
                source_keys, source_values = content.read_all(layer.sources)
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
                del source_keys, source_values
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
        # Sums are float32 anyway: values of the same form get them in their own memory.
        direct = finish is None and out.dtype == torch.float32 and not apart and out.is_contiguous()
        for start in range(0, out.shape[0], self.chunk_tokens):
            if start:
                yield
            chunk = slice(start, min(start + self.chunk_tokens, out.shape[0]))
            mapped = out[chunk] if direct else workspace[: chunk.stop - start]
            mapped = by_head(mapped) if apart else mapped
            read = slice(chunk.start, chunk.stop + self._lags)
            self._recipe.apply(prepared, [content[read] for content in contents], mapped)
            block = self._block_tokens(self.geometry.target_width)
            for first in range(start, chunk.stop, block):
                rows = slice(first, min(first + block, chunk.stop))
                part = mapped[first - start : rows.stop - start]
                checksum += _written(part, out[rows], finish, rows)
        return checksum

    def _workspace(self, request: _Request) -> Tensor:
        """Where products wait for what is done to them, a chunk at a time."""
        rows = min(self.chunk_tokens, request.tokens)
        shape = (rows, self.geometry.target_heads, self.geometry.target_dim)
        return torch.empty(shape, device=self.device)

    def _new_layer(self, request: _Request) -> Layer:
        shape = (request.tokens, self.geometry.target_heads, self.geometry.target_dim)
        keys, values = (
            torch.empty(shape, dtype=request.dtype, device=self.device) for _ in range(2)
        )
        return keys, values


def _written(mapped: Tensor, out: Tensor, finish: _KeyFinish | None, rows: slice) -> Tensor:
    """Put mapped rows into the answer; return the sum of what was written."""
    if finish is not None:
        if finish.norm is not None:
            restore(mapped, finish.norm)
        finish.table.slice(rows.start, rows.stop).apply(mapped, out=out)
    elif mapped.data_ptr() != out.data_ptr():
        out.copy_(mapped)
    return out.sum(dtype=torch.float32)


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
