"""Read and write safetensors files that live in memory as a whole.

The format is https://github.com/huggingface/safetensors#format. The library would copy every tensor
out of the bytes, accepts duplicate names, and reads headers of 100 MB; so the header is read here,
to the letter, and the tensors are views of the bytes that were hashed.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mappers import strict_json
from mappers.errors import ArtifactError
from mappers.pages import Bytes

HEADER_BYTES_AT_MOST = 8 << 20

_LENGTH_BYTES = 8
_DTYPES = {
    "I64": torch.int64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def unpack(data: Bytes) -> dict[str, Tensor]:
    """Tensors by name, as views of ``data``, which must not be changed afterwards.

    Raises ``ArtifactError`` unless the header has the exact form of the format, is at most
    ``HEADER_BYTES_AT_MOST`` long, and its tensors cover the rest without hole or overlap.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES or length > min(len(data) - _LENGTH_BYTES, HEADER_BYTES_AT_MOST):
        raise ArtifactError("a tensor file is too short for its header, or the header is too long")
    start = _LENGTH_BYTES + length
    entries = sorted(_entries(data[_LENGTH_BYTES:start]), key=lambda entry: entry.begin)
    _check_cover(entries, len(data) - start)
    return {entry.name: _view(data, start, entry) for entry in entries}


def pack(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """The parts of a safetensors file in order: the header, then each tensor without a copy.

    Equal tensors give equal bytes. Wide dtypes come first, so that each tensor is aligned.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    parts, header, position = [], {}, 0
    for name, tensor in ordered:
        part = _raw(tensor)
        span = [position, position + part.nbytes]
        shape = list(tensor.shape)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": span}
        parts.append(part)
        position += part.nbytes
    raw = strict_json.dumps_compact(header)
    raw += b" " * (-len(raw) % _LENGTH_BYTES)
    return [memoryview(len(raw).to_bytes(_LENGTH_BYTES, "little") + raw), *parts]


def _raw(tensor: Tensor) -> memoryview:
    dense = tensor.detach().cpu().contiguous()
    # Dimensions of size 1 may keep any stride, with which a tensor cannot be viewed as bytes.
    flat = dense.as_strided((dense.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


class _Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def _check_cover(entries: list[_Entry], data_bytes: int) -> None:
    position = 0
    for entry in entries:
        size = math.prod(entry.shape) * entry.dtype.itemsize
        if entry.begin != position or entry.end != position + size:
            raise ArtifactError("the tensors of a file do not cover it exactly once")
        position = entry.end
    if position != data_bytes:
        raise ArtifactError(f"the tensors of a file need {position} bytes, it has {data_bytes}")


def _view(data: Bytes, start: int, entry: _Entry) -> Tensor:
    count = math.prod(entry.shape)
    flat = torch.frombuffer(data, dtype=entry.dtype, count=count, offset=start + entry.begin)
    return flat.reshape(entry.shape)


def _entries(raw: bytes | bytearray) -> list[_Entry]:
    try:
        header = strict_json.loads(raw)
    except strict_json.BadJSON as error:
        raise ArtifactError(f"a tensor file's header: {error}") from error
    if not isinstance(header, dict):
        raise ArtifactError("a tensor file's header is not an object")
    header.pop("__metadata__", None)
    return list(_checked(header))


def _checked(header: dict[str, Any]) -> Iterator[_Entry]:
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ArtifactError("a tensor's description has other fields than the format's")
        dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ArtifactError(f"a tensor has a dtype other than {', '.join(_DTYPES)}")
        if not (_sizes(shape, least=1) and _sizes(span, least=0) and len(span) == 2):
            raise ArtifactError("a tensor's shape or offsets are not sizes")
        yield _Entry(name, _DTYPES[dtype], tuple(shape), span[0], span[1])


def _sizes(value: object, *, least: int) -> bool:
    return isinstance(value, list) and all(
        type(number) is int and least <= number < 1 << 62 for number in value
    )
