"""Every layout both ways, against an index written out by hand.

Each element's value says which layer, kind, token, head and dim it belongs to, so that any two
dimensions that are mixed up show even where the shapes agree.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mappers.cache import DTYPES, KVCache, consecutive
from mappers.errors import LayoutError
from mappers.layouts import (
    Geometry,
    Layout,
    allocate,
    read,
    read_layer,
    tensor_names,
    tensor_shape,
    write,
    write_layer,
)

Where = tuple[str, tuple[int, ...]]
PAGED = (Layout.VLLM_HN2D, Layout.VLLM_2BNHD)


def nhd(g: Geometry, layer: int, kind: int, token: int, head: int, dim: int) -> Where:
    return f"layers.{layer}.{'kv'[kind]}", (token, head, dim)


def hnd(g: Geometry, layer: int, kind: int, token: int, head: int, dim: int) -> Where:
    return f"layers.{layer}.{'kv'[kind]}", (head, token, dim)


def hf(g: Geometry, layer: int, kind: int, token: int, head: int, dim: int) -> Where:
    return f"layers.{layer}.{'kv'[kind]}", (0, head, token, dim)


def vllm_hn2d(g: Geometry, layer: int, kind: int, token: int, head: int, dim: int) -> Where:
    block, row = divmod(token, g.block_tokens or 0)
    return f"layers.{layer}.kv", (block, head, row, kind * g.head_dim + dim)


def vllm_2bnhd(g: Geometry, layer: int, kind: int, token: int, head: int, dim: int) -> Where:
    block, row = divmod(token, g.block_tokens or 0)
    return f"layers.{layer}.kv", (kind, block, row, head, dim)


def lmcache(g: Geometry, layer: int, kind: int, token: int, head: int, dim: int) -> Where:
    return "kv", (kind, layer, token, head * g.head_dim + dim)


INDEX: dict[Layout, Callable[..., Where]] = {
    Layout.NHD: nhd,
    Layout.HND: hnd,
    Layout.HF: hf,
    Layout.VLLM_HN2D: vllm_hn2d,
    Layout.VLLM_2BNHD: vllm_2bnhd,
    Layout.LMCACHE: lmcache,
}


def numbered(g: Geometry, dtype: torch.dtype, *, strided: bool) -> KVCache:
    """A cache whose elements all differ in bits (8-bit dtypes: in the low bits of their number)."""
    shape = (2, g.layers, g.tokens, g.kv_heads, g.head_dim)
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    width = dtype.itemsize
    # As bit patterns, so that no dtype rounds two of them together; 8-bit ones repeat at 251.
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]
    bits = (numbers % 251 if width == 1 else numbers).to(whole)
    if strided:
        # Same elements, other memory order: tokens innermost.
        bits = bits.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    states = bits.view(dtype)
    return KVCache(states[0].unbind(), states[1].unbind(), consecutive(g.tokens))


def as_bytes(tensor: Tensor) -> Tensor:
    # Not contiguous(): that leaves the odd strides of dimensions of size 1, and view refuses them.
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(as_bytes(left), as_bytes(right))


def same_cache(left: KVCache, right: KVCache) -> bool:
    pairs = zip((*left.keys, *left.values), (*right.keys, *right.values), strict=True)
    return left.dtype == right.dtype and all(same_bits(a, b) for a, b in pairs)


# Small sizes, so that tokens == heads, heads == 2 and heads == dim come often.
GEOMETRIES = st.builds(
    Geometry,
    layers=st.integers(1, 3),
    tokens=st.integers(0, 7),
    kv_heads=st.integers(1, 4),
    head_dim=st.integers(1, 4),
    block_tokens=st.integers(1, 4),
)
LAYOUTS = st.sampled_from(Layout)
# Where int8 is, its scales are too: such caches are read in the service's tests.
ALL_DTYPES = st.sampled_from(sorted(n for n, dtype in DTYPES.items() if dtype.is_floating_point))


@given(layout=LAYOUTS, g=GEOMETRIES, dtype=ALL_DTYPES, strided=st.booleans())
@settings(max_examples=150, deadline=None)
def test_writing_puts_every_element_where_the_layout_says(
    layout: Layout, g: Geometry, dtype: str, strided: bool
) -> None:
    given_cache = numbered(g, DTYPES[dtype], strided=strided)
    tensors = write(layout, given_cache, block_tokens=g.block_tokens)
    names = {name for layer in range(g.layers) for name in tensor_names(layout, layer)}
    assert tensors.keys() == names
    expected = {
        name: torch.zeros(tensor_shape(layout, g), dtype=DTYPES[dtype]).view(torch.uint8)
        for name in names
    }
    item = DTYPES[dtype].itemsize
    for kind, kinds in enumerate((given_cache.keys, given_cache.values)):
        for layer, states in enumerate(kinds):
            for token in range(g.tokens):
                for head in range(g.kv_heads):
                    row = as_bytes(states[token, head])
                    for dim in range(g.head_dim):
                        name, place = INDEX[layout](g, layer, kind, token, head, dim)
                        *outer, last = place
                        at = (*outer, slice(last * item, (last + 1) * item))
                        expected[name][at] = row[dim * item : (dim + 1) * item]
    for name in names:
        assert torch.equal(tensors[name].view(torch.uint8), expected[name])


@given(layout=LAYOUTS, g=GEOMETRIES, dtype=ALL_DTYPES, strided=st.booleans())
@settings(max_examples=150, deadline=None)
def test_reading_inverts_writing(layout: Layout, g: Geometry, dtype: str, strided: bool) -> None:
    given_cache = numbered(g, DTYPES[dtype], strided=strided)
    tensors = write(layout, given_cache, block_tokens=g.block_tokens)
    assert same_cache(read(layout, tensors, g, given_cache.positions), given_cache)


@given(layout=LAYOUTS, g=GEOMETRIES, dtype=ALL_DTYPES)
@settings(max_examples=100, deadline=None)
def test_reading_takes_any_strides(layout: Layout, g: Geometry, dtype: str) -> None:
    given_cache = numbered(g, DTYPES[dtype], strided=False)
    tensors = write(layout, given_cache, block_tokens=g.block_tokens)
    strided = {}
    for name, tensor in tensors.items():
        order = tuple(reversed(range(tensor.ndim)))
        strided[name] = tensor.permute(order).contiguous().permute(order)
    assert same_cache(read(layout, strided, g, given_cache.positions), given_cache)


@given(layout=LAYOUTS, g=GEOMETRIES)
@settings(max_examples=60, deadline=None)
def test_writing_fills_what_was_there_before(layout: Layout, g: Geometry) -> None:
    """Every element is written, the unused rows of the last block with zeros."""
    given_cache = numbered(g, torch.float32, strided=False)
    clean = write(layout, given_cache, block_tokens=g.block_tokens)
    dirty = {name: torch.full_like(tensor, torch.nan) for name, tensor in clean.items()}
    for layer in range(g.layers):
        write_layer(layout, dirty, layer, given_cache.keys[layer], given_cache.values[layer], g)
    for name, tensor in clean.items():
        assert same_bits(dirty[name], tensor)


def test_what_is_in_unused_rows_is_never_read() -> None:
    g = Geometry(layers=1, tokens=3, kv_heads=2, head_dim=2, block_tokens=4)
    given_cache = numbered(g, torch.float32, strided=False)
    tensors = write(Layout.VLLM_2BNHD, given_cache, block_tokens=4)
    tensors["layers.0.kv"][:, 0, 3:] = torch.nan
    assert same_cache(read(Layout.VLLM_2BNHD, tensors, g, given_cache.positions), given_cache)


def test_the_declared_name_decides_where_shapes_agree() -> None:
    """Tokens == heads: NHD and HND have one shape, and only the name tells them apart."""
    g = Geometry(layers=1, tokens=2, kv_heads=2, head_dim=3)
    given_cache = numbered(g, torch.float32, strided=False)
    tensors = write(Layout.NHD, given_cache)
    assert tensor_shape(Layout.NHD, g) == tensor_shape(Layout.HND, g)
    wrong = read(Layout.HND, tensors, g, given_cache.positions)
    assert not same_cache(wrong, given_cache)
    assert torch.equal(wrong.keys[0].transpose(0, 1), given_cache.keys[0])


def test_two_kv_heads_with_packed_pairs() -> None:
    """The shape of vllm_2bnhd can equal that of vllm_hn2d when there are two heads and blocks."""
    g = Geometry(layers=1, tokens=4, kv_heads=2, head_dim=4, block_tokens=2)
    packed = write(Layout.VLLM_HN2D, numbered(g, torch.float32, strided=False), block_tokens=2)
    assert packed["layers.0.kv"].shape == (2, 2, 2, 8)
    with pytest.raises(LayoutError, match=r"expected float \[2, 2, 2, 2, 4\]"):
        read_layer(Layout.VLLM_2BNHD, packed, 0, g)


def test_allocating_some_layers_only() -> None:
    g = Geometry(layers=3, tokens=2, kv_heads=1, head_dim=2, block_tokens=2)
    made = allocate(Layout.VLLM_HN2D, g, torch.float16, layers=[1])
    assert made.keys() == {"layers.1.kv"}
    assert made["layers.1.kv"].dtype == torch.float16
    assert not made["layers.1.kv"].any()


def test_reading_is_a_view_where_the_layout_allows() -> None:
    g = Geometry(layers=1, tokens=3, kv_heads=2, head_dim=2, block_tokens=3)
    for layout in (Layout.NHD, Layout.HND, Layout.HF, Layout.VLLM_2BNHD, Layout.LMCACHE):
        tensors = write(layout, numbered(g, torch.float32, strided=False), block_tokens=3)
        keys, _ = read_layer(layout, tensors, 0, g)
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
        assert keys.untyped_storage().data_ptr() in storages, layout


G = Geometry(layers=2, tokens=3, kv_heads=2, head_dim=4, block_tokens=2)


@pytest.mark.parametrize("layout", Layout)
def test_refuses_a_missing_tensor(layout: Layout) -> None:
    tensors = allocate(layout, G, torch.float32)
    del tensors[tensor_names(layout, 1)[-1]]
    with pytest.raises(LayoutError, match=f"layout {layout.value} needs a tensor"):
        read_layer(layout, tensors, 1, G)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("change", ["more", "flat", "int"])
def test_refuses_another_shape_or_dtype(layout: Layout, change: str) -> None:
    tensors = allocate(layout, G, torch.float32)
    name = tensor_names(layout, 0)[0]
    tensors[name] = {
        "more": torch.cat([tensors[name]] * 2, dim=-1),
        "flat": tensors[name].flatten(),
        "int": tensors[name].to(torch.int32),
    }[change]
    with pytest.raises(LayoutError, match=f"{name}: expected float"):
        read_layer(layout, tensors, 0, G)


def test_refuses_keys_and_values_of_two_dtypes() -> None:
    tensors = allocate(Layout.NHD, G, torch.float32)
    tensors["layers.0.v"] = tensors["layers.0.v"].half()
    with pytest.raises(LayoutError, match="differ in dtype"):
        read_layer(Layout.NHD, tensors, 0, G)


@pytest.mark.parametrize("layer", [-1, 2])
def test_refuses_a_layer_that_is_not_there(layer: int) -> None:
    tensors = allocate(Layout.LMCACHE, G, torch.float32)
    with pytest.raises(LayoutError, match=f"layer {layer}"):
        read_layer(Layout.LMCACHE, tensors, layer, G)


@pytest.mark.parametrize("layout", PAGED)
@pytest.mark.parametrize("block_tokens", [None, 0, -1])
def test_paged_layouts_need_a_block_size(layout: Layout, block_tokens: int | None) -> None:
    g = Geometry(layers=1, tokens=3, kv_heads=2, head_dim=4, block_tokens=block_tokens)
    with pytest.raises(LayoutError, match="block_tokens"):
        tensor_shape(layout, g)


def test_refuses_states_of_another_geometry() -> None:
    tensors = allocate(Layout.NHD, G, torch.float32)
    good, bad = torch.ones(3, 2, 4), torch.ones(2, 3, 4)
    for keys, values in ((bad, good), (good, bad)):
        with pytest.raises(LayoutError, match="keys and values"):
            write_layer(Layout.NHD, tensors, 0, keys, values, G)


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim"])
def test_sizes_are_positive(field: str) -> None:
    sizes = {"layers": 1, "tokens": 1, "kv_heads": 1, "head_dim": 1, field: 0}
    with pytest.raises(LayoutError, match="1 or more"):
        Geometry(**sizes)
