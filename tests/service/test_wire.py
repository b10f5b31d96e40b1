"""Our header reader against the safetensors library: it accepts whatever we accept."""

import json
import re
import struct
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from safetensors.torch import save

from service import wire
from service.errors import Problem
from service.wire import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    header_length,
    parse_header,
    write_header,
)

NAMES = some.one_of(
    some.from_regex(r"layers\.[0-9]{1,2}\.(k|v|kv)", fullmatch=True),
    some.sampled_from(["kv", "__metadata__", "layers.0", "a", "\u043a"]),
    some.text(max_size=6),
)
SHAPES = some.lists(some.integers(-1, 5) | some.just(2**63), max_size=6)
OFFSETS = some.lists(some.integers(-1, 200), min_size=1, max_size=3)
DTYPES = some.sampled_from(["F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F64", "F4", "I8", "x"])
SPEC = some.fixed_dictionaries(
    {"dtype": DTYPES, "shape": SHAPES, "data_offsets": OFFSETS},
    optional={"extra": some.none()},
)


def good_tensors() -> some.SearchStrategy[dict[str, torch.Tensor]]:
    shape = some.lists(some.integers(1, 4), min_size=1, max_size=5)
    dtype = some.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
    tensor = some.builds(lambda s, d: torch.zeros(s).to(d), shape, dtype)
    return some.dictionaries(
        some.from_regex(r"layers\.(0|[1-9][0-9]?)\.(k|v)", fullmatch=True), tensor, max_size=6
    )


def split(body: bytes) -> tuple[bytes, bytes]:
    """JSON header and data."""
    size = int.from_bytes(body[:8], "little")
    return body[8 : 8 + size], body[8 + size :]


def library_accepts(header: bytes, data: bytes) -> bool:
    """What safetensors itself says."""
    try:
        safetensors.deserialize(struct.pack("<Q", len(header)) + header + data)
    except safetensors.SafetensorError:
        return False
    return True


def ours(header: bytes) -> int | None:
    """Bytes of data that we expect after this header, or None when we refuse it."""
    try:
        return parse_header(header).data_bytes
    except Problem:
        return None


