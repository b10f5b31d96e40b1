"""What is done to products and source keys number by number, against formulas written out."""

import pytest
import torch
from torch import Tensor

from mappers import finish
from mappers.finish import Finish, put, strip
from mappers.rope import RotaryTable

TOKENS, HEADS, DIM = 11, 3, 8


@pytest.fixture
def table() -> RotaryTable:
    angles = torch.linspace(-3, 40, TOKENS * DIM // 2).view(TOKENS, DIM // 2)
    return RotaryTable(1.5 * angles.cos(), 1.5 * angles.sin(), 1.5, DIM, "half")


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_norm_and_rotation_come_in_this_order(dtype: torch.dtype, table: RotaryTable) -> None:
    product, bias, norm = numbers(0, TOKENS, HEADS, DIM), numbers(1, HEADS * DIM), numbers(2, DIM)
    keys = product.double() + bias.double().view(HEADS, DIM)
    keys = keys / (keys / norm.double()).square().mean(-1, keepdim=True).sqrt()
    a, b = keys.chunk(2, dim=-1)
    cos, sin = table.cos.double()[:, None], table.sin.double()[:, None]
    expected = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    out, proof = torch.empty(TOKENS, HEADS, DIM, dtype=dtype), torch.zeros(())
    put(product, out, Finish(bias, norm, table), proof)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    assert bool(proof.isfinite())


def test_products_may_lie_in_the_answer_already() -> None:
    out, proof, bias = numbers(0, TOKENS, HEADS, DIM), torch.zeros(()), numbers(1, HEADS * DIM)
    expected = out + bias.view(HEADS, DIM)
    put(out, out, Finish(bias), proof)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_the_proof_does_not_stay_finite_when_a_number_is_not(bad: float) -> None:
    product, proof = numbers(0, TOKENS, HEADS, DIM), torch.zeros(())
    product[7, 1, 2] = bad
    put(product, torch.empty(product.shape, dtype=torch.float16), Finish(), proof)
    assert not bool(proof.isfinite())


def test_rows_of_a_finish_are_those_of_its_table(table: RotaryTable) -> None:
    norm, bias = numbers(0, DIM), numbers(1, HEADS * DIM)
    part = Finish(norm=norm, table=table).of(slice(2, 5), bias)
    assert part.table is not None
    assert torch.equal(part.table.cos, table.cos[2:5])
    assert part.norm is norm
    assert part.bias is bias
    assert Finish().of(slice(2, 5), None) == Finish()


def test_stripping_undoes_the_rotation(table: RotaryTable) -> None:
    content, out = numbers(0, TOKENS, HEADS, DIM), torch.empty(TOKENS, HEADS, DIM)
    strip(table, table.apply(content), out)
    torch.testing.assert_close(out, content)


def test_without_a_gpu_no_kernel_is_used_and_none_can_be_compiled() -> None:
    """Whether triton is there (it finds no driver then) or is not."""
    assert finish.kernel_for(torch.device("cpu")) is None
    if not torch.cuda.is_available():
        assert finish._compiled.__wrapped__(torch.device("cpu")) is None
