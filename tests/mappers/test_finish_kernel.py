"""The Triton kernel against eager code: in Triton's interpreter on a CPU, compiled on a GPU.

Triton decides when it is imported whether kernels are interpreted, so that these tests run in a
process of their own. It comes with CUDA builds of torch; elsewhere the extra ``kernel`` brings it.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mappers import finish
from mappers.cache import KVCache
from mappers.content_memory import by_head
from mappers.errors import NonFinite
from mappers.finish import Finish
from mappers.rope import RotaryTable
from mappers.translate import Translator
from tests.mappers.fake_gpu import FakeStreams, compute_in_bfloat16
from tests.mappers.test_translate import (
    GEOMETRIES,
    assert_equals_dense,
    build_mapper,
    same_bits,
    source_of,
)

triton = pytest.importorskip("triton", reason="no triton here: see the extra kernel")
# Not importorskip: where Triton is, our own module has to be one that can be imported.
finish_kernel = importlib.import_module("mappers.finish_kernel")

INTERPRETED = bool(triton.knobs.runtime.interpret)
on_every_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="not interpreted")),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(
                    INTERPRETED or not torch.cuda.is_available(), reason="no CUDA device"
                ),
            ],
        ),
    ],
)
compiled = pytest.mark.skipif(INTERPRETED, reason="for kernels that are compiled")
# The interpreter is numpy, which warns of overflows and of the difference of two infinities.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DTYPES = st.sampled_from(finish_kernel.DTYPES)
LAYOUTS = st.sampled_from(["token by token", "head by head", "beside others", "every other number"])


@compiled
def test_all_of_these_in_tritons_interpreter() -> None:
    """No device is needed for it."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


def laid_out(layout: str, shape: tuple[int, int, int], **kwargs: Any) -> Tensor:
    """Memory of NaNs for ``[T, H, D]``."""
    tokens, heads, dim = shape
    if layout == "head by head":
        return by_head(torch.full(shape, torch.nan, **kwargs))
    if layout == "beside others":
        return torch.full((tokens, heads, 3 * dim), torch.nan, **kwargs)[..., dim : 2 * dim]
    if layout == "every other number":
        return torch.full((tokens, heads, 2 * dim), torch.nan, **kwargs)[..., ::2]
    return torch.full(shape, torch.nan, **kwargs)


@st.composite
def tables(draw: st.DrawFn, tokens: int, dim: int, device: str) -> RotaryTable:
    pairs = draw(st.integers(1, dim // 2))
    scaling = draw(st.sampled_from([1.0, 1.3]))
    angles = 100 * torch.randn(tokens, pairs, generator=torch.Generator().manual_seed(pairs))
    cos, sin = (scaling * angles.cos()).to(device), (scaling * angles.sin()).to(device)
    return RotaryTable(cos, sin, scaling, dim, draw(st.sampled_from(["half", "interleaved"])))


def numbers(seed: int, *shape: int, device: str) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def turned(table: RotaryTable, keys: Tensor, *, back: bool) -> Tensor:
    """float32, every product and every sum rounded for itself."""
    undo = 1 / table.scaling**2 if back else 1.0
    cos, sin = table.cos[:, None] * undo, table.sin[:, None] * undo
    sin = -sin if back else sin
    half, result = cos.shape[-1], keys.clone()
    pairs = (slice(0, half), slice(half, 2 * half))
    if table.pairing == "interleaved":
        pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b = (keys[..., part] for part in pairs)
    result[..., pairs[0]], result[..., pairs[1]] = a * cos - b * sin, b * cos + a * sin
    return result


def assert_written(out: Tensor, expected: Tensor, *, exact: bool) -> None:
    """The interpreter cuts bfloat16 off where a GPU rounds, so there it is one unit at most."""
    if out.dtype == torch.bfloat16 and INTERPRETED:
        torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=1e-30)
    elif exact:
        assert torch.equal(out, expected.to(out.dtype))
    else:
        tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[out.dtype]
        torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


@on_every_device
@given(data=st.data(), tokens=st.integers(1, 40), heads=st.integers(1, 5), half=st.integers(1, 40))
@settings(deadline=None, max_examples=60)
def test_keys_are_turned_exactly_as_by_single_operations(
    device: str, data: st.DataObject, tokens: int, heads: int, half: int
) -> None:
    shape = (tokens, heads, 2 * half)
    source = laid_out(data.draw(LAYOUTS), shape, dtype=data.draw(DTYPES), device=device)
    source.copy_(numbers(tokens, *shape, device=device))
    out = laid_out(data.draw(LAYOUTS), shape, dtype=data.draw(DTYPES), device=device)
    table = data.draw(tables(tokens, 2 * half, device))
    for back in (False, True):
        finish_kernel.put(source, out, table=table, back=back)
        assert_written(out, turned(table, source.float(), back=back), exact=True)


@on_every_device
@given(data=st.data(), tokens=st.integers(1, 40), heads=st.integers(1, 5), half=st.integers(1, 40))
@settings(deadline=None, max_examples=60)
def test_products_are_finished_as_by_eager_code(
    device: str, data: st.DataObject, tokens: int, heads: int, half: int
) -> None:
    shape = (tokens, heads, 2 * half)
    product = laid_out(data.draw(LAYOUTS), shape, device=device)
    product.copy_(numbers(tokens, *shape, device=device))
    steps = Finish(
        bias=data.draw(st.none() | st.just(numbers(1, heads * 2 * half, device=device))),
        norm=data.draw(st.none() | st.just(numbers(2, 2 * half, device=device).exp())),
        table=data.draw(st.none() | tables(tokens, 2 * half, device)),
    )
    out = laid_out(data.draw(LAYOUTS), shape, dtype=data.draw(DTYPES), device=device)
    proof = torch.zeros((), device=device)
    finish_kernel.put(product, out, **steps._asdict(), proof=proof)
    expected = torch.empty(shape)
    at_home = [x if x is None or isinstance(x, RotaryTable) else x.cpu() for x in steps]
    if steps.table is not None:
        t = steps.table
        at_home[2] = RotaryTable(t.cos.cpu(), t.sin.cpu(), t.scaling, t.head_dim, t.pairing)
    finish.put(product.cpu(), expected, Finish(*at_home), torch.zeros(()))
    assert_written(out.cpu(), expected, exact=False)
    assert float(proof) == 0


@on_every_device
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e6])
def test_a_number_that_is_not_finite_shows_wherever_it_is(device: str, bad: float) -> None:
    """The last one overflows in float16 only."""
    product = numbers(0, 40, 5, 6, device=device)
    for place in ((0, 0, 0), (21, 3, 5), (39, 4, 5)):
        spoilt, proof = product.clone(), torch.zeros((), device=device)
        spoilt[place] = bad
        out = torch.empty(product.shape, dtype=torch.float16, device=device)
        finish_kernel.put(spoilt, out, proof=proof)
        assert bool(proof.isnan())