@settings(max_examples=60, deadline=None)
@given(good_tensors(), some.dictionaries(some.text(max_size=8), some.text(max_size=8), max_size=3))
def test_reads_what_the_library_writes(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    header, data = split(save(tensors, metadata or None))
    parsed = parse_header(header)
    assert parsed.metadata == metadata
    assert parsed.data_bytes == len(data)
    assert {name: spec.shape for name, spec in parsed.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }


@settings(max_examples=60, deadline=None)
@given(good_tensors(), some.dictionaries(some.text(max_size=8), some.text(max_size=8), max_size=3))
def test_the_library_reads_what_we_write(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    specs = [
        (name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()
    ]
    head, header = write_header(specs, metadata)
    assert len(head) % 8 == 0
    assert library_accepts(split(head)[0], bytes(header.data_bytes))
    assert parse_header(split(head)[0]) == header


@settings(max_examples=150, deadline=None)
@given(some.dictionaries(NAMES, SPEC | some.none() | some.dictionaries(NAMES, some.text())))
def test_accepts_a_part_of_what_the_library_accepts(document: dict[str, Any]) -> None:
    header = json.dumps(document).encode()
    size = ours(header)
    assert size is None or library_accepts(header, bytes(size))


@settings(max_examples=250, deadline=None)
@given(good_tensors(), some.data())
def test_spoiled_headers(tensors: dict[str, torch.Tensor], data: some.DataObject) -> None:
    header = bytearray(split(save(tensors, {"kvt": "{}"}))[0])
    for _ in range(data.draw(some.integers(1, 3))):
        at = data.draw(some.integers(0, len(header) - 1))
        match data.draw(some.sampled_from(["flip", "cut", "insert", "swap"])):
            case "flip":
                header[at] = data.draw(some.integers(0, 255))
            case "cut":
                del header[at : at + data.draw(some.integers(1, 8))]
                header = header or bytearray(b"{")
            case "insert":
                header[at:at] = data.draw(some.sampled_from([b",", b'"', b"1", b"}", b" ", b"{"]))
            case "swap":
                other = data.draw(some.integers(0, len(header) - 1))
                header[at], header[other] = header[other], header[at]
    size = ours(bytes(header))
    assert size is None or library_accepts(bytes(header), bytes(size))


@settings(max_examples=200, deadline=None)
@given(some.binary(max_size=200) | some.text(max_size=100).map(str.encode))
def test_any_bytes(header: bytes) -> None:
    size = ours(header)
    assert size is None or library_accepts(header, bytes(size))


@pytest.mark.parametrize("length", [0, 1, MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_lengths_that_are_refused_unread(length: int) -> None:
    with pytest.raises(Problem):
        header_length(struct.pack("<Q", length))


SPACES = re.compile(r"[ \t\n\r]*")
TENSOR = '"layers.%d.k":{"dtype":"F8_E5M2","shape":[1],"data_offsets":[%d,%d]}'
HOSTILE = {
    "spaces": "{" + " " * (MAX_HEADER_BYTES - 1),
    "too many tensors": "{" + ",".join(TENSOR % (i, i, i + 1) for i in range(9999)) + "}",
    "one long name": '{"' + "k" * (MAX_HEADER_BYTES - 3),
    "escapes": '{"' + "\\u006b" * 170_000 + '":1}',
    "dimensions": '{"kv":{"dtype":"F32","shape":[' + "1," * 500_000 + "1]}}",
    "spaces in a shape": '{"kv":{"dtype":"F32","shape":[' + "1 ," * 255 + " " * 900_000 + "x",
    "open braces": '{"__metadata__":' + "{" * 1_000_000,
    "metadata names": '{"__metadata__":{' + ",".join(f'"{i}":""' for i in range(90_000)) + "}}",
}


class Counted:
    """A pattern or scanner of the reader that adds up how many characters it has looked at."""

    def __init__(self, real: Any, looks: list[int]) -> None:
        self._real, self._looks = real, looks

    def match(self, text: str, at: int) -> Any:
        found = self._real.match(text, at)
        # What does not match ends at the first other character after the spaces, at the latest at
        # the end; only one failure of the long pattern is possible, which refuses the header.
        spaces = SPACES.match(text, at)
        failed = spaces.end() + 1 if self._real.groups == 0 and spaces else len(text)
        self._looks.append((found.end() if found else failed) - at)
        return found

    def __call__(self, text: str, at: int, strict: bool) -> Any:
        self._looks.append(len(text) - at)  # unless it finds an end
        value, end = self._real(text, at, strict)
        self._looks[-1] = end - at
        return value, end


@pytest.mark.parametrize("case", [*HOSTILE, "a good one"])
def test_hostile_headers_cost_little(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No character is looked at much more than once, and what is many is not read to its end."""
    looks: list[int] = []
    monkeypatch.setattr(wire, "_MEMBER", Counted(wire._MEMBER, looks))
    tokens = {mark: Counted(pattern, looks) for mark, pattern in wire._TOKENS.items()}
    monkeypatch.setattr(wire, "_TOKENS", tokens)
    monkeypatch.setattr(wire, "scanstring", Counted(wire.scanstring, looks))
    good = split(save({f"layers.{i}.k": torch.zeros(1) for i in range(MAX_TENSORS)}))[0]
    header = HOSTILE[case].encode()[:MAX_HEADER_BYTES] if case in HOSTILE else good
    assert (ours(header) is None) == (case in HOSTILE)
    assert sum(looks) <= 1.2 * len(header) + 10
    # A tensor is 3 members, and about 8 other tokens.
    assert len(looks) <= 12 * (MAX_TENSORS + 1)


def test_the_tensor_limit_is_exact() -> None:
    at_limit = "{" + ",".join(TENSOR % (i, i, i + 1) for i in range(MAX_TENSORS)) + "}"
    assert ours(at_limit.encode()) == MAX_TENSORS
    over = "{" + ",".join(TENSOR % (i, i, i + 1) for i in range(MAX_TENSORS + 1)) + "}"
    assert ours(over.encode()) is None
