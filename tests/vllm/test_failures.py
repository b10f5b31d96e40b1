"""Everything but a translation is a prefill: the target's own text, and no request fails."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from service.client import Client
from service.vllm.params import salt
from tests.vllm import native
from tests.vllm.asking import Answer, complete, export, load
from tests.vllm.stack import Process, Stack
from tests.vllm.waiting import until

PROMPT = 256
MOST_FEEDBACK = 60
WAITING_REQUESTS = "vllm:num_requests_waiting"
Texts = list[list[int]]

LIES = [
    ({"source": {"version": "another"}}, "bad_handle"),
    ({"source": {"model": "large"}}, "bad_handle"),
    ({"tokens": PROMPT - 1}, "bad_handle"),
    ({"ranks": 2}, "bad_handle"),
    ({"hops": 1}, "bad_handle"),
    ({"buffer": "0" * 32}, "buffer_not_found"),
]


def assert_native(answer: Answer, prompt: list[int], reason: str) -> None:
    assert answer.said.loaded is None
    assert answer.said.refused is not None
    assert answer.said.refused.reason == reason
    assert answer.text == native.continued(prompt)


@contextmanager
def hanging(process: Process) -> Iterator[None]:
    process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.signal(signal.SIGCONT)


def restarted(process: Process) -> None:
    process.kill()
    process.start()
    process.wait_ready()


@pytest.mark.parametrize(("number", "lie"), list(enumerate(LIES)))
def test_a_handle_that_lies(
    stack: Stack, texts: Texts, digest: str, number: int, lie: tuple[dict[str, Any], str]
) -> None:
    prompt, (changes, reason) = texts[31 + number][:PROMPT], lie
    handle = export(stack.small, prompt)
    if "source" in changes:
        changes = {"source": handle.source.model_copy(update=changes["source"])}
    forged = handle.model_copy(update=changes)
    assert_native(load(stack.large, prompt, forged, digest), prompt, reason)


def test_kv_of_another_model_is_never_injected(stack: Stack, texts: Texts, digest: str) -> None:
    """The large model's own cache: no mapper reads it, and no handle makes it another's."""
    prompt = texts[17][:PROMPT]
    handle = export(stack.large, prompt, cache_salt="elsewhere")
    assert_native(load(stack.large, prompt, handle, digest), prompt, "pair_not_found")


def test_a_threshold_that_cannot_be_met(stack: Stack, texts: Texts, digest: str) -> None:
    prompt = texts[18][:PROMPT]
    strict = {"max_kl": 1e-6}
    answer = load(stack.large, prompt, export(stack.small, prompt), digest, params=strict)
    assert_native(answer, prompt, "certified_kl_exceeds_threshold")


@pytest.mark.parametrize(("number", "given"), [(19, None), (20, "mine"), (21, salt("other", 1))])
def test_without_a_salt_that_names_the_mapper(
    stack: Stack, texts: Texts, digest: str, number: int, given: str | None
) -> None:
    prompt = texts[number][:PROMPT]
    answer = load(stack.large, prompt, export(stack.small, prompt), digest, cache_salt=given)
    assert_native(answer, prompt, "no_salt")


def test_parameters_that_are_not_valid_are_as_none(stack: Stack, texts: Texts) -> None:
    prompt = texts[22][:PROMPT]
    expected = native.continued(prompt)
    for said in ("x", {"handle": {}}, {"export": 1}, {"mapper": [[]]}):
        answer = complete(stack.large, prompt, kv_transfer_params={"kvt": said})
        assert answer.text == expected
        assert answer.said.handle is None


def test_a_copy_that_breaks_after_the_promise_is_computed(
    stack: Stack, texts: Texts, digest: str
) -> None:
    """``tests/vllm/breakable.py`` writes the blocks and then fails."""
    prompt = texts[23][:PROMPT]
    handle = export(stack.small, prompt)
    answer = load(stack.large, prompt, handle, digest, headers={"X-Request-Id": "broken"})
    assert_native(answer, prompt, "load_failed")


def test_a_breaker_that_is_open(stack: Stack, texts: Texts, digest: str) -> None:
    """Answers that turn out bad, until the service gives no more."""
    prompt = texts[29][:PROMPT]
    handle = export(stack.small, prompt)
    with Client(stack.translator.url) as client:
        for number in range(MOST_FEEDBACK):
            more = {"cache_salt": salt(digest, 1, str(number)), "params": {"keep": True}}
            loaded = load(stack.large, prompt, handle, digest, tokens=1, **more).said.loaded
            if loaded is None:
                break
            client.feedback(loaded.receipt, kl=5.0)
    assert_native(load(stack.large, prompt, handle, digest), prompt, "breaker_open")
    restarted(stack.translator)


def test_a_translator_that_hangs(stack: Stack, texts: Texts, digest: str) -> None:
    prompt = texts[24][:PROMPT]
    handle = export(stack.small, prompt)
    with hanging(stack.translator):
        answer = load(stack.large, prompt, handle, digest, params={"deadline_seconds": 1.0})
        asked = {"kv_transfer_params": {"kvt": {"export": True, "deadline_seconds": 1.0}}}
        source = complete(stack.small, prompt, **asked)
    assert_native(answer, prompt, "deadline")
    assert source.said.handle is None
    export(stack.small, prompt)


def test_a_translator_that_is_killed_in_the_middle(stack: Stack, texts: Texts, digest: str) -> None:
    prompt = texts[25][:PROMPT]
    handle = export(stack.small, prompt)
    with hanging(stack.translator), ThreadPoolExecutor(1) as thread:
        answer = thread.submit(load, stack.large, prompt, handle, digest)
        until(lambda: stack.large.metric(WAITING_REQUESTS) == 1, "it waits for the translation")
        stack.translator.kill()
        assert_native(answer.result(), prompt, "unreachable")
    restarted(stack.translator)
    # Its leases are gone with it; those that it gives now are good.
    assert_native(load(stack.large, prompt, handle, digest), prompt, "buffer_not_found")
    other = texts[26][:PROMPT]
    assert load(stack.large, other, export(stack.small, other), digest).said.loaded is not None
