"""vLLM to vLLM over the translator: what is exported, what is loaded, and how good it is.

Times are printed and never asserted.
"""

import statistics
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from service.feedback import least_kl
from service.vllm.link import Link
from service.vllm.seal import common_tokens
from service.vllm.seal import complete as is_sealed
from tests.vllm import native
from tests.vllm.asking import Answer, complete, counted, export, load
from tests.vllm.stack import BLOCK_TOKENS, Stack
from tests.vllm.waiting import PATIENCE_SECONDS, until

PROMPT = 480
AT_ONCE = 16
CERTIFIED = [(256, 32), (480, 128)]
"""Lengths of prompts, and the native tail with which the embedded evidence lets each through."""
LOADED = "vllm:kvt_tokens_total"
EXTERNAL = "vllm:external_prefix_cache_hits_total"
LOCAL = "vllm:prefix_cache_hits_total"

Texts = list[list[int]]


def test_an_export_is_what_the_model_computes(stack: Stack, texts: Texts) -> None:
    prompt = texts[1][:100]
    asked = {"kv_transfer_params": {"kvt": {"export": True}}}
    answer = complete(stack.small, prompt, tokens=4, **asked)
    handle, ids = answer.said.handle, prompt + answer.ids[:-1]
    assert handle is not None
    assert handle.tokens == len(ids)
    link = Link(stack.translator.url, PATIENCE_SECONDS)
    memory = link.find(handle.buffer, handle.nbytes).memory.data
    link.close()
    until(lambda: is_sealed(memory, handle.seal_offset, handle.tokens, 1), "it is copied")
    assert common_tokens(memory, handle.seal_offset, handle.tokens, ids) == len(ids)
    expected = native.kv("small", ids)
    shape = (len(expected), 2, *expected[0][0].shape)
    found = memory[: torch.Size(shape).numel() * 4].view(torch.float32).view(shape)
    for states, layer in zip(found, expected, strict=True):
        for read, computed in zip(states, layer, strict=True):
            torch.testing.assert_close(read, computed, atol=2e-4, rtol=1e-3)


def test_many_exports_at_once_all_get_handles(stack: Stack, texts: Texts) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        prompts = [text[:64] for text in texts[:AT_ONCE]]
        handles = list(threads.map(partial(export, stack.small), prompts))
    assert len({handle.buffer for handle in handles}) == AT_ONCE


def test_the_engine_counts_the_tokens_that_were_translated(
    stack: Stack, texts: Texts, digest: str
) -> None:
    prompt = texts[2][:PROMPT]
    before = {name: stack.large.metric(name) for name in (LOADED, EXTERNAL)}
    loaded = load(stack.large, prompt, export(stack.small, prompt), digest).said.loaded
    assert loaded is not None
    assert loaded.tokens == loaded.receipt.tokens // BLOCK_TOKENS * BLOCK_TOKENS > 0
    for name, value in before.items():
        assert counted(stack.large, name, value + loaded.tokens) == value + loaded.tokens


def test_the_first_token_is_as_good_as_the_evidence_says(
    stack: Stack, texts: Texts, digest: str, figures: list[str]
) -> None:
    prompts = [text[:PROMPT] for text in texts[3:9]]
    handles = [export(stack.small, prompt) for prompt in prompts]
    pairs = zip(prompts, handles, strict=True)
    translated = [load(stack.large, *pair, digest, tokens=1) for pair in pairs]
    alone = [complete(stack.large, prompt, tokens=1) for prompt in prompts]
    kls = [least_kl(n.top, t.top) for n, t in zip(alone, translated, strict=True)]
    loaded = [answer.said.loaded for answer in translated]
    limits = [found.receipt.max_kl for found in loaded if found is not None]
    assert len(limits) == len(prompts)
    figures.append(
        f"first-token KL, {len(kls)} prompts of {PROMPT} tokens: mean "
        f"{statistics.fmean(kls):.4f} nats, largest {max(kls):.4f}, threshold {limits[0]}"
    )
    figures.append(_times(alone, translated))
    assert statistics.fmean(kls) <= limits[0]


def _times(alone: list[Answer], translated: list[Answer]) -> str:
    saved = sum(a.said.loaded.tokens for a in translated if a.said.loaded)
    native_ms, translated_ms = (
        1000 * statistics.median(answer.seconds for answer in answers)
        for answers in (alone, translated)
    )
    return (
        f"time to first token, median: {native_ms:.0f} ms without, {translated_ms:.0f} ms with; "
        f"{saved} of {len(alone) * PROMPT} prompt tokens were not prefilled"
    )


@pytest.mark.parametrize(("tokens", "tail"), CERTIFIED)
def test_first_token_over_native_tails(
    stack: Stack, texts: Texts, digest: str, figures: list[str], tokens: int, tail: int
) -> None:
    kls, clip, most = [], 0.0, {"max_native_tail": tail}
    for text in texts[9:13]:
        prompt = text[:tokens]
        answer = load(
            stack.large, prompt, export(stack.small, prompt), digest, tokens=1, params=most
        )
        loaded = answer.said.loaded
        assert loaded is not None
        assert loaded.tokens == tokens - tail
        kls.append(least_kl(complete(stack.large, prompt, tokens=1).top, answer.top))
        clip = loaded.receipt.kl_clip
    mean = statistics.fmean(kls)
    figures.append(f"first-token KL over a native tail of {tail}: mean {mean:.4f} nats")
    assert mean < clip


def test_the_end_of_a_prompt_before_the_end_of_the_cache_is_read_natively(
    stack: Stack, texts: Texts, digest: str
) -> None:
    text, shorter = texts[30], PROMPT + 1
    loaded = load(stack.large, text[:shorter], export(stack.small, text[: PROMPT + 128]), digest)
    assert loaded.said.loaded is not None
    tail = loaded.said.loaded.receipt.native_tail
    assert 1 < tail
    assert loaded.said.loaded.tokens == (shorter - tail) // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_native_request_does_not_meet_translated_blocks(
    stack: Stack, texts: Texts, digest: str
) -> None:
    prompt = texts[13][:PROMPT]
    assert load(stack.large, prompt, export(stack.small, prompt), digest).said.loaded is not None
    hits = stack.large.metric(LOCAL)
    first = complete(stack.large, prompt)
    second = complete(stack.large, prompt)
    # The second meets what the first computed; the first met nothing.
    exact = (PROMPT - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert counted(stack.large, LOCAL, hits + exact) == hits + exact
    assert first.text == second.text == native.continued(prompt)
