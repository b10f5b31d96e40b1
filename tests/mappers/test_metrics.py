"""KL, top-1 and NLL against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mappers.metrics import Measures, Reference, context_recovered, gap_recovered


def compare(native: Tensor, arm: Tensor, next_ids: Tensor) -> Measures:
    return Reference(native, next_ids).compare(arm)


def test_measures_of_two_small_distributions() -> None:
    native = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]))
    arm = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]])) + 3.0
    got = compare(native, arm, torch.tensor([1, 0]))
    first = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert got.kl == pytest.approx(first / 2, rel=1e-5)
    assert got.kl_max == pytest.approx(first, rel=1e-5)
    assert got.top1 == 0.5
    assert got.nll == pytest.approx((math.log(2) - math.log(0.8)) / 2, rel=1e-5)


def test_kl_is_that_of_native_to_arm_and_not_the_reverse() -> None:
    torch.manual_seed(0)
    native, arm = torch.randn(5, 40), torch.randn(5, 40)
    p, q = (torch.distributions.Categorical(logits=x.double()) for x in (native, arm))
    expected = torch.distributions.kl_divergence(p, q)
    got = compare(native, arm, torch.zeros(5, dtype=torch.int64))
    assert got.kl == pytest.approx(expected.mean().item(), rel=1e-5)
    assert got.kl_max == pytest.approx(expected.max().item(), rel=1e-5)
    reverse = torch.distributions.kl_divergence(q, p).mean().item()
    assert got.kl != pytest.approx(reverse, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_have_no_kl_at_all(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 1000, dtype=dtype) * 20
    got = compare(logits, logits.clone(), torch.zeros(4, dtype=torch.int64))
    assert (got.kl, got.kl_max, got.top1) == (0.0, 0.0, 1.0)


def test_a_nan_stays_a_nan() -> None:
    logits = torch.zeros(2, 3)
    broken = logits.clone()
    broken[1, 1] = float("nan")
    got = compare(logits, broken, torch.zeros(2, dtype=torch.int64))
    assert math.isnan(got.kl)
    assert math.isnan(got.kl_max)


def test_gap_and_context_recovered() -> None:
    assert gap_recovered(3.0, 2.25, 2.0) == 0.75
    assert gap_recovered(3.0, 3.5, 2.0) == -0.5
    assert math.isnan(gap_recovered(2.0, 2.0, 2.0))
    assert context_recovered(0.1, 0.4) == 0.75
    assert math.isnan(context_recovered(0.1, 0.0))


def test_quantiles_and_the_worst_position_are_those_of_the_positions_own_kl() -> None:
    torch.manual_seed(2)
    native, arm = torch.randn(32, 12), torch.randn(32, 12)
    p, q = (torch.distributions.Categorical(logits=x.double()) for x in (native, arm))
    kl = torch.distributions.kl_divergence(p, q)
    got = compare(native, arm, torch.zeros(32, dtype=torch.int64))
    assert got.worst_position == int(kl.argmax())
    assert got.kl_p95 == pytest.approx(np.quantile(kl.numpy(), 0.95), rel=1e-5)
    assert got.kl_p99 == pytest.approx(np.quantile(kl.numpy(), 0.99), rel=1e-5)


def test_top5_counts_shared_tokens_in_any_order() -> None:
    native = torch.tensor([[9.0, 8, 7, 6, 5, 0, 0, 0], [9.0, 8, 7, 6, 5, 4, 3, 2]])
    arm = torch.tensor([[5.0, 6, 7, 8, 9, 0, 0, 0], [0.0, 0, 7, 6, 5, 9, 9, 0]])
    got = compare(native, arm, torch.zeros(2, dtype=torch.int64))
    assert (got.top1, got.top5) == (0.0, 0.8)
