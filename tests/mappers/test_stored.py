"""Caches of 8-bit numbers with scales: all that is read of them is what was stored."""

import pytest
import torch

from mappers.cache import KVCache, consecutive
from mappers.errors import LayoutError
from mappers.quantize import Storage, Stored, dequantize, quantize
from mappers.stored import StoredCache, rounded, store

SCHEMES = [
    Storage("float8_e4m3fn", "per_tensor"),
    Storage("float8_e5m2", "per_head"),
    Storage("int8", "per_token_head"),
    Storage("int8", "per_token_head", True),
    Storage("int8", "per_head", True),
]


def noise(tokens: int = 9) -> KVCache:
    generator = torch.Generator().manual_seed(4)
    sides = torch.randn(2, 3, tokens, 2, 8, generator=generator)
    return KVCache(tuple(sides[0]), tuple(sides[1]), consecutive(tokens, 5))


@pytest.mark.parametrize("storage", SCHEMES, ids=str)
def test_layers_rows_and_slices_are_those_of_the_whole(storage: Storage) -> None:
    cache = noise()
    stored, whole = store(cache, storage), rounded(cache, storage)
    for index, (keys, values) in enumerate(stored.layers()):
        assert torch.equal(keys, dequantize(quantize(cache.keys[index], storage)))
        assert torch.equal(keys, whole.keys[index])
        assert torch.equal(values, whole.values[index])
    rows = torch.tensor([0, 3, 8])
    for read, expected in (
        (stored.take(rows), whole.take(rows)),
        (stored.slice(2, 7).take(slice(None)), whole.slice(2, 7)),
        (stored.slice(2, 7).take(torch.tensor([1])), whole.slice(3, 4)),
    ):
        assert torch.equal(read.positions, expected.positions)
        for ours, theirs in zip(
            (*read.keys, *read.values), (*expected.keys, *expected.values), strict=True
        ):
            assert torch.equal(ours, theirs)


def test_bytes_are_those_of_numbers_scales_and_zero_points() -> None:
    stored = store(noise(), Storage("int8", "per_token_head", True))
    assert stored.nbytes == 2 * 3 * (9 * 2 * 8 + 2 * 9 * 2 * 4)
    assert stored.tokens == 9


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_more_bits_round_to_the_dtype_and_keep_their_own(dtype: str) -> None:
    cache = noise()
    found = rounded(cache, Storage(dtype))  # type: ignore[arg-type]
    expected = cache.keys[1].to(getattr(torch, dtype))
    assert found.dtype == torch.float32
    assert torch.equal(found.keys[1], expected.float())
    assert not torch.equal(found.keys[1], cache.keys[1])


def test_float8_without_scales_is_rounded_too() -> None:
    cache = noise()
    found = rounded(cache, Storage("float8_e4m3fn"))
    assert torch.equal(found.values[2], cache.values[2].to(torch.float8_e4m3fn).float())


STORAGE = Storage("int8", "per_head")
GOOD = Stored(torch.ones(9, 2, 8, dtype=torch.int8), torch.ones(2))


@pytest.mark.parametrize(
    ("storage", "keys", "values", "text"),
    [
        (Storage("float8_e5m2"), (GOOD,), (GOOD,), "without scales"),
        (STORAGE, (), (), "at least one"),
        (STORAGE, (GOOD,), (GOOD, GOOD), "as many"),
        (STORAGE, (GOOD, GOOD.rows(slice(1, 9))), (GOOD, GOOD), r"layer 1, k: .* \[8, 2, 8\]"),
        (STORAGE, (GOOD,), (GOOD._replace(scale=-GOOD.numbers[0, :, 0].float()),), "layer 0, v"),
    ],
)
def test_refuses_layers_that_do_not_fit(
    storage: Storage, keys: tuple[Stored, ...], values: tuple[Stored, ...], text: str
) -> None:
    with pytest.raises(LayoutError, match=text):
        StoredCache(storage, keys, values, consecutive(9))