@on_every_device
def test_values_may_be_finished_where_they_are(device: str) -> None:
    values, bias = numbers(0, 40, 5, 6, device=device), numbers(1, 30, device=device)
    expected = values + bias.view(5, 6)
    finish_kernel.put(values, values, bias=bias)
    assert torch.equal(values, expected)


@on_every_device
@pytest.mark.parametrize("recipe", ["full_head", "head_local", "top_heads"])
@pytest.mark.parametrize("chunk_tokens", [7, None])
def test_translations_through_the_kernel(
    device: str, recipe: str, chunk_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapper = build_mapper(recipe, GEOMETRIES[1])
    source = source_of(mapper)
    translator = Translator(
        mapper, device=device, chunk_tokens=chunk_tokens, compute_dtype=torch.float32
    )
    monkeypatch.setattr(finish, "kernel_for", lambda device: None)
    expected = translator.translate(source, dtype=torch.float32)
    monkeypatch.setattr(finish, "kernel_for", lambda device: finish_kernel)
    given, again = (translator.translate(source, dtype=torch.float32) for _ in range(2))
    assert same_bits(given, again)
    for one, other in zip(all_of(given), all_of(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    source.keys[3][5, 1, 0] = float("nan")
    with pytest.raises(NonFinite, match="target layer 0"):
        translator.translate(source, dtype=torch.float32)


@pytest.mark.skipif(not INTERPRETED, reason="not interpreted")
@pytest.mark.parametrize("recipe", ["full_head", "head_local", "top_heads"])
def test_all_that_a_gpu_does_gives_the_dense_answer(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 content, the bias left to the kernel, and copies that overlap."""
    compute_in_bfloat16(monkeypatch)
    monkeypatch.setattr(finish, "kernel_for", lambda device: finish_kernel)
    mapper = build_mapper(recipe, GEOMETRIES[2])
    source = source_of(mapper, dtype=torch.bfloat16)
    translator = Translator(mapper, chunk_tokens=7)
    monkeypatch.setattr(translator, "_streams", FakeStreams())
    for dtype in (torch.float32, torch.bfloat16):
        given = translator.translate(source, dtype=dtype)
        assert_equals_dense(given, mapper, source, 6e-2)


def all_of(cache: KVCache) -> tuple[Tensor, ...]:
    return (*cache.keys, *cache.values)


@compiled
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(
    dtype: str, rotated: bool, tmp_path: Path
) -> None:
    """For compute capability 9.0, with no multiply-add among what Triton emits."""
    kernel = finish_kernel._put
    pointers = {name: "*fp32" for name in ("source", "cos", "sin", "bias", "norm", "proof")}
    types = {name: "i32" for name in kernel.arg_names} | pointers | {"out": f"*{dtype}"}
    types |= dict.fromkeys(("cos_scale", "sin_scale", "tiny"), "fp32")
    fixed = {"INTERLEAVED": rotated, "ROWS": 16, "WIDTH": 128, "source_dim": 1, "out_dim": 1}
    fixed |= {} if rotated else {"half": 0, "norm": None}
    source = triton.compiler.ASTSource(
        kernel, {**types, **dict.fromkeys(fixed, "constexpr")}, constexprs=fixed
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        built = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    assert built.asm["cubin"]
    assert "fma" not in built.asm["ptx"]
