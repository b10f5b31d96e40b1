"""Translating with reads of earlier tokens and shared choices, against rows put together by hand.

An independent route assembles the inputs: content of the whole text, each row beside those before
it, the heads picked by number; then one dense product, the norm and the rotation.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mappers.cache import KVCache
from mappers.geometry import Geometry
from mappers.mapper import AffineMap, HeadReads, Heads, LayerMap, Mapper, layers_of
from mappers.prefixes import ExactPrefixes
from mappers.recipes import flops_per_token
from mappers.recipes.top_heads import TOP_HEADS, multiply_gathered
from mappers.translate import Translator
from tests.mappers.pairs import identity, random_cache, rotate

GEOMETRY = Geometry(3, 2, 6, 2, 4, 8)
HEADS = 12  # keys and values of a token: 2 * L_s * H_s
TOKENS = 23
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
every_share = pytest.mark.parametrize("share", ["head", "layer", "keys only"])


def numbered(source: KVCache, lags: int, theta: float | None = None) -> Tensor:
    """All source heads of each token by number, float64 ``[T, (lags + 1) * 12, D]``.

    ``theta``: of the rotary embedding that the keys carry; content space if None.
    """
    keys = [
        k.double() if theta is None else rotate(k, -source.positions, theta) for k in source.keys
    ]
    own = torch.cat([*keys, *(values.double() for values in source.values)], dim=1)
    rows = [[own[max(token - lag, 0)] for lag in range(lags + 1)] for token in range(len(own))]
    return torch.stack([torch.cat(row) for row in rows])


def random_heads(generator: torch.Generator, groups: int, m: int, lags: int, heads: int) -> Heads:
    """A choice of m heads for each group, the farthest lag in it."""
    count, chosen = (lags + 1) * heads, []
    for _ in range(groups):
        order = torch.randperm(count - 1, generator=generator)[: m - 1].tolist()
        chosen.append(tuple(sorted([*order, count - 1])))
    return tuple(chosen)


def build(
    share: str, *, geometry: Geometry = GEOMETRY, m: int = 3, lags: int = 1, norm: bool = False
) -> Mapper:
    """Random maps of random reads; with ``keys only`` the values' heads choose for themselves."""
    generator = torch.Generator().manual_seed(m + 10 * lags)
    g, own = geometry, geometry.target_heads
    groups = {"head": (own, own), "layer": (1, 1), "keys only": (1, own)}[share]

    def affine(group: int) -> AffineMap:
        heads = random_heads(generator, group, m, lags, 2 * g.source_layers * g.source_heads)
        inputs, outputs = TOP_HEADS.weight_shape(g, m)
        weight = torch.randn(inputs, outputs, generator=generator) / inputs**0.5
        return AffineMap(weight, 2 * torch.randn(outputs, generator=generator), heads)

    def layer() -> LayerMap:
        keys, values = (affine(group) for group in groups)
        assert keys.heads is not None
        assert values.heads is not None
        sources = layers_of(HeadReads(keys.heads, values.heads), g)
        weights = 0.5 + torch.rand(g.target_dim, generator=generator)
        return LayerMap(sources, keys, values, weights if norm else None)

    return Mapper(
        source=identity(g.source_layers, g.source_heads, g.source_dim, theta=1e4),
        target=identity(g.target_layers, g.target_heads, g.target_dim, theta=5e5),
        recipe="top_heads",
        layers=tuple(layer() for _ in range(g.target_layers)),
        prefixes=ExactPrefixes(),
        skipped_positions=0,
    )


def source_of(geometry: Geometry = GEOMETRY, tokens: int = TOKENS, **kwargs: object) -> KVCache:
    shape = (geometry.source_layers, tokens, geometry.source_heads, geometry.source_dim)
    return random_cache(*shape, **kwargs)  # type: ignore[arg-type]


