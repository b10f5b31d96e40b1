"""A cache where it arrived: which bytes a layer needs, and what is left when layers are let go."""

import mmap

import pytest
import torch

from mappers.layouts import Geometry, Layout, write
from mappers.quantize import Storage
from mappers.stored import store
from service.errors import Problem
from service.pages import Pages
from service.reading_order import ReadingOrder
from service.received import Received
from service.side import Side
from service.wire import laid_out
from tests.service.pair import SOURCE, cache, mapper, raw

TOKENS, BLOCK = 24, 16
PAGED = (Layout.VLLM_HN2D, Layout.VLLM_2BNHD)


def received(layout: Layout) -> tuple[Received, torch.Tensor, int]:
    """Our cache in this layout, the memory that it lies in, and its bytes."""
    block = BLOCK if layout in PAGED else None
    geometry = Geometry(3, TOKENS, SOURCE.num_kv_heads, SOURCE.head_dim, block)
    side = Side(layout, geometry, Storage("float32"))
    tensors = write(layout, cache(TOKENS), block_tokens=block)
    data = torch.frombuffer(bytearray(b"".join(map(raw, tensors.values()))), dtype=torch.uint8)
    specs, nbytes = laid_out(side.tensors)
    return Received(side, data, specs, 0), data, nbytes


@pytest.mark.parametrize("layout", list(Layout))
def test_layers_and_rows_are_the_caches(layout: Layout) -> None:
    found, _, _ = received(layout)
    expected = cache(TOKENS)
    for ours, theirs in zip(found.layers(), expected.layers(), strict=True):
        assert all(map(torch.equal, ours, theirs))
    rows = torch.tensor([0, 5, 23])
    taken, wanted = found.take(rows), expected.take(rows)
    assert all(map(torch.equal, taken.keys + taken.values, wanted.keys + wanted.values))
    assert torch.equal(taken.positions, wanted.positions)


@pytest.mark.parametrize("layout", list(Layout))
def test_a_layer_needs_the_bytes_that_are_said_and_no_others(layout: Layout) -> None:
    found, data, nbytes = received(layout)
    whole = data.clone()
    assert found.needed_bytes[-1] == nbytes
    assert found.needed_bytes == sorted(found.needed_bytes)
    for index, needed in enumerate(found.needed_bytes):
        expected = [tensor.clone() for tensor in found.layer(index)]
        data[needed:] = 0xFF  # has not arrived yet
        assert all(map(torch.equal, found.layer(index), expected))
        data.fill_(0xFF)
        for begin, end in found.spans[index]:
            data[begin:end] = whole[begin:end]
        assert all(map(torch.equal, found.layer(index), expected))
        data.copy_(whole)
    covered = sorted(span for spans in found.spans for span in spans)
    assert covered[0][0] == 0
    assert [end for _, end in covered] == [*(begin for begin, _ in covered[1:]), nbytes]


def test_scales_that_cannot_be_used_are_found_in_their_layer() -> None:
    storage = Storage("int8", "per_head")
    side = Side(Layout.NHD, Geometry(3, TOKENS, 2, 8), storage)
    stored = store(cache(TOKENS), storage)
    parts = [
        part
        for keys, values in zip(stored.keys, stored.values, strict=True)
        for part in (keys[0], values[0], keys[1], values[1])
    ]
    specs, nbytes = laid_out(side.tensors)
    data = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
    assert data.numel() == nbytes
    found = Received(side, data, specs, 0)
    expected = list(stored.layers())
    begin, end, *_ = specs["layers.1.v_scale"][2:]
    data[begin:end] = 0
    assert torch.equal(found.layer(0)[1], expected[0][1])
    with pytest.raises(Problem, match="layer 1, v: scale: expected values above 0"):
        found.layer(1)


def test_the_order_in_which_a_mapper_reads() -> None:
    """Its target layers read source layers 0 and 1, 1 and 2, 0 and 2, 0 and 1."""
    order = ReadingOrder.of(mapper())
    assert order.needed_layers == (2, 3, 3, 2)
    assert order.expiring == ((), (), (2,), (0, 1))


def test_only_whole_pages_of_what_is_let_go_are_gone() -> None:
    page = mmap.PAGESIZE
    pages = Pages(4 * page + 100)
    pages.data.fill_(7)
    pages.let_go(page - 1, page + 1)
    assert bool((pages.data == 7).all())
    pages.let_go(page - 1, 3 * page + 1)
    assert bool((pages.data[:page] == 7).all())
    assert not bool(pages.data[page : 3 * page].any())
    assert bool((pages.data[3 * page :] == 7).all())
    pages.let_go(3 * page, 4 * page + 100)
    assert bool((pages.data[4 * page :] == 7).all())
