"""What is done number by number: to products, which become keys and values, and to source keys.

Eager code does it on a CPU, block by block in a core's cache. On a GPU ``mappers.finish_kernel``
does it in one pass over memory, where Triton is there and can compile it: both do the same.
"""

import functools
import logging
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from mappers.key_norm import restore
from mappers.rope import RotaryTable


class Finish(NamedTuple):
    """What is done to products, in this order, as far as it is given.

    Add ``bias``, float32 ``[H * D]``; scale keys back onto their ``norm``, float32 ``[D]``; rotate
    them by ``table``.
    """

    bias: Tensor | None = None
    norm: Tensor | None = None
    table: RotaryTable | None = None

    def of(self, rows: slice, bias: Tensor | None) -> "Finish":
        """The same for these tokens of the table's, and with this bias."""
        table = self.table.slice(rows.start, rows.stop) if self.table else None
        return Finish(bias, self.norm, table)


def put(product: Tensor, out: Tensor, finish: Finish, proof: Tensor) -> None:
    """Put products, float32 ``[n, H, D]``, into the answer's ``out``; they may be overwritten.

    ``proof``, a float32 scalar, stays finite only if every number that was written is.
    """
    kernel = kernel_for(out.device)
    if kernel is not None:
        kernel.put(product, out, **finish._asdict(), proof=proof)
        return
    if finish.bias is not None:
        product.add_(finish.bias.view(product.shape[1:]))
    if finish.norm is not None:
        restore(product, finish.norm)
    if finish.table is not None:
        finish.table.apply(product, out=out)
    elif product.data_ptr() != out.data_ptr():
        out.copy_(product)
    proof += out.sum(dtype=torch.float32)


def strip(table: RotaryTable, keys: Tensor, out: Tensor) -> None:
    """``table.strip`` of keys ``[n, H, D]`` as cached, into memory of its own on their device."""
    kernel = kernel_for(out.device)
    if kernel is not None and keys.dtype in kernel.DTYPES:
        kernel.put(keys, out, table=table, back=True)
    else:
        table.strip(keys, out=out)


def kernel_for(device: torch.device) -> ModuleType | None:
    """``mappers.finish_kernel``, where it serves this device."""
    return _compiled(device) if device.type == "cuda" else None


@functools.cache
def _compiled(device: torch.device) -> ModuleType | None:
    """The kernel, tried once: Triton also needs a C compiler."""
    try:
        from mappers import finish_kernel
    except ImportError:
        return None
    try:
        finish_kernel.put(*(torch.zeros(1, 1, 2, device=device) for _ in range(2)))
    except finish_kernel.CANNOT_COMPILE as error:
        reason = type(error).__name__
        logging.getLogger(__name__).warning("no fused kernel, eager instead: %s", reason)
        return None
    return finish_kernel
