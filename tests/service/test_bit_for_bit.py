"""One promise in one place: each wrong request has its documented answer, and the next good one is
right, bit for bit, against the library called directly."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mappers.translate import Translator
from tests.service.live import Live
from tests.service.pair import SOURCE, TARGET, Request, cache, claim, good, mapper, raw

TOKENS = 40


def changed(**changes: Any) -> bytes:
    """A good body with other fields of the document."""
    return good(TOKENS, **changes).body


def without_last_layer() -> bytes:
    request = good(TOKENS)
    del request.tensors["layers.2.k"], request.tensors["layers.2.v"]
    return request.body


def with_heads(heads: int) -> bytes:
    request = good(TOKENS)
    request.tensors = {name: torch.zeros(TOKENS, heads, 8) for name in request.tensors}
    return request.body


def with_nan() -> bytes:
    request: Request = good(TOKENS)
    request.tensors["layers.0.v"][7, 0, 0] = float("nan")
    return request.body


WRONG: dict[str, tuple[Callable[[], bytes], int, str]] = {
    "rope_theta": (
        lambda: changed(source=claim(SOURCE, rope_theta=9_999.0)),
        409,
        "identity_mismatch",
    ),
    "version": (lambda: changed(target=claim(TARGET, version="r0")), 409, "identity_mismatch"),
    "dtype": (lambda: changed(target=claim(TARGET, dtype="float16")), 409, "identity_mismatch"),
    "layer count": (without_last_layer, 422, "layer_set"),
    "heads": (lambda: with_heads(3), 422, "bad_shape"),
    "truncated body": (lambda: good(TOKENS).body[:-100], 400, "truncated_body"),
    "NaN": (with_nan, 200, "non_finite"),
    "oversize header": (
        lambda: (2 << 20).to_bytes(8, "little") + b"{" + b" " * (2 << 20),
        413,
        "header_too_large",
    ),
    "unknown pair": (
        lambda: changed(source=claim(SOURCE, model="unheard-of")),
        404,
        "pair_not_found",
    ),
    "uncertified length": (lambda: good(100).body, 200, "length_not_certified"),
}


@pytest.fixture(scope="module")
def truth() -> bytes:
    """The target's tensors in the order of the wire."""
    built = mapper()
    match = built.prefixes.longest_match((7, 9))
    assert match is not None
    answer = Translator(built).translate(
        cache(TOKENS), tokens=TOKENS - 1, prefix=match[1], dtype=torch.float32
    )
    pairs = zip(answer.keys, answer.values, strict=True)
    return b"".join(raw(tensor) for pair in pairs for tensor in pair)


@pytest.mark.parametrize("case", WRONG)
def test_documented_answer_then_a_right_one(live: Live, truth: bytes, case: str) -> None:
    body, status, word = WRONG[case]
    answer = live.post(body())
    assert answer.status_code == status
    assert answer.headers["kvt-decision"] == answer.json()["decision"] == "reprefill"
    assert answer.json()["reason" if status == 200 else "code"] == word

    right = live.translate(good(TOKENS))
    size = int.from_bytes(right.content[:8], "little")
    receipt = json.loads(json.loads(right.content[8 : 8 + size])["__metadata__"]["kvt"])
    assert (right.status_code, receipt["decision"]) == (200, "translate")
    assert right.content[8 + size :] == truth
