"""Tensor files against the safetensors library, and every way in which one can be wrong."""

import json
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from mappers import strict_json
from mappers.errors import ArtifactError
from mappers.tensor_file import HEADER_BYTES_AT_MOST, pack, unpack

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
]
TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.builds(
        lambda shape, dtype, seed: (
            torch.randint(
                0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=seeded(seed)
            )
            .view(dtype)
            .squeeze(-1)
        ),
        st.lists(st.integers(1, 3), max_size=3),
        st.sampled_from(DTYPES),
        st.integers(0, 1000),
    ),
    max_size=5,
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def packed(tensors: dict[str, Tensor]) -> bytes:
    return b"".join(pack(tensors))


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name]
        .reshape(-1)
        .view(torch.uint8)
        .equal(right[name].reshape(-1).view(torch.uint8))
        for name in left
    )


@given(TENSORS)
@settings(max_examples=100, deadline=None)
def test_the_library_reads_what_we_write(tensors: dict[str, Tensor]) -> None:
    assert same(load(packed(tensors)), tensors)


@given(TENSORS)
@settings(max_examples=100, deadline=None)
def test_we_read_what_the_library_writes(tensors: dict[str, Tensor]) -> None:
    written = save(tensors, metadata={"format": "pt"})
    assert same(unpack(bytearray(written)), tensors)


@given(TENSORS)
@settings(max_examples=50, deadline=None)
def test_equal_tensors_give_equal_bytes(tensors: dict[str, Tensor]) -> None:
    turned = dict(reversed(tensors.items()))
    assert packed(unpack(bytearray(packed(turned)))) == packed(tensors)


def test_golden_bytes() -> None:
    tensors = {"b": torch.tensor([1.0], dtype=torch.bfloat16), "a": torch.tensor([[2.0]])}
    header = (
        b'{"a":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},'
        b'"b":{"dtype":"BF16","shape":[1],"data_offsets":[4,6]}}'
    )
    padded = header + b" " * (-len(header) % 8)
    assert packed(tensors) == struct.pack("<Q", len(padded)) + padded + b"\0\0\0@\x80?"


def test_views_of_any_strides_are_written() -> None:
    whole = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {"t": whole.permute(2, 0, 1), "s": whole[:, 1:2, ::2], "one": whole[:1, :1, 3:]}
    assert same(load(packed(tensors)), {name: view.clone() for name, view in tensors.items()})


def test_reading_shares_the_bytes() -> None:
    data = bytearray(packed({"a": torch.zeros(4)}))
    tensor = unpack(data)["a"]
    data[-4:] = struct.pack("<f", 7.0)
    assert tensor.tolist() == [0.0, 0.0, 0.0, 7.0]


T = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def body(header: Any, data: bytes = b"", n: int | None = None) -> bytearray:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return bytearray(struct.pack("<Q", len(raw) if n is None else n) + raw + data)


