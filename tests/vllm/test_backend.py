"""The measured layout of vLLM's real CPU attention backend, and its attention over what we inject.

Runs in the environment of ``make test-vllm``.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from service.vllm.layout import BlockLayout, measure

pytest.importorskip("vllm", reason="only make test-vllm installs vLLM")

from vllm import _custom_ops as ops
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa

BLOCKS, HEADS, QUERIES = 6, 4, 8
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(32, 32), (64, 32), (32, 64), (32, 128)]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _measured(block: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, BlockLayout, str]:
    cache = torch.zeros(BLOCKS, HEADS, block, 2 * dim, dtype=dtype)
    isa = _get_attn_isa(dtype, block, dim)
    backend = object.__new__(CPUAttentionBackendImpl)
    backend.attn_type, backend.kv_cache_dtype = AttentionType.DECODER, "auto"
    layer = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)

    def write(keys: Tensor, values: Tensor, block_id: int) -> None:
        slots = block_id * block + torch.arange(block)
        backend.do_kv_cache_update(layer, keys, values, cache, slots)

    layout = measure(
        cache, write, num_blocks=BLOCKS, block_tokens=block, kv_heads=HEADS, head_dim=dim
    )
    return cache, layout, isa


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block", "dim"), SIZES)
def test_injected_kv_is_what_the_engines_attention_reads(
    block: int, dim: int, dtype: torch.dtype
) -> None:
    cache, layout, isa = _measured(block, dim, dtype)
    tokens, blocks = 2 * block, torch.tensor([4, 2])
    generator = torch.Generator().manual_seed(block + dim)
    keys, values = torch.randn((2, tokens, HEADS, dim), generator=generator).to(dtype)
    query = torch.randn((1, QUERIES, dim), generator=generator).to(dtype)
    layout.write(cache, blocks, keys, values)
    seen = _attention(cache, query, blocks, tokens, isa)
    expected = scaled_dot_product_attention(
        query.transpose(0, 1).float(),
        *(states.transpose(0, 1).float().repeat_interleave(2, 0) for states in (keys, values)),
    )
    error = (seen.transpose(0, 1).float() - expected).abs().max()
    assert error < CLOSE[dtype]
    read = layout.read(cache, blocks)
    assert torch.equal(read[0], keys)
    assert torch.equal(read[1], values)


def test_this_backend_does_not_lie_as_its_shape_says() -> None:
    """Why it is measured: read by its shape alone, [blocks, H, block, 2 D], its cache is wrong."""
    cache, layout, _ = _measured(32, 32, torch.float32)
    keys, values = torch.randn(2, 32, HEADS, 32)
    layout.write(cache, torch.tensor([1]), keys, values)
    assert not torch.equal(cache[1].transpose(0, 1)[..., :32], keys)


def _attention(cache: Tensor, query: Tensor, blocks: Tensor, tokens: int, isa: str) -> Tensor:
    """The engine's kernel, for one query [1, heads, D] after ``tokens`` cached ones."""
    dim, output = query.shape[-1], torch.empty_like(query)
    lengths = {
        "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
        "seq_lens": torch.tensor([tokens], dtype=torch.int32),
    }
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=QUERIES,
        num_kv_heads=HEADS,
        head_dim=dim,
        dtype=query.dtype,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=False,
        **lengths,
    )
    key_cache, value_cache = cache.view(BLOCKS, HEADS, -1, dim).chunk(2, dim=2)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        scale=dim**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=blocks[None].int(),
        softcap=0.0,
        scheduler_metadata=plan,
        s_aux=None,
        **lengths,
    )
    return output
