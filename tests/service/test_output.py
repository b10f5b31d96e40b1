"""Where an answer lies while it is computed, and what must not leave."""

from dataclasses import replace

import pytest
import torch

from mappers.errors import NonFinite
from mappers.layouts import Geometry, Layout, read_layer
from mappers.quantize import Storage
from service.output import Output
from service.side import Side

CPU = torch.device("cpu")
SHAPE = (5, 2, 4)
UNPAGED = [Layout.NHD, Layout.HND, Layout.HF, Layout.LMCACHE]
PAGED = [Layout.VLLM_HN2D, Layout.VLLM_2BNHD]


def side(layout: Layout, dtype: str = "float32") -> Side:
    tokens, heads, dim = SHAPE
    geometry = Geometry(3, tokens, heads, dim, 4 if layout in PAGED else None)
    return Side(layout, geometry, Storage(dtype))


def made(form: Side) -> tuple[Output, torch.Tensor]:
    memory = torch.zeros(form.nbytes, dtype=torch.uint8)
    return Output(form, memory), memory


@pytest.mark.parametrize("layout", UNPAGED)
def test_a_layer_that_is_computed_in_place_is_not_copied(layout: Layout) -> None:
    output, memory = made(side(layout))
    other, copied = made(side(layout))
    layers = output.in_place(CPU)
    if layers is None:
        raise AssertionError(layout)
    for index, (keys, values) in enumerate(layers):
        output.begin(index)
        torch.manual_seed(index)
        keys.copy_(torch.randn(SHAPE))
        values.copy_(torch.randn(SHAPE))
        output.end(index, keys, values)
        other.begin(index)
        other.end(index, keys.clone(), values.clone())
    assert torch.equal(memory, copied)
    assert keys.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


@pytest.mark.parametrize("layout", PAGED)
def test_blocks_with_padding_are_written_by_the_output(layout: Layout) -> None:
    output, _ = made(side(layout))
    assert output.in_place(CPU) is None


def test_eight_bits_are_rounded_by_the_output() -> None:
    form = side(Layout.NHD)
    output, _ = made(replace(form, storage=Storage("float8_e4m3fn")))
    assert output.in_place(CPU) is None


def test_another_device_cannot_compute_in_place() -> None:
    output, _ = made(side(Layout.NHD))
    assert output.in_place(torch.device("meta")) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_that_was_not_written_in_place_is_found(dtype: str) -> None:
    output, _ = made(side(Layout.NHD, dtype))
    layers = output.in_place(CPU)
    if layers is None:
        raise AssertionError(dtype)
    keys, values = layers[0]
    output.begin(0)
    keys.fill_(1)
    values[:-1].fill_(1)
    with pytest.raises(NonFinite):
        output.end(0, keys, values)


@pytest.mark.parametrize("layout", PAGED)
def test_blocks_hold_what_was_given(layout: Layout) -> None:
    form = side(layout)
    output, memory = made(form)
    keys, values = torch.randn(SHAPE), torch.randn(SHAPE)
    output.begin(0)
    output.end(0, keys, values)
    name, tensor = next(iter(form.forms.items()))
    numbers = memory[: tensor.nbytes].view(torch.float32).view(tensor.shape)
    read = read_layer(layout, {name: numbers}, 0, form.geometry)
    assert torch.equal(read[0], keys)
    assert torch.equal(read[1], values)
