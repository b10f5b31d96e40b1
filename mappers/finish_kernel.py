"""One pass over memory for what is done number by number on a GPU: a Triton kernel.

Eager code reads and writes whole tensors once for each of: the bias added, keys back onto their
norm, their rotary embedding turned, conversion, placing, the proof that all is finite. Here each
number is read once and written once. The arithmetic is that of ``mappers.rope`` and
``mappers.key_norm``, float32, every product rounded: multiply-adds are not fused.

Triton comes with CUDA builds of torch; only ``mappers.finish`` imports this, where it is there.
"""

import subprocess

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from mappers.key_norm import TINY
from mappers.rope import RotaryTable

BLOCK_NUMBERS = 2048
"""Of each tensor one program holds so many numbers, 16 a thread: registers for several programs."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CANNOT_COMPILE = (TritonError, OSError, RuntimeError, subprocess.SubprocessError)
"""What the first call raises without a C compiler or a driver, or on a GPU unknown to Triton."""


def put(
    source: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    table: RotaryTable | None = None,
    back: bool = False,
    proof: Tensor | None = None,
) -> None:
    """Write ``source [n, H, D]`` into ``out``, both of any strides and of ``DTYPES``.

    In this order, as far as given: add ``bias``, float32 ``[H * D]``; scale each head onto
    ``norm``, float32 ``[D]``; turn it by the ``table`` of these tokens, or ``back``, for which
    ``out`` must be memory of its own. ``proof``, a float32 scalar, becomes NaN where a number that
    was written is not finite, and else stays as it is.
    """
    tokens, heads, dim = source.shape
    cos, sin = (table.cos, table.sin) if table else (source, source)
    scale = 1 / table.scaling**2 if table and back else 1.0
    with torch.cuda.device_of(out):
        width = triton.next_power_of_2(dim)
        rows = max(1, BLOCK_NUMBERS // width)
        _put[(triton.cdiv(tokens * heads, rows),)](
            *(source, out, cos, sin, bias, norm, proof),
            *(tokens * heads, heads, dim, cos.shape[-1] if table else 0),
            *(*source.stride(), *out.stride(), cos.stride(0)),
            *(scale, -scale if back else scale, TINY),
            INTERLEAVED=table is not None and table.pairing == "interleaved",
            ROWS=rows,
            WIDTH=width,
            enable_fp_fusion=False,
        )


@triton.jit(do_not_specialize=["rows"])
def _put(
    source,
    out,
    cos,
    sin,
    bias,
    norm,
    proof,
    rows,
    heads,
    dim,
    half,
    source_token,
    source_head,
    source_dim,
    out_token,
    out_head,
    out_dim,
    table_token,
    cos_scale,
    sin_scale,
    tiny,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """A row is one head of one token; each program has ROWS of them, WIDTH >= dim numbers wide."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    token, head = row // heads, row % heads
    one = tl.arange(0, WIDTH)[None, :]
    here = (row < rows) & (one < dim)
    rotated = here & (one < 2 * half)
    if INTERLEAVED:
        pair, is_first, other = one // 2, one % 2 == 0, one ^ 1
    else:
        is_first = one < half
        pair = tl.where(is_first, one, one - half)
        other = tl.where(is_first, one + half, one - half)

    source += token * source_token + head * source_head
    x = tl.load(source + one * source_dim, mask=here, other=0.0).to(tl.float32)
    y = tl.load(source + other * source_dim, mask=rotated, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + head * dim + one, mask=here, other=0.0)
        y += tl.load(bias + head * dim + other, mask=rotated, other=0.0)
    if norm is not None:
        weight = tl.load(norm + one, mask=one < dim, other=1.0)
        mean = tl.sum(x * x * (1.0 / (weight * weight) / dim), axis=1)
        onto = tl.rsqrt(tl.maximum(mean, tiny))[:, None]
        x *= onto
        y *= onto
    c = tl.load(cos + token * table_token + pair, mask=rotated, other=1.0) * cos_scale
    s = tl.load(sin + token * table_token + pair, mask=rotated, other=0.0) * sin_scale
    turned = x * c + y * tl.where(is_first, -s, s)
    written = tl.where(rotated, turned, x).to(out.dtype.element_ty)
    tl.store(out + token * out_token + head * out_head + one * out_dim, written, mask=here)
    if proof is not None:
        # Of any finite number this is 0, so that it does not matter in which order they come.
        nothing = written.to(tl.float32) - written.to(tl.float32)
        tl.atomic_add(proof, tl.sum(tl.sum(nothing, axis=1), axis=0))