def dense(mapper: Mapper, source: KVCache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each target layer in float64, by no code of the library."""
    rows, layers = numbered(source, mapper.lags, mapper.source.rope.theta), []
    for layer in mapper.layers:
        keys, values = (_dense(mapper, affine, rows) for affine in (layer.keys, layer.values))
        if layer.key_norm is not None:
            unit = keys / layer.key_norm
            keys = keys / unit.square().mean(-1, keepdim=True).sqrt()
        layers.append((rotate(keys, source.positions, mapper.target.rope.theta), values))
    return layers


def _dense(mapper: Mapper, affine: AffineMap, rows: Tensor) -> Tensor:
    heads, dim = mapper.geometry.target_heads, mapper.geometry.target_dim
    assert affine.heads is not None
    outputs = []
    for head in range(heads):
        chosen = affine.heads[head if len(affine.heads) > 1 else 0]
        columns = slice(head * dim, (head + 1) * dim)
        x = torch.cat([rows[:, number] for number in chosen], dim=1)
        outputs.append(x @ affine.weight[:, columns].double() + affine.bias[columns].double())
    return torch.stack(outputs, 1)


def assert_dense(
    translated: KVCache, mapper: Mapper, source: KVCache, *, known: int = 0, tolerance: float = 2e-5
) -> None:
    for layer, expected in enumerate(dense(mapper, source)):
        pair = translated.keys[layer], translated.values[layer]
        for got, wanted in zip(pair, expected, strict=True):
            torch.testing.assert_close(
                got[known:].double(), wanted[known:], rtol=tolerance, atol=tolerance
            )


def same_bits(first: KVCache, second: KVCache) -> bool:
    pairs = zip((*first.keys, *first.values), (*second.keys, *second.values), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@every_share
@pytest.mark.parametrize("lags", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start_position", [0, 1000])
def test_translation_equals_the_dense_route(
    share: str, lags: int, dtype: torch.dtype, start_position: int
) -> None:
    mapper = build(share, lags=lags, norm=lags == 2)
    assert mapper.lags == lags
    source = source_of(dtype=dtype, start_position=start_position)
    for chunk in (1, 2, 7, None):
        translated = Translator(mapper, chunk_tokens=chunk).translate(source, dtype=dtype)
        assert all(t.is_contiguous() for t in (*translated.keys, *translated.values))
        assert_dense(translated, mapper, source, tolerance=TOLERANCE[dtype])


@every_share
@pytest.mark.parametrize("known", [1, 2, 5, 22])
def test_behind_an_exact_prefix_the_rows_before_are_the_sources_own(share: str, known: int) -> None:
    """Earlier ones than those are NaN: they must not even be looked at."""
    mapper = build(share, lags=2)
    source, prefix = source_of(), random_cache(2, known, 4, 8, seed=9)
    expected = KVCache(
        tuple(keys.clone() for keys in source.keys),
        tuple(values.clone() for values in source.values),
        source.positions,
    )
    for layer in (*source.keys, *source.values):
        layer[: max(0, known - 2)] = float("nan")
    for chunk in (1, 4, None):
        translated = Translator(mapper, chunk_tokens=chunk).translate(
            source, dtype=torch.float32, prefix=prefix
        )
        assert same_bits(translated.slice(0, known), prefix)
        assert_dense(translated, mapper, expected, known=known)


def whole_numbers(tensor: Tensor) -> Tensor:
    return (4 * tensor).round()


def of_whole_numbers(affine: AffineMap) -> AffineMap:
    weight, bias = whole_numbers(affine.weight), whole_numbers(affine.bias)
    return replace(affine, weight=weight, bias=bias)


@every_share
def test_the_same_bits_whatever_the_chunking(share: str) -> None:
    """Of whole numbers, at position 0: whatever order a product adds them up in, it is exact."""
    mapper = build(share, lags=2)
    layers = tuple(
        LayerMap(layer.sources, of_whole_numbers(layer.keys), of_whole_numbers(layer.values))
        for layer in mapper.layers
    )
    mapper = replace(mapper, layers=layers)
    cache = source_of()
    source = KVCache(
        tuple(map(whole_numbers, cache.keys)),
        tuple(map(whole_numbers, cache.values)),
        torch.zeros(TOKENS, dtype=torch.int64),
    )
    whole = Translator(mapper).translate(source, dtype=torch.float32)
    for chunk in range(1, TOKENS + 1):
        again = Translator(mapper, chunk_tokens=chunk).translate(source, dtype=torch.float32)
        assert same_bits(whole, again)
    assert_dense(whole, mapper, source)


def test_a_streamed_source_gives_the_bits_of_the_whole() -> None:
    mapper, source = build("layer"), source_of()
    layers = zip(source.keys, source.values, strict=True)
    translator = Translator(mapper, chunk_tokens=5)
    streamed = translator.stream(layers, source.positions, dtype=torch.float32)
    keys, values = zip(*streamed, strict=True)
    whole = translator.translate(source, dtype=torch.float32)
    assert same_bits(KVCache(keys, values, source.positions), whole)


def test_of_a_later_part_only_the_first_rows_differ_from_the_whole() -> None:
    """They have no predecessors there; ``lags`` of them are approximations."""
    mapper, source = build("layer", lags=2), source_of(tokens=40)
    translator = Translator(mapper)
    whole = translator.translate(source, dtype=torch.float32)
    part = translator.translate(source.slice(16, 40), dtype=torch.float32)
    for got, all_of_it in zip(
        (*part.keys, *part.values), (*whole.keys, *whole.values), strict=True
    ):
        torch.testing.assert_close(got[2:], all_of_it[18:], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(got[1], all_of_it[17], atol=1e-2)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_geometry_choice_and_chunking(data: st.DataObject) -> None:
    def number(least: int, most: int) -> int:
        return data.draw(st.integers(least, most))

    geometry = Geometry(
        number(1, 3), number(1, 3), 2 * number(1, 3), number(1, 2), number(1, 3), 2 * number(1, 3)
    )
    lags, tokens = number(0, 4), number(1, 9)
    known = number(0, tokens)
    candidates = 2 * geometry.source_layers * geometry.source_heads
    share = data.draw(st.sampled_from(["head", "layer", "keys only"]))
    mapper = build(share, geometry=geometry, m=number(1, candidates), lags=lags)
    source = source_of(geometry, tokens, seed=number(0, 5))
    shape = (geometry.target_layers, known, geometry.target_heads, geometry.target_dim)
    prefix = random_cache(*shape) if known else None
    translator = Translator(mapper, chunk_tokens=number(1, 10))
    translated = translator.translate(source, dtype=torch.float32, prefix=prefix)
    assert_dense(translated, mapper, source, known=known)


@every_share
def test_gathered_products_are_those_of_one_read_after_the_other(share: str) -> None:
    """The way of CUDA, where the dtypes of a CPU allow it."""
    mapper, source = build(share), source_of()
    contents = [torch.cat([t[:1], t]) for t in (*source.keys, *source.values)]
    layer = mapper.layers[0]
    sources = (*layer.sources, *(3 + j for j in layer.sources))
    for affine in (layer.keys, layer.values):
        prepared = TOP_HEADS.prepare(
            affine, layer.sources, GEOMETRY, device=torch.device("cpu"), dtype=torch.float32
        )
        first, second = (torch.full((TOKENS, 4, 8), float("nan")) for _ in range(2))
        TOP_HEADS.apply(prepared, [contents[j] for j in sources], first)
        multiply_gathered(prepared, [contents[j] for j in sources], second)
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_a_shared_choice_costs_what_as_many_own_ones_cost() -> None:
    costs = [flops_per_token(build(share, m=5)) for share in ("layer", "head", "keys only")]
    assert costs == [2 * 4 * (5 * 6 * 4 * 8)] * 3  # two layers, keys and values
