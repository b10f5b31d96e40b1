"""What is done to products number by number: keys back onto their norm and rotated; all stored."""

from typing import NamedTuple

import torch
from torch import Tensor

from mappers.key_norm import restore
from mappers.rope import RotaryTable


class KeyFinish(NamedTuple):
    """What is done to mapped keys: back onto their norm, if they have one, and rotated."""

    table: RotaryTable
    norm: Tensor | None


def written(mapped: Tensor, out: Tensor, finish: KeyFinish | None, rows: slice) -> Tensor:
    """Put mapped ``rows``, float32 ``[n, H, D]``, into the answer's ``out``, keys with ``finish``;
    return the sum of what was written, float32 and not finite unless all of it is."""
    if finish is not None:
        if finish.norm is not None:
            restore(mapped, finish.norm)
        finish.table.slice(rows.start, rows.stop).apply(mapped, out=out)
    elif mapped.data_ptr() != out.data_ptr():
        out.copy_(mapped)
    return out.sum(dtype=torch.float32)
