"""The safetensors header on the wire: our own bounded reader, and a writer.

The format is https://github.com/huggingface/safetensors#format. This reader accepts a subset of
what the library accepts: no duplicate key, no zero-sized dimension, no empty rank, only the names
and dtypes that a KV cache has. Its work is linear in the header and stops at the first tensor too
many, so that a hostile header cannot hold the event loop. Nothing of it is ever quoted back.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import NamedTuple

from service.errors import Problem

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 1 << 20
MAX_METADATA_CHARS = 16 * 1024
MAX_TENSORS = 2048
MAX_RANK = 5

WIRE_DTYPES = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I8": ("int8", 1),
}
WIRE_NAMES = {name: wire for wire, (name, _) in WIRE_DTYPES.items()}
ITEM_BYTES = {name: size for name, size in WIRE_DTYPES.values()}

_SPACE = r"[ \t\n\r]*"
_NUMBER = r"(?:0|[1-9][0-9]{0,19})"
_MEMBER = re.compile(
    rf'{_SPACE}"(?:dtype"{_SPACE}:{_SPACE}"(?P<dtype>[A-Z0-9_]{{1,16}})"'
    rf'|shape"{_SPACE}:{_SPACE}\[(?P<shape>{_SPACE}(?:{_NUMBER}{_SPACE}'
    rf"(?:,{_SPACE}{_NUMBER}{_SPACE}){{0,255}})?)\]"
    rf'|data_offsets"{_SPACE}:{_SPACE}\[(?P<offsets>{_SPACE}{_NUMBER}{_SPACE},'
    rf"{_SPACE}{_NUMBER}{_SPACE})\]){_SPACE}"
)
_TENSOR_NAME = re.compile(
    r"(?:probe\.)?kv|(?:layers|probe)\.(?:0|[1-9][0-9]{0,3})\.(?:kv|[kv](?:_scale|_zero)?)"
)
_TOKENS = {mark: re.compile(_SPACE + re.escape(mark) + _SPACE) for mark in '{}:,"'}


class TensorSpec(NamedTuple):
    """One tensor of the body: dtype by our name, shape, and byte range after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """Names to tensors, which cover ``data_bytes`` without hole or overlap, and the metadata."""

    tensors: dict[str, TensorSpec]
    metadata: dict[str, str]
    data_bytes: int


def header_length(prefix: bytes, *, limit: int = MAX_HEADER_BYTES) -> int:
    """Bytes of the JSON header, from the first 8 bytes of the body."""
    length = int.from_bytes(prefix, "little")
    if length < 2:
        raise Problem("bad_safetensors", "a header has at least 2 bytes")
    if length > limit:
        raise Problem("header_too_large", f"at most {limit} bytes of header are read")
    return length


