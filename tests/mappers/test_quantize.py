"""8-bit storage: against arithmetic written out in numpy, how close it comes, what it refuses."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mappers.errors import LayoutError
from mappers.quantize import (
    ScaleScheme,
    Storage,
    StorageDtype,
    Stored,
    check,
    dequantize,
    quantize,
)

Array = NDArray[np.float64]
FLOAT8: tuple[StorageDtype, ...] = ("float8_e4m3fn", "float8_e5m2")
SCALES: tuple[ScaleScheme, ...] = ("per_tensor", "per_head", "per_token_head")
STORAGES = [
    *(Storage(dtype, scales) for dtype, scales in product((*FLOAT8, "int8"), SCALES)),
    *(Storage("int8", scales, True) for scales in SCALES),
]
# Half a unit in the last place, relative: 3 and 2 bits of mantissa.
ROUNDING = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def groups(states: Array, scales: ScaleScheme) -> list[tuple[slice | int, ...]]:
    """Where the values are that share a scale."""
    tokens, heads, _ = states.shape
    if scales == "per_tensor":
        return [(slice(None),)]
    if scales == "per_head":
        return [(slice(None), head) for head in range(heads)]
    return [(token, head) for token in range(tokens) for head in range(heads)]


def steps_of(states: Array, storage: Storage) -> Array:
    """By value, what one step of the stored numbers is worth (float8: of the largest's scale)."""
    steps = np.empty_like(states)
    for place in groups(states, storage.scales):
        own = states[place]
        if storage.zero_points:
            reach = (max(own.max(), 0) - min(own.min(), 0)) / 2
        else:
            reach = np.abs(own).max()
        steps[place] = reach / LARGEST[storage.dtype]
    return steps


@given(
    tokens=st.integers(1, 4),
    heads=st.integers(1, 3),
    dim=st.integers(1, 5),
    storage=st.sampled_from(STORAGES),
    magnitude=st.sampled_from([1e-6, 1.0, 1e6]),
    shift=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=200, deadline=None)
def test_what_is_stored_is_as_close_as_its_steps_are_fine(
    tokens: int,
    heads: int,
    dim: int,
    storage: Storage,
    magnitude: float,
    shift: float,
    seed: int,
) -> None:
    generator = np.random.default_rng(seed)
    states = magnitude * (generator.standard_normal((tokens, heads, dim)) + shift)
    given_states = torch.from_numpy(states).float()
    stored = quantize(given_states, storage)
    check(stored, storage)
    step = steps_of(given_states.double().numpy(), storage)
    error = np.abs(dequantize(stored).double().numpy() - given_states.double().numpy())
    if storage.dtype == "int8":
        allowed = 0.5 * step
    else:
        normal = torch.finfo(stored.numbers.dtype).smallest_normal
        allowed = ROUNDING[storage.dtype] * (np.abs(states) + normal * step)
    assert (error <= allowed * (1 + 1e-4) + 1e-6 * np.abs(states)).all()


@given(
    storage=st.sampled_from([s for s in STORAGES if s.dtype == "int8"]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_stored_numbers_mean_what_the_formula_says(storage: Storage, seed: int) -> None:
    generator = np.random.default_rng(seed)
    shape = storage.scale_shape(4, 3)
    numbers = generator.integers(-128, 128, (4, 3, 5)).astype(np.int8)
    scale = generator.uniform(1e-3, 10, shape).astype(np.float32)
    zero = generator.uniform(-128, 127, shape).astype(np.float32) if storage.zero_points else None
    stored = Stored(
        torch.from_numpy(numbers),
        torch.from_numpy(scale),
        None if zero is None else torch.from_numpy(zero),
    )
    check(stored, storage)
    found = dequantize(stored).numpy()
    for token, head in product(range(4), range(3)):
        place = {"per_tensor": 0, "per_head": head, "per_token_head": (token, head)}
        at = place[storage.scales]
        about = numbers[token, head].astype(np.float32) - (0 if zero is None else zero[at])
        np.testing.assert_array_equal(found[token, head], about * scale[at])


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_what_was_stored_is_stored_again_to_the_same_values(storage: Storage) -> None:
    states = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(0))
    once = dequantize(quantize(states, storage))
    torch.testing.assert_close(dequantize(quantize(once, storage)), once, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_a_head_of_its_own_size_keeps_its_precision_only_per_head(dtype: StorageDtype) -> None:
    states = torch.stack([torch.full((3, 4), 1000.0), torch.full((3, 4), 1e-4)], dim=1)
    per_head = dequantize(quantize(states, Storage(dtype, "per_head")))
    per_tensor = dequantize(quantize(states, Storage(dtype, "per_tensor")))
    torch.testing.assert_close(per_head, states)
    assert not per_tensor[:, 1].any()


def test_a_token_of_its_own_size_keeps_its_precision_only_per_token() -> None:
    states = torch.stack([torch.full((2, 4), 1000.0), torch.full((2, 4), 1e-4)])
    apart = dequantize(quantize(states, Storage("int8", "per_token_head")))
    together = dequantize(quantize(states, Storage("int8", "per_head")))
    torch.testing.assert_close(apart, states)
    assert not together[1].any()


def test_zero_points_halve_the_steps_of_one_sided_values() -> None:
    states = torch.rand(16, 1, 32, generator=torch.Generator().manual_seed(1))
    even = dequantize(quantize(states, Storage("int8", "per_head"))) - states
    shifted = dequantize(quantize(states, Storage("int8", "per_head", True))) - states
    assert float(shifted.abs().max()) < 0.6 * float(even.abs().max())


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_the_lowest_int8_is_never_written(storage: Storage) -> None:
    states = torch.tensor([[[-3.0, -1.0, 0.0, 2.0]], [[-5.0, -5.0, -5.0, -5.0]]])
    stored = quantize(states, storage)
    if storage.dtype == "int8":
        assert int(stored.numbers.min()) == -127


@pytest.mark.parametrize("dtype", FLOAT8)
def test_without_scale_large_values_saturate(dtype: StorageDtype) -> None:
    stored = quantize(torch.tensor([[[1e9, -1e9, 0.5]]]), Storage(dtype))
    assert (stored.scale, stored.zero) == (None, None)
    largest = LARGEST[dtype]
    assert dequantize(stored).flatten().tolist() == [largest, -largest, 0.5]


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 2), (0, 2, 2)], ids=str)
def test_zeros_and_nothing_have_a_scale_of_1(storage: Storage, shape: tuple[int, int, int]) -> None:
    stored = quantize(torch.zeros(shape), storage)
    check(stored, storage)
    assert stored.scale is not None
    assert torch.equal(stored.scale, torch.ones(storage.scale_shape(*shape[:2])))
    assert not dequantize(stored).any()


