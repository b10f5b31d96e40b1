"""The Translator against a dense route: token by token, head by head, in float64."""

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from mappers.cache import KVCache, consecutive
from mappers.content import SourceContent
from mappers.content_memory import Layer, by_head
from mappers.errors import LayoutError, NonFinite
from mappers.geometry import Geometry
from mappers.mapper import AffineMap, HeadReads, Heads, LayerMap, Mapper
from mappers.prefixes import ExactPrefixes
from mappers.recipes import RECIPES
from mappers.rope import Rope, RotaryTable
from mappers.translate import Translator
from tests.mappers.pairs import (
    identity,
    matched_heads,
    random_cache,
    reads_of_layers,
    rotate,
    stacked,
)

SOURCE_THETA, TARGET_THETA = 10_000.0, 500_000.0
TOKENS = 23
# Read by target layers 0, 1 and 2; source layer 2 by none, source layer 0 first by the last.
SOURCES = ((1, 3), (1, 4), (0, 3))
GEOMETRIES = [Geometry(5, 2, 6, 3, 2, 6), Geometry(5, 2, 6, 3, 4, 8), Geometry(5, 4, 8, 3, 2, 6)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_geometry = pytest.mark.parametrize(
    "geometry", GEOMETRIES, ids=lambda g: f"{g.source_heads}-to-{g.target_heads}-heads"
)


def build_mapper(
    recipe: str, geometry: Geometry, *, sources: tuple[tuple[int, ...], ...] = SOURCES
) -> Mapper:
    """Random maps, scaled so that outputs are about 1, with biases that cannot be missed."""
    generator = torch.Generator().manual_seed(3)

    def affine(k: int, heads: Heads | None) -> AffineMap:
        inputs, outputs = RECIPES[recipe].weight_shape(geometry, k)
        weight = torch.randn(inputs, outputs, generator=generator) / inputs**0.5
        return AffineMap(weight, 2 * torch.randn(outputs, generator=generator), heads)

    def layer(sources: tuple[int, ...]) -> LayerMap:
        reads = reads_of_layers(RECIPES[recipe].structure, geometry, sources)
        if not isinstance(reads, HeadReads):
            return LayerMap(sources, affine(len(sources), None), affine(len(sources), None))
        return LayerMap(sources, *(affine(len(heads[0]), heads) for heads in reads))

    g = geometry
    return Mapper(
        source=identity(g.source_layers, g.source_heads, g.source_dim, theta=SOURCE_THETA),
        target=identity(len(sources), g.target_heads, g.target_dim, theta=TARGET_THETA),
        recipe=recipe,
        layers=tuple(layer(read) for read in sources),
        prefixes=ExactPrefixes(),
        skipped_positions=0,
    )


def source_of(mapper: Mapper, tokens: int = TOKENS, **kwargs: object) -> KVCache:
    side = mapper.source
    return random_cache(side.num_layers, tokens, side.num_kv_heads, side.head_dim, **kwargs)  # type: ignore[arg-type]


def dense(mapper: Mapper, source: KVCache) -> tuple[list[Tensor], list[Tensor]]:
    """The whole answer in float64, by the formulas of the design and no code of the library."""
    content = [rotate(layer, -source.positions, mapper.source.rope.theta) for layer in source.keys]
    keys, values = [], []
    for layer in mapper.layers:
        mapped = by_heads(mapper, layer.keys, [content[j] for j in layer.sources])
        keys.append(rotate(mapped, source.positions, mapper.target.rope.theta))
        values.append(by_heads(mapper, layer.values, [source.values[j] for j in layer.sources]))
    return keys, values


def by_heads(mapper: Mapper, affine: AffineMap, contents: list[Tensor]) -> Tensor:
    geometry, heads = mapper.geometry, []
    for head in range(geometry.target_heads):
        whole = slice(0, geometry.source_heads)
        read = whole if mapper.recipe == "full_head" else matched_heads(geometry, head)
        columns = slice(head * geometry.target_dim, (head + 1) * geometry.target_dim)
        weight, bias = affine.weight[:, columns].double(), affine.bias[columns].double()
        heads.append(stacked(contents, read) @ weight + bias)
    return torch.stack(heads, dim=1)


def assert_equals_dense(given: KVCache, mapper: Mapper, source: KVCache, tolerance: float) -> None:
    keys, values = dense(mapper, source)
    assert given.num_layers == len(keys)
    for layer in range(given.num_layers):
        for got, expected in (
            (given.keys[layer], keys[layer]),
            (given.values[layer], values[layer]),
        ):
            wanted = expected[: given.tokens]
            torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


def same_bits(first: KVCache, second: KVCache) -> bool:
    pairs = zip((*first.keys, *first.values), (*second.keys, *second.values), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(autouse=True)
def _unwritten_memory_is_nan() -> Iterator[None]:
    """New tensors start as NaN, so a row that nothing writes cannot pass for a number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@every_recipe
@every_geometry
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start_position", [0, 1000])
def test_translation_equals_the_dense_route(
    recipe: str, geometry: Geometry, dtype: torch.dtype, start_position: int
) -> None:
    mapper = build_mapper(recipe, geometry)
    source = source_of(mapper, dtype=dtype, start_position=start_position)
    for chunk in (1, 7, None):
        given = Translator(mapper, chunk_tokens=chunk).translate(source, dtype=dtype)
        assert given.dtype == dtype
        assert all(t.is_contiguous() for t in (*given.keys, *given.values))
        assert torch.equal(given.positions, source.positions)
        assert_equals_dense(given, mapper, source, TOLERANCE[dtype])


@every_recipe
def test_bfloat16_in_and_float32_out_loses_nothing_on_the_way(recipe: str) -> None:
    mapper = build_mapper(recipe, GEOMETRIES[1])
    source = source_of(mapper, dtype=torch.bfloat16)
    given = Translator(mapper).translate(source, dtype=torch.float32)
    assert_equals_dense(given, mapper, source, TOLERANCE[torch.float32])


@every_recipe
def test_positions_may_have_gaps(recipe: str) -> None:
    mapper = build_mapper(recipe, GEOMETRIES[0])
    source = dataclasses.replace(source_of(mapper), positions=torch.arange(TOKENS) * 3 + 40)
    given = Translator(mapper, chunk_tokens=7).translate(source, dtype=torch.float32)
    assert_equals_dense(given, mapper, source, TOLERANCE[torch.float32])


@every_recipe
def test_head_major_views_are_read_as_they_are(recipe: str) -> None:
    """What a transformers cache holds: [H, T, D] seen as [T, H, D]."""
    mapper = build_mapper(recipe, GEOMETRIES[1])
    source = source_of(mapper)
    views = [
        tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in layers)
        for layers in (source.keys, source.values)
    ]
    assert not views[0][0].is_contiguous()
    viewed = KVCache(*views, source.positions)
    translator = Translator(mapper)
    first, second = (translator.translate(c, dtype=torch.float32) for c in (source, viewed))
    assert same_bits(first, second)


@every_recipe
@every_geometry
def test_the_same_request_gives_the_same_bits_even_side_by_side(
    recipe: str, geometry: Geometry
) -> None:
    mapper = build_mapper(recipe, geometry)
    translator = Translator(mapper, chunk_tokens=8)
    sources = [source_of(mapper, seed=seed) for seed in range(3)]
    alone = [translator.translate(source, dtype=torch.bfloat16) for source in sources]
    with ThreadPoolExecutor(3) as pool:
        again = pool.map(lambda s: translator.translate(s, dtype=torch.bfloat16), sources * 3)
    for first, second in zip(alone * 3, again, strict=True):
        assert same_bits(first, second)


@every_recipe
@every_geometry
def test_a_token_in_a_filled_chunk_does_not_depend_on_the_length(
    recipe: str, geometry: Geometry
) -> None:
    mapper = build_mapper(recipe, geometry)
    translator = Translator(mapper, chunk_tokens=8)
    source = source_of(mapper, tokens=43)
    whole = translator.translate(source, dtype=torch.float32)
    for tokens in (16, 21, 40):
        shorter = translator.translate(source.slice(0, tokens), dtype=torch.float32)
        filled = tokens // 8 * 8
        assert same_bits(shorter.slice(0, filled), whole.slice(0, filled))


@every_recipe
@pytest.mark.parametrize("known", [1, 5, 9])
def test_an_exact_prefix_takes_the_place_of_the_mapped(recipe: str, known: int) -> None:
    """The first source tokens are NaN: they must not even be looked at."""
    mapper = build_mapper(recipe, GEOMETRIES[1])
    source = source_of(mapper)
    prefix = random_cache(3, known, 4, 8, seed=9, dtype=torch.bfloat16)
    expected = Translator(mapper).translate(source, dtype=torch.bfloat16)
    for layer in (*source.keys, *source.values):
        layer[:known] = float("nan")
    given = Translator(mapper, chunk_tokens=4).translate(
        source, dtype=torch.bfloat16, prefix=prefix
    )
    assert same_bits(given.slice(0, known), prefix)
    for got, wanted in zip(given.keys + given.values, expected.keys + expected.values, strict=True):
        torch.testing.assert_close(got[known:], wanted[known:], rtol=3e-2, atol=3e-2)


@every_recipe
def test_a_prefix_may_be_all_that_is_asked_for(recipe: str) -> None:
    mapper = build_mapper(recipe, GEOMETRIES[1])
    prefix = random_cache(3, 5, 4, 8, seed=9)
    source = source_of(mapper)
    for tokens in (3, 5):
        given = Translator(mapper).translate(
            source, dtype=torch.float32, prefix=prefix, tokens=tokens
        )
        assert same_bits(given, prefix.slice(0, tokens))


@every_recipe
def test_only_the_tokens_asked_for_are_read_and_emitted(recipe: str) -> None:
    """The tokens of the native tail are NaN in the source."""
    mapper = build_mapper(recipe, GEOMETRIES[0])
    source = source_of(mapper)
    expected = Translator(mapper).translate(source.slice(0, 15), dtype=torch.float32)
    for layer in (*source.keys, *source.values):
        layer[15:] = float("nan")
    given = Translator(mapper).translate(source, dtype=torch.float32, tokens=15)
    assert given.tokens == 15
    assert same_bits(given, expected)


def test_the_length_behind_the_tail_still_sets_a_dynamic_frequency() -> None:
    mapper = build_mapper("full_head", GEOMETRIES[0])
    rope = Rope(
        type="dynamic", theta=1e4, head_dim=6, max_position_embeddings=8, parameters={"factor": 2.0}
    )
    side = {"rope": rope}
    mapper = dataclasses.replace(
        mapper,
        source=mapper.source.model_copy(update=side),
        target=mapper.target.model_copy(update=side),
    )
    source = source_of(mapper, tokens=20)
    translator = Translator(mapper)
    whole = translator.translate(source, dtype=torch.float32)
    part = translator.translate(source, dtype=torch.float32, tokens=12)
    alone = translator.translate(source.slice(0, 12), dtype=torch.float32)
    torch.testing.assert_close(part.keys[0], whole.keys[0][:12])
    assert (alone.keys[0] - part.keys[0]).abs().max() > 1e-2


def test_each_source_layer_that_is_read_is_stripped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stripped: Counter[int] = Counter()
    strip = RotaryTable.strip

    def counted(table: RotaryTable, keys: Tensor, out: Tensor | None = None) -> Tensor:
        stripped[keys.data_ptr()] += 1
        return strip(table, keys, out)

    monkeypatch.setattr(RotaryTable, "strip", counted)
    mapper = build_mapper("full_head", GEOMETRIES[0])
    source = source_of(mapper)
    Translator(mapper).translate(source, dtype=torch.float32)
    read = {j for sources in SOURCES for j in sources}
    assert stripped == {source.keys[j].data_ptr(): 1 for j in read}


def test_content_is_dropped_after_its_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    held: set[int] = set()
    peak, memory = 0, set()
    read, drop = SourceContent.read, SourceContent.drop

    def reading(content: SourceContent, layer: int) -> Layer:
        nonlocal peak
        held.add(layer)
        peak = max(peak, len(held))
        keys, values = read(content, layer)
        memory.add(keys.data_ptr())
        return keys, values

    def dropping(content: SourceContent, layer: int) -> None:
        held.remove(layer)
        drop(content, layer)

    monkeypatch.setattr(SourceContent, "read", reading)
    monkeypatch.setattr(SourceContent, "drop", dropping)
    band = tuple((layer, layer + 1) for layer in range(9))
    mapper = build_mapper("head_local", Geometry(10, 2, 6, 9, 2, 6), sources=band)
    source = source_of(mapper)
    given = Translator(mapper).translate(source, dtype=torch.float32)
    assert (peak, held, len(memory)) == (2, set(), 2)
    assert_equals_dense(given, mapper, source, TOLERANCE[torch.float32])


@every_recipe
@pytest.mark.parametrize("geometry", [*GEOMETRIES, Geometry(5, 1, 512, 3, 2, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_answer_is_written_where_the_caller_wants_it(
    recipe: str, geometry: Geometry, dtype: torch.dtype
) -> None:
    """Token by token or head by head, as the engines have it: the same bits as in new memory."""
    mapper = build_mapper(recipe, geometry)
    source, translator = source_of(mapper, dtype=dtype), Translator(mapper, chunk_tokens=7)
    expected = translator.translate(source, dtype=dtype)
    for head_major in (False, True):
        shape = (TOKENS, geometry.target_heads, geometry.target_dim)
        memory = [[torch.empty(shape, dtype=dtype) for _ in range(2)] for _ in SOURCES]
        if head_major:
            memory = [[by_head(tensor) for tensor in layer] for layer in memory]
        answer = [(keys, values) for keys, values in memory]
        given = list(translator.layers(source, dtype=dtype, answer=answer))
        assert [id(t) for layer in given for t in layer] == [id(t) for x in answer for t in x]
        keys, values = zip(*answer, strict=True)
        assert same_bits(KVCache(keys, values, source.positions), expected)


@pytest.mark.parametrize(
    ("layers", "shape", "dtype"),
    [
        (2, (TOKENS, 2, 6), torch.float32),
        (3, (TOKENS - 1, 2, 6), torch.float32),
        (3, (TOKENS, 2, 6), torch.bfloat16),
    ],
)
def test_memory_that_is_not_the_answers_is_refused(
    layers: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    mapper = build_mapper("full_head", GEOMETRIES[0])
    answer = [(torch.empty(shape, dtype=dtype),) * 2] * layers
    with pytest.raises(LayoutError, match=r"must be 3 layers of torch.float32 \[23, 2, 6\]"):
        Translator(mapper).layers(source_of(mapper), dtype=torch.float32, answer=answer)


@pytest.mark.parametrize("recipe", ["full_head", "head_local"])
def test_source_layers_side_by_side_or_apart_give_the_same(recipe: str) -> None:
    """A window that moves on takes up the slots that it leaves, so what is read wraps around."""
    sources = ((0, 1, 2), (1, 2, 3), (2, 3, 4), (0, 3, 4))
    mapper = build_mapper(recipe, GEOMETRIES[0], sources=sources)
    source = source_of(mapper)
    given = Translator(mapper).translate(source, dtype=torch.float32)
    assert_equals_dense(given, mapper, source, TOLERANCE[torch.float32])


def test_source_layers_are_pulled_only_as_far_as_the_next_target_layer_needs() -> None:
    pulled: list[int] = []

    def arriving(source: KVCache) -> Iterator[Layer]:
        for index, layer in enumerate(zip(source.keys, source.values, strict=True)):
            pulled.append(index)
            yield layer

    mapper = build_mapper("full_head", GEOMETRIES[0], sources=((0, 1), (1, 3), (0, 2), (4,)))
    source = source_of(mapper)
    translator = Translator(mapper)
    stream = translator.stream(arriving(source), source.positions, dtype=torch.float32)
    seen = []
    layers = []
    for layer in stream:
        layers.append(layer)
        seen.append(len(pulled))
    assert seen == [2, 4, 4, 5]
    keys, values = zip(*layers, strict=True)
    whole = translator.translate(source, dtype=torch.float32)
    assert same_bits(KVCache(keys, values, source.positions), whole)


def test_source_layers_are_let_go_once_their_content_is_made() -> None:
    mapper = build_mapper("full_head", GEOMETRIES[0])  # layer 2 is read by none, 0 late
    source = source_of(mapper)
    waiting = [(k.clone(), v.clone()) for k, v in zip(source.keys, source.values, strict=True)]
    alive = [weakref.ref(values.untyped_storage()) for _, values in waiting]

    def arriving() -> Iterator[Layer]:
        while waiting:
            yield waiting.pop(0)

    stream = Translator(mapper).stream(arriving(), source.positions, dtype=torch.float32)
    next(stream)
    next(stream)
    assert [ref() is not None for ref in alive] == [True, False, False, False, False]


def test_a_source_that_ends_early_is_an_error() -> None:
    mapper = build_mapper("full_head", GEOMETRIES[0])
    source = source_of(mapper)
    short = zip(source.keys[:4], source.values[:4], strict=True)
    stream = Translator(mapper).stream(short, source.positions, dtype=torch.float32)
    next(stream)
    with pytest.raises(LayoutError, match="ended before its layer 4"):
        next(stream)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_a_non_finite_source_never_leaves(bad: float, kind: str) -> None:
    mapper = build_mapper("head_local", GEOMETRIES[0])
    source = source_of(mapper)
    getattr(source, kind)[4][11, 1, 2] = bad
    stream = Translator(mapper, chunk_tokens=5).layers(source, dtype=torch.bfloat16)
    next(stream)
    with pytest.raises(NonFinite, match="target layer 1"):
        next(stream)


def test_what_overflows_in_the_answers_dtype_never_leaves() -> None:
    mapper = build_mapper("full_head", GEOMETRIES[0])
    source = source_of(mapper)
    source.values[3][2] = 1e6
    translator = Translator(mapper)
    assert translator.translate(source, dtype=torch.bfloat16).tokens == TOKENS
    with pytest.raises(NonFinite, match="target layer 0"):
        translator.translate(source, dtype=torch.float16)
    prefix = random_cache(3, 1, 2, 6)
    prefix.keys[1][0, 0, 0] = 1e6
    with pytest.raises(NonFinite, match="target layer 1"):
        translator.translate(source_of(mapper), dtype=torch.float16, prefix=prefix)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((4, 9, 2, 6), "4 layers, not 5"), ((5, 9, 6, 2), r"floats \[9, 2, 6\], not")],
)
def test_a_source_of_another_geometry_is_refused(
    shape: tuple[int, int, int, int], message: str
) -> None:
    translator = Translator(build_mapper("full_head", GEOMETRIES[0]))
    with pytest.raises(LayoutError, match=message):
        translator.translate(random_cache(*shape), dtype=torch.float32)


@pytest.mark.parametrize("tokens", [0, -1, TOKENS + 1])
def test_tokens_that_are_not_there_are_refused(tokens: int) -> None:
    mapper = build_mapper("full_head", GEOMETRIES[0])
    with pytest.raises(LayoutError, match=f"{tokens} tokens wanted, of a source with {TOKENS}"):
        Translator(mapper).layers(source_of(mapper), dtype=torch.float32, tokens=tokens)


def test_other_answers_than_16_and_32_bit_floats_are_refused() -> None:
    mapper = build_mapper("full_head", GEOMETRIES[0])
    with pytest.raises(ValueError, match="float8_e5m2"):
        Translator(mapper).layers(source_of(mapper), dtype=torch.float8_e5m2)


def test_a_prefix_that_cannot_stand_there_is_refused() -> None:
    mapper = build_mapper("full_head", GEOMETRIES[0])
    translator, prefix = Translator(mapper), random_cache(3, 2, 2, 6)
    later = source_of(mapper, start_position=1)
    with pytest.raises(LayoutError, match="begins at position 0"):
        translator.layers(later, dtype=torch.float32, prefix=prefix)
    with pytest.raises(LayoutError, match=r"\(3, 6, 2\), not \(3, 2, 6\)"):
        translator.layers(later, dtype=torch.float32, prefix=random_cache(3, 2, 6, 2))


def test_a_cpu_computes_in_float32_only() -> None:
    with pytest.raises(ValueError, match="a cpu device computes"):
        Translator(build_mapper("full_head", GEOMETRIES[0]), compute_dtype=torch.bfloat16)


def test_a_mapper_that_does_not_fit_itself_is_refused() -> None:
    mapper = build_mapper("full_head", GEOMETRIES[0])
    with pytest.raises(LayoutError, match="head_local has weights"):
        Translator(dataclasses.replace(mapper, recipe="head_local"))
    table = ExactPrefixes.of(
        {(1,): KVCache((torch.ones(1, 6, 2),), (torch.ones(1, 6, 2),), consecutive(1))}
    )
    with pytest.raises(LayoutError, match="prefix table"):
        Translator(dataclasses.replace(mapper, prefixes=table))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@every_recipe
@every_geometry
@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_on_cuda(recipe: str, geometry: Geometry, compute_dtype: torch.dtype) -> None:
    mapper = build_mapper(recipe, geometry)
    source = source_of(mapper, dtype=compute_dtype)
    translator = Translator(mapper, device="cuda", compute_dtype=compute_dtype, chunk_tokens=8)
    given = translator.translate(source, dtype=torch.float32)
    assert given.keys[0].is_cuda
    at_home = KVCache(
        tuple(k.cpu() for k in given.keys), tuple(v.cpu() for v in given.values), given.positions
    )
    assert_equals_dense(at_home, mapper, source, TOLERANCE[compute_dtype])