def parse_header(raw: bytes) -> Header:
    """Read a header of at most ``MAX_HEADER_BYTES``. Raises ``Problem`` (400 or 422)."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Problem("bad_safetensors", "the header is not UTF-8") from error
    return _Reader(text).header()


def write_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, Header]:
    """Length, JSON and padding for tensors (name, dtype by our name, shape) laid end to end.

    The bytes are padded with spaces to a multiple of 8, so that the data after them are aligned.
    """
    specs, nbytes = laid_out(tensors)
    document: dict[str, object] = {"__metadata__": dict(metadata)}
    document |= {name: described(spec) for name, spec in specs.items()}
    raw = json.dumps(document, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % LENGTH_BYTES)
    prefix = len(raw).to_bytes(LENGTH_BYTES, "little")
    return prefix + raw, Header(specs, dict(metadata), nbytes)


def laid_out(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
) -> tuple[dict[str, TensorSpec], int]:
    """Where tensors (name, dtype by our name, shape) lie, end to end from 0, and where they end."""
    specs: dict[str, TensorSpec] = {}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        specs[name] = TensorSpec(dtype, shape, offset, end)
        offset = end
    return specs, offset


def described(spec: TensorSpec) -> dict[str, object]:
    """A tensor as a safetensors header has it."""
    return {
        "dtype": WIRE_NAMES[spec.dtype],
        "shape": list(spec.shape),
        "data_offsets": [spec.begin, spec.end],
    }


class _Reader:
    """One pass over the text; ``at`` is the next character."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def header(self) -> Header:
        if not self.text.startswith("{"):
            raise _malformed()
        tensors: dict[str, TensorSpec] = {}
        metadata: dict[str, str] | None = None
        self.expect("{")
        more = not self.follows("}")
        while more:
            name = self.string()
            self.expect(":")
            if name == "__metadata__" and metadata is None:
                metadata = self.metadata()
            else:
                self.check_name(name, tensors)
                tensors[name] = self.tensor()
            more = self.follows(",")
            if not more:
                self.expect("}")
        if self.at != len(self.text):
            raise _malformed()
        return Header(tensors, metadata or {}, _covered(tensors.values()))

    def check_name(self, name: str, known: Mapping[str, TensorSpec]) -> None:
        if name == "__metadata__" or name in known:
            raise Problem("bad_safetensors", "a name appears twice in the header")
        if len(known) >= MAX_TENSORS:
            raise Problem("layer_set", f"at most {MAX_TENSORS} tensors are read")
        if not _TENSOR_NAME.fullmatch(name):
            raise Problem("bad_tensor_name", "tensors are named layers.{i}.k, layers.{i}.v or so")

    def metadata(self) -> dict[str, str]:
        found: dict[str, str] = {}
        chars = 0
        if not self.follows("{"):
            raise Problem("bad_metadata", "__metadata__ must map names to strings")
        more = not self.follows("}")
        while more:
            name = self.string()
            self.expect(":")
            value = self.string("bad_metadata")
            chars += len(name) + len(value)
            if name in found or chars > MAX_METADATA_CHARS:
                limit = f"at most {MAX_METADATA_CHARS} characters"
                raise Problem("bad_metadata", f"__metadata__ holds distinct names and {limit}")
            found[name] = value
            more = self.follows(",")
            if not more:
                self.expect("}")
        return found

    def tensor(self) -> TensorSpec:
        found: dict[str, str] = {}
        self.expect("{")
        for index in range(3):
            match = _MEMBER.match(self.text, self.at)
            if match is None or (kind := str(match.lastgroup)) in found:
                raise _malformed()
            found[kind] = match[kind]
            self.at = match.end()
            self.expect("," if index < 2 else "}")
        return _spec(found["dtype"], _numbers(found["shape"]), _numbers(found["offsets"]))

    def string(self, code: str = "bad_safetensors") -> str:
        if not self.text.startswith('"', self.at):
            raise Problem(code, "a string is missing in the header")
        value: str
        try:
            value, end = scanstring(self.text, self.at + 1, True)
        except ValueError as error:
            raise _malformed() from error
        self.at = end
        return value

    def expect(self, mark: str) -> None:
        if not self.follows(mark):
            raise _malformed()

    def follows(self, mark: str) -> bool:
        match = _TOKENS[mark].match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match is not None


def _malformed() -> Problem:
    return Problem("bad_safetensors", "the header does not have the form of the format")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",")) if text.strip() else ()


def _spec(wire: str, shape: tuple[int, ...], offsets: tuple[int, ...]) -> TensorSpec:
    if wire not in WIRE_DTYPES:
        raise Problem("dtype_unsupported", f"dtypes that are read: {', '.join(WIRE_DTYPES)}")
    if not 1 <= len(shape) <= MAX_RANK or 0 in shape:
        raise Problem("bad_shape", f"a tensor has 1 to {MAX_RANK} dimensions of 1 or more")
    dtype, size = WIRE_DTYPES[wire]
    begin, end = offsets
    if math.prod(shape) * size >= 1 << 62:
        raise Problem("bad_shape", "a tensor is larger than any memory")
    if end - begin != math.prod(shape) * size:
        raise Problem("bad_safetensors", "a tensor's byte range does not fit its shape")
    return TensorSpec(dtype, shape, begin, end)


def _covered(tensors: Iterable[TensorSpec]) -> int:
    """Bytes of data; the ranges must follow one another from 0 without hole or overlap."""
    offset = 0
    for spec in sorted(tensors, key=lambda spec: spec.begin):
        if spec.begin != offset:
            raise Problem("bad_safetensors", "the tensors do not cover the data exactly once")
        offset = spec.end
    return offset
