"""What lies behind an exported cache in its lease: of which model and of which tokens it is.

A handle travels through a router; what it says of the cache is checked against this. Rank by rank
the engine marks here that its heads are in place, so a reader can wait for the last of them.

    32 bytes              SHA-256 of the source's claim, tokens, ranks and hops
    4 bytes a token       token ids, little-endian
    1 byte a rank         1: its heads are written
"""

import hashlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mappers.identity import IdentityClaim

_DIGEST_BYTES = 32
_ALIGNED = 64


class Sealed(NamedTuple):
    """What a handle says of its cache."""

    claim: IdentityClaim
    tokens: int
    ranks: int
    hops: int


def seal_offset(data_bytes: int) -> int:
    """Where it begins, after so many bytes of tensors."""
    return -(-data_bytes // _ALIGNED) * _ALIGNED


def seal_bytes(tokens: int, ranks: int) -> int:
    """Its size."""
    return _DIGEST_BYTES + 4 * tokens + ranks


def write_seal(memory: Tensor, offset: int, sealed: Sealed, ids: list[int]) -> None:
    """Write all but the marks into uint8 ``memory``."""
    words = np.asarray(ids, dtype="<u4").tobytes()
    raw = np.frombuffer(_digest(sealed) + words, np.uint8).copy()
    memory[offset : offset + len(raw)] = torch.from_numpy(raw)


def mark(memory: Tensor, offset: int, tokens: int, rank: int) -> None:
    """Say that this rank's heads are in place."""
    memory[_marks(offset, tokens) + rank] = 1


def complete(memory: Tensor, offset: int, tokens: int, ranks: int) -> bool:
    """Whether all ranks have said so."""
    at = _marks(offset, tokens)
    return bool((memory[at : at + ranks] == 1).all())


def is_of(memory: Tensor, offset: int, said: Sealed) -> bool:
    """Whether the cache is what is said of it."""
    return memory[offset : offset + _DIGEST_BYTES].numpy().tobytes() == _digest(said)


def common_tokens(memory: Tensor, offset: int, tokens: int, prompt: list[int]) -> int:
    """How many first tokens of ``prompt`` are those of the cache.

    A chat template may write earlier turns anew, so a prompt need not continue the cache's text.
    """
    start = offset + _DIGEST_BYTES
    sealed = memory[start : start + 4 * tokens].numpy().view("<u4")
    count = min(tokens, len(prompt))
    differ = np.flatnonzero(sealed[:count] != np.asarray(prompt[:count], dtype=np.int64))
    return int(differ[0]) if len(differ) else count


def _marks(offset: int, tokens: int) -> int:
    return offset + _DIGEST_BYTES + 4 * tokens


def _digest(sealed: Sealed) -> bytes:
    claim, *counts = sealed
    said = "|".join((claim.model_dump_json(), *map(str, counts)))
    return hashlib.sha256(said.encode()).digest()
