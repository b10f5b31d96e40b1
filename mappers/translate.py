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

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from mappers.blocks import block_tokens
from mappers.cache import KVCache, Readable
from mappers.content import SourceContent
from mappers.content_memory import Apart, ContentMemory, InSlots, Layer
from mappers.errors import LayoutError
from mappers.geometry import head_groups
from mappers.lanes import Lane, streams_of
from mappers.mapper import LayerMap, Mapper
from mappers.recipes import check_shapes, recipe_of
from mappers.recipes.contract import Recipe
from mappers.request import OUTPUT_DTYPES, Planner, Request
from mappers.slots import Slots
from mappers.target_layers import PreparedLayer, PreparedMapper, TargetLayers

WIDE_NUMBERS = 512
"""From so many of each source layer on, a CPU adds products up at no loss."""


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
        self.device = torch.device(device)
        self.compute_dtype = _compute_dtype(self.device, compute_dtype)
        # On a CPU what its caches like, on a GPU what fills it.
        self.chunk_tokens = chunk_tokens or (1024 if self.device.type == "cpu" else 8192)
        ropes = (mapper.source.rope, mapper.target.rope)
        self._planner = Planner(self.geometry, ropes, mapper.lags, self.device)
        self._streams = streams_of(self.device)
        self._slots = self._side_by_side(mapper)
        self._mapper = self._prepared(mapper)
        self._wanted = frozenset(j for layer in mapper.layers for j in layer.sources)

    def weights(self) -> Iterator[Tensor]:
        """The weights of all maps as they are multiplied, ``[G, inputs, outputs of a group]``."""
        for layer in self._mapper.layers:
            yield from (layer.keys.weight, layer.values.weight)

    def tensors(self) -> Iterator[Tensor]:
        """All weights, biases and norms as they are applied."""
        yield from self.weights()
        for layer in self._mapper.layers:
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
            layers,
            positions,
            dtype=dtype,
            prefix=prefix,
            tokens=tokens,
            answer=answer,
            arrived=lambda layer: True,
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
        arrived: Callable[[int], bool] | None = None,
    ) -> Iterator[Layer]:
        """Keys (as the target caches them) and values of each target layer, in order.

        ``layers`` gives the source's keys and values in order, each ``[T, H_s, D_s]``, any float
        dtype, and is read only as far as the next target layer needs; on a GPU also those that the
        one after needs, if ``arrived`` says of a layer that it and all before it can be had without
        waiting. They must stay as they are until the target layers that read them have come, or the
        iterator is closed. ``positions``: int64 ``[T]``, absolute. ``prefix`` is the target's exact
        KV of the first tokens, which must be at positions 0, 1, ...; it takes the place of the
        mapped. ``tokens`` limits the answer to the first of them; all if None. Yields tensors
        ``[tokens, H_t, D_t]`` in ``dtype`` (float32, float16 or bfloat16) on the translator's
        device, every element written: those of ``answer`` (keys and values of all target layers,
        any strides), or else new ones, contiguous.

        Raises LayoutError and ValueError at once for arguments that do not fit; while iterating,
        LayoutError for a source layer that does not, and NonFinite in place of a layer that holds a
        NaN or an infinity (or numbers whose sum overflows float32, which is no better).
        """
        steps = self.steps(
            layers,
            positions,
            dtype=dtype,
            prefix=prefix,
            tokens=tokens,
            answer=answer,
            arrived=arrived,
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
        arrived: Callable[[int], bool] | None = None,
    ) -> Iterator[Layer | None]:
        """``stream``, with None between chunks of tokens: there, as between layers, the caller may
        do other work first. Arguments and errors as there."""
        request = self._planner.plan(positions, dtype, prefix, tokens, answer)
        content = SourceContent(
            iter(layers),
            shape=(positions.shape[0], self.geometry.source_heads, self.geometry.source_dim),
            table=request.source_table,
            rows=request.read,
            wanted=self._wanted,
            dtype=self.compute_dtype,
            block_tokens=block_tokens(self.geometry.source_width, self.chunk_tokens, self.device),
            memory=self._memory(request),
            lane=Lane(self.device, self._streams),
            arrived=arrived,
            repeats=request.repeats,
        )
        return iter(TargetLayers(self._mapper, content, request, self.chunk_tokens))

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

    def _side_by_side(self, mapper: Mapper) -> Slots | None:
        """Slots for the source layers, where one product over several is faster than several."""
        structure = recipe_of(mapper).structure
        groups = head_groups(self.geometry, structure)
        one_or_all = groups in (1, self.geometry.source_heads) and structure != "joint"
        narrow = self.geometry.source_width // groups < WIDE_NUMBERS
        if one_or_all and (narrow or self.device.type != "cpu"):
            return Slots.of([layer.sources for layer in mapper.layers])
        return None

    def _memory(self, request: Request) -> ContentMemory:
        """Room for the content of one request."""
        geometry, rows = self.geometry, request.repeats + request.read.stop - request.read.start
        shape = (rows, geometry.source_heads, geometry.source_dim)
        given = (shape, self.compute_dtype, self.device)
        if self._slots is not None:
            groups = head_groups(geometry, self._mapper.recipe.structure)
            return InSlots(*given, slots=self._slots, groups=groups)
        return Apart(*given, heads_apart=self._mapper.joint)

    def _prepared(self, mapper: Mapper) -> PreparedMapper:
        last_reader = {j: index for index, layer in enumerate(mapper.layers) for j in layer.sources}
        layers = []
        for index, layer in enumerate(mapper.layers):
            expiring = tuple(j for j in layer.sources if last_reader[j] == index)
            layers.append(self._prepared_layer(recipe_of(mapper), layer, expiring))
        recipe, lags = recipe_of(mapper), mapper.lags
        return PreparedMapper(recipe, self.geometry, lags, tuple(layers), self.device)

    def _prepared_layer(
        self, recipe: Recipe, layer: LayerMap, expiring: tuple[int, ...]
    ) -> PreparedLayer:
        sources = self._slots.in_order(layer.sources) if self._slots else layer.sources
        given = (sources, self.geometry)
        keys, values = (
            recipe.prepare(affine, *given, device=self.device, dtype=self.compute_dtype)
            for affine in (layer.keys, layer.values)
        )
        norm = None if layer.key_norm is None else layer.key_norm.to(self.device)
        return PreparedLayer(sources, keys, values, norm, expiring)


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