def test_the_recipe_for_bodies_makes_good_ones_too() -> None:
    assert unpack(body({"a": T, "__metadata__": {"x": "y"}}, bytes(16)))["a"].shape == (2, 2)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(bytearray(), id="empty"),
        pytest.param(bytearray(7), id="7 bytes"),
        pytest.param(bytearray(8), id="no header"),
        pytest.param(body({"a": T}, bytes(16), n=1000), id="header longer than the file"),
        pytest.param(body({"a": T}, bytes(16), n=2**64 - 1), id="header of 2^64 - 1 bytes"),
        pytest.param(body({"a": T}, bytes(15)), id="data too short"),
        pytest.param(body({"a": T}, bytes(17)), id="data too long"),
        pytest.param(body({"a": T}, bytes(16)) + body({"a": T}, bytes(16)), id="a second file"),
        pytest.param(body([1]), id="a list"),
        pytest.param(body(b"\xff{}"), id="not UTF-8"),
        pytest.param(body(b"{"), id="not JSON"),
        pytest.param(body(b"[" * 100_000), id="nested deep"),
        pytest.param(body(b'{"a":' + b"9" * 5000 + b"}"), id="a number of 5000 digits"),
        pytest.param(body(b'{"a":NaN}'), id="NaN"),
        pytest.param(
            body(
                b'{"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]},'
                b'"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}',
                bytes(16),
            ),
            id="a name twice",
        ),
        pytest.param(body({"a": {**T, "x": 1}}, bytes(16)), id="a surplus field"),
        pytest.param(body({"a": {"dtype": "F32", "shape": [4]}}, bytes(16)), id="no offsets"),
        pytest.param(body({"a": {**T, "dtype": "F64"}}, bytes(32)), id="another dtype"),
        pytest.param(body({"a": {**T, "dtype": "F8_E8M0"}}, bytes(4)), id="a rare dtype"),
        pytest.param(body({"a": {**T, "dtype": ["F32"]}}, bytes(16)), id="a list for a dtype"),
        pytest.param(body({"a": {**T, "shape": [2.0, 2]}}, bytes(16)), id="a float in the shape"),
        pytest.param(body({"a": {**T, "shape": [True, 4]}}, bytes(16)), id="a bool in the shape"),
        pytest.param(body({"a": {**T, "shape": [-2, -2]}}, bytes(16)), id="a negative shape"),
        pytest.param(
            body({"a": {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}}), id="size zero"
        ),
        pytest.param(body({"a": {**T, "shape": [2, 2**64 - 2]}}, bytes(16)), id="shape over 2^63"),
        pytest.param(body({"a": {**T, "shape": "22"}}, bytes(16)), id="text for a shape"),
        pytest.param(body({"a": {**T, "data_offsets": [0]}}, bytes(16)), id="one offset"),
        pytest.param(body({"a": {**T, "data_offsets": [16, 0]}}, bytes(16)), id="end before begin"),
        pytest.param(body({"a": {**T, "data_offsets": [4, 20]}}, bytes(20)), id="a hole"),
        pytest.param(body({"a": T, "b": T}, bytes(16)), id="overlap"),
        pytest.param(
            body({"a": T, "b": {**T, "data_offsets": [8, 24]}}, bytes(24)), id="part overlap"
        ),
        pytest.param(body({"a": {**T, "shape": [2, 3]}}, bytes(16)), id="shape and span differ"),
    ],
)
def test_every_wrong_file_is_refused(data: bytearray) -> None:
    with pytest.raises(ArtifactError):
        unpack(data)


def test_a_header_over_the_cap_is_refused() -> None:
    header = json.dumps({"a": T}).encode()
    assert unpack(body(header.ljust(HEADER_BYTES_AT_MOST), bytes(16))).keys() == {"a"}
    with pytest.raises(ArtifactError, match="the header is too long"):
        unpack(body(header.ljust(HEADER_BYTES_AT_MOST + 1), bytes(16)))


@given(st.binary(max_size=200), st.integers(0, 250))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused(noise: bytes, cut: int) -> None:
    good = body({"a": T}, bytes(16))
    for data in (bytearray(noise), good[:cut] + noise, body(noise)):
        try:
            found = unpack(data)
        except ArtifactError:
            continue
        assert all(isinstance(tensor, Tensor) for tensor in found.values())


def test_strict_json_writes_one_form() -> None:
    value = {"b": [1, 2.5, None], "a": "\u00e9"}
    assert strict_json.dumps(value) == (
        b'{\n  "a": "\\u00e9",\n  "b": [\n    1,\n    2.5,\n    null\n  ]\n}\n'
    )
    assert strict_json.loads(strict_json.dumps(value)) == value
    assert strict_json.dumps_compact(value) == b'{"b":[1,2.5,null],"a":"\\u00e9"}'


@pytest.mark.parametrize("write", [strict_json.dumps, strict_json.dumps_compact])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_strict_json_never_writes_what_is_not_json(write: Any, value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write({"a": value})


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{} {}",
        b'{"a":1,"a":2}',
        b'{"x":{"a":1,"a":2}}',
        b"NaN",
        b"-Infinity",
        b"\xef\xbb\xbf{}",
        b'{"a":"\xff"}',
        b"[" * 200_000,
        "{}".encode("utf-16"),
    ],
)
def test_strict_json_refuses(raw: bytes) -> None:
    with pytest.raises(strict_json.BadJSON) as error:
        strict_json.loads(raw)
    assert len(str(error.value)) < 40