@pytest.mark.parametrize("storage", [*STORAGES, Storage("float8_e5m2")], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refuses_to_quantize_what_is_not_finite(storage: Storage, value: float) -> None:
    with pytest.raises(LayoutError, match="finite"):
        quantize(torch.full((1, 1, 1), value), storage)


def test_refuses_to_quantize_to_more_than_8_bits() -> None:
    with pytest.raises(LayoutError, match="8-bit dtype, got float16"):
        quantize(torch.ones(1, 1, 1), Storage("float16"))


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (("bfloat16", "per_head"), "only an 8-bit cache"),
        (("int8",), "an int8 cache has some"),
        (("float8_e4m3fn", "per_head", True), "only an int8 cache"),
        (("float32", "none", True), "only an int8 cache"),
    ],
)
def test_refuses_storage_that_there_is_not(said: tuple[object, ...], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        Storage(*said)  # type: ignore[arg-type]


NUMBERS = torch.ones(3, 2, 4, dtype=torch.int8)
PER_HEAD, SHIFTED = Storage("int8", "per_head"), Storage("int8", "per_head", True)
ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("stored", "storage", "text"),
    [
        pytest.param(Stored(NUMBERS.float(), ONES), PER_HEAD, "expected int8", id="dtype"),
        pytest.param(Stored(NUMBERS[0], ONES), PER_HEAD, "expected int8", id="rank"),
        pytest.param(Stored(NUMBERS), PER_HEAD, "scale: missing", id="no scale"),
        pytest.param(
            Stored(NUMBERS.to(torch.float8_e5m2), ONES),
            Storage("float8_e5m2"),
            "scale: not expected",
            id="surplus scale",
        ),
        pytest.param(Stored(NUMBERS, ONES), SHIFTED, "zero point: missing", id="no zero"),
        pytest.param(Stored(NUMBERS, ONES, ONES), PER_HEAD, "zero point: not", id="surplus zero"),
        pytest.param(Stored(NUMBERS, torch.ones(3)), PER_HEAD, r"float32 \[2\]", id="per token"),
        pytest.param(Stored(NUMBERS, torch.ones(2, 1)), PER_HEAD, r"float32 \[2\]", id="rank 2"),
        pytest.param(Stored(NUMBERS, ONES.long()), PER_HEAD, r"got int64 \[2\]", id="int"),
        pytest.param(Stored(NUMBERS, torch.tensor([1.0, 0.0])), PER_HEAD, "above 0", id="0"),
        pytest.param(Stored(NUMBERS, torch.tensor([1.0, -2.0])), PER_HEAD, "above 0", id="-2"),
        pytest.param(Stored(NUMBERS, torch.tensor([1.0, torch.nan])), PER_HEAD, "finite", id="nan"),
        pytest.param(Stored(NUMBERS, torch.tensor([1.0, torch.inf])), PER_HEAD, "finite", id="inf"),
        pytest.param(
            Stored(NUMBERS, ONES, torch.tensor([0.0, 127.5])), SHIFTED, "-128 to 127", id="high"
        ),
        pytest.param(
            Stored(NUMBERS, ONES, torch.tensor([0.0, -129.0])), SHIFTED, "-128 to 127", id="low"
        ),
        pytest.param(
            Stored(NUMBERS, ONES, torch.tensor([0.0, torch.nan])), SHIFTED, "finite", id="zero nan"
        ),
    ],
)
def test_refuses_what_is_not_of_the_storage(stored: Stored, storage: Storage, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        check(stored, storage)
