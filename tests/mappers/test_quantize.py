"""8-bit float storage: how close it comes, and what it refuses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mappers.errors import LayoutError
from mappers.quantize import FLOAT8, ScaleScheme, dequantize, quantize

# Half a unit in the last place, relative: 3 and 2 bits of mantissa.
ROUNDING = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}


@given(
    tokens=st.integers(0, 4),
    heads=st.integers(1, 3),
    dim=st.integers(1, 5),
    dtype=st.sampled_from(FLOAT8),
    scheme=st.sampled_from(["per_tensor", "per_head"]),
    magnitude=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_scaled_values_come_back_within_rounding(
    tokens: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    scheme: ScaleScheme,
    magnitude: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = magnitude * torch.randn(tokens, heads, dim, generator=generator)
    stored, scale = quantize(states, dtype, scheme)
    assert stored.dtype == dtype
    assert scale is not None
    assert scale.shape == ((heads,) if scheme == "per_head" else ())
    back = dequantize(stored, scale)
    # Below the format's smallest normal number the step is absolute.
    step = torch.finfo(dtype).smallest_normal * scale.reshape(1, -1, 1)
    assert bool(((back - states).abs() <= ROUNDING[dtype] * (states.abs() + step)).all())


def test_a_head_of_its_own_size_keeps_its_precision_only_per_head() -> None:
    states = torch.stack([torch.full((3, 4), 1000.0), torch.full((3, 4), 1e-4)], dim=1)
    per_head = dequantize(*quantize(states, torch.float8_e4m3fn, "per_head"))
    per_tensor = dequantize(*quantize(states, torch.float8_e4m3fn, "per_tensor"))
    torch.testing.assert_close(per_head, states)
    assert not per_tensor[:, 1].any()


@pytest.mark.parametrize("dtype", FLOAT8)
def test_without_scale_large_values_saturate(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    stored, scale = quantize(torch.tensor([[[1e9, -1e9, 0.5]]]), dtype)
    assert scale is None
    assert dequantize(stored).flatten().tolist() == [largest, -largest, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_result_dtype(dtype: torch.dtype) -> None:
    stored, scale = quantize(torch.ones(1, 1, 2), torch.float8_e5m2, "per_tensor")
    assert dequantize(stored, scale, dtype=dtype).dtype == dtype


def test_all_zeros_stay_zeros() -> None:
    stored, scale = quantize(torch.zeros(2, 2, 2), torch.float8_e4m3fn, "per_head")
    assert scale is not None
    assert scale.tolist() == [1.0, 1.0]
    assert not dequantize(stored, scale).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refuses_to_quantize_what_is_not_finite(value: float) -> None:
    with pytest.raises(LayoutError, match="finite"):
        quantize(torch.full((1, 1, 1), value), torch.float8_e4m3fn, "per_tensor")


def test_refuses_other_dtypes() -> None:
    with pytest.raises(LayoutError, match="float8"):
        quantize(torch.ones(1, 1, 1), torch.float16)
    with pytest.raises(LayoutError, match="float8"):
        dequantize(torch.ones(1, 1, 1))


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(torch.ones(3), id="one per token"),
        pytest.param(torch.ones(2, 1), id="rank 2"),
        pytest.param(torch.ones(2, dtype=torch.int64), id="int"),
        pytest.param(torch.tensor([1.0, 0.0]), id="zero"),
        pytest.param(torch.tensor([1.0, -2.0]), id="negative"),
        pytest.param(torch.tensor([1.0, float("nan")]), id="nan"),
        pytest.param(torch.tensor([1.0, float("inf")]), id="inf"),
    ],
)
def test_refuses_bad_scales(scale: torch.Tensor) -> None:
    stored, _ = quantize(torch.ones(3, 2, 4), torch.float8_e4m3fn)
    with pytest.raises(LayoutError, match="scale"):
        dequantize(stored, scale)
