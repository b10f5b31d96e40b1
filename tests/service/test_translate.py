"""Good requests, against the Translator called directly and against every layout and dtype."""

import json
from collections.abc import Iterator

import pytest
import safetensors.torch
import torch

from mappers.cache import DTYPES, KVCache
from mappers.layouts import Geometry, Layout, read
from mappers.translate import Translator
from tests.service.live import Live, unharmed
from tests.service.pair import KLS, SOURCE, TARGET, cache, claim, document, good, mapper

TRANSLATED = ("translate", "")


def answered(body: bytes) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Receipt and tensors, read by the safetensors library and not by ours."""
    size = int.from_bytes(body[:8], "little")
    receipt = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["kvt"])
    return receipt, safetensors.torch.load(body)


def expected(source: KVCache, tokens: int, *, known: bool, dtype: str = "float32") -> KVCache:
    """What the library gives for it."""
    built = mapper()
    prefix = built.prefixes.longest_match((7, 9)) if known else None
    return Translator(built).translate(
        source, tokens=tokens, prefix=prefix[1] if prefix else None, dtype=DTYPES[dtype]
    )


def test_answer_is_the_translators_bit_for_bit(live: Live) -> None:
    answer = live.translate(good(40, seed=5))
    receipt, tensors = answered(answer.content)
    wanted = expected(cache(40, seed=5), 39, known=True)
    assert (receipt["tokens"], receipt["native_tail"], receipt["prefix_tokens"]) == (39, 1, 2)
    size = int.from_bytes(answer.content[:8], "little")
    offsets = {
        name: spec["data_offsets"]
        for name, spec in json.loads(answer.content[8 : 8 + size]).items()
        if name != "__metadata__"
    }
    in_order = [f"layers.{i}.{kind}" for i in range(4) for kind in "kv"]
    assert sorted(offsets, key=lambda name: offsets[name]) == in_order
    for layer in range(TARGET.num_layers):
        assert torch.equal(tensors[f"layers.{layer}.k"], wanted.keys[layer])
        assert torch.equal(tensors[f"layers.{layer}.v"], wanted.values[layer])
        assert torch.equal(tensors[f"layers.{layer}.k"][0], torch.full((2, 8), 100.0 + layer))


def test_headers_repeat_the_receipt(live: Live) -> None:
    answer = live.translate(good(40))
    receipt, _ = answered(answer.content)
    headers = answer.headers
    assert headers["kvt-decision"] == receipt["decision"] == "translate"
    assert headers["kvt-mapper"] == headers["x-vsr-kv-mapper-id"] == receipt["mapper"]
    assert headers["kvt-mapper-digest"] == receipt["digest"]
    assert headers["kvt-tokens"] == str(receipt["tokens"])
    assert headers["kvt-native-tail"] == str(receipt["native_tail"])
    assert float(headers["kvt-kl-bound"]) == receipt["kl_bound"] == KLS[True, 1]
    assert headers["x-vsr-kv-transfer-status"] == "applied"
    assert int(headers["content-length"]) == len(answer.content)


@pytest.mark.parametrize("layout", list(Layout))
def test_every_layout_carries_the_same_numbers(live: Live, layout: Layout) -> None:
    block = 16 if layout in (Layout.VLLM_HN2D, Layout.VLLM_2BNHD) else None
    with unharmed(live, TRANSLATED):
        answer = live.translate(good(40, layout=layout, block_tokens=block))
    receipt, tensors = answered(answer.content)
    geometry = Geometry(4, 39, 2, 8, block)
    wanted = expected(cache(40), 39, known=True)
    given = read(layout, tensors, geometry, wanted.positions)
    assert receipt["layout"] == layout.value
    for ours, theirs in zip(wanted.keys + wanted.values, given.keys + given.values, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_storage_dtypes_in_and_out(live: Live, stored: str, wanted: str) -> None:
    request = good(24)
    request.document["source"]["kv_dtype"] = stored
    request.document["target"]["kv_dtype"] = wanted
    request.tensors = {name: t.to(DTYPES[stored]) for name, t in request.tensors.items()}
    receipt, tensors = answered(live.translate(request).content)
    source = cache(24, dtype=stored)
    truth = expected(source, 23, known=True, dtype=wanted)
    assert receipt["dtype"] == wanted
    for layer in range(4):
        assert tensors[f"layers.{layer}.k"].dtype == DTYPES[wanted]
        assert torch.equal(tensors[f"layers.{layer}.k"], truth.keys[layer])
        assert torch.equal(tensors[f"layers.{layer}.v"], truth.values[layer])


def test_rotation_follows_the_declared_positions(live: Live) -> None:
    changes = {"start_position": 24, "prefix_token_ids": []}
    receipt, tensors = answered(live.translate(good(40, **changes)).content)
    truth = expected(cache(40, start_position=24), 32, known=False)
    assert (receipt["start_position"], receipt["tokens"], receipt["native_tail"]) == (24, 32, 8)
    assert torch.equal(tensors["layers.3.k"], truth.keys[3])
    elsewhere = expected(cache(40, start_position=0), 32, known=False)
    assert not torch.allclose(tensors["layers.3.k"], elsewhere.keys[3])


def test_unknown_first_tokens_need_evidence_of_their_own(live: Live) -> None:
    receipt, tensors = answered(live.translate(good(40, prefix_token_ids=[1, 2])).content)
    truth = expected(cache(40), 32, known=False)
    assert (receipt["prefix_tokens"], receipt["native_tail"]) == (0, 8)
    assert receipt["kl_bound"] == KLS[False, 8]
    assert torch.equal(tensors["layers.0.k"], truth.keys[0])


@pytest.mark.parametrize(("max_kl", "tail"), [(0.05, 1), (0.02, 1), (0.0199, 8), (0.005, 32)])
def test_the_smallest_tail_that_meets_the_threshold(live: Live, max_kl: float, tail: int) -> None:
    receipt, _ = answered(live.translate(good(40, max_kl=max_kl)).content)
    assert (receipt["native_tail"], receipt["tokens"]) == (tail, 40 - tail)
    assert receipt["max_kl"] == max_kl


def test_max_kl_only_tightens(live: Live) -> None:
    receipt, _ = answered(live.translate(good(40, max_kl=100.0)).content)
    assert receipt["max_kl"] == 0.05


def test_a_prefix_may_reach_into_the_native_tail(live: Live) -> None:
    request = good(33, max_kl=0.005)
    receipt, tensors = answered(live.translate(request).content)
    assert (receipt["tokens"], receipt["prefix_tokens"]) == (1, 1)
    assert torch.equal(tensors["layers.1.v"], torch.full((1, 2, 8), 101.0))


def test_token_digest_comes_back(live: Live) -> None:
    digest = "ab" * 32
    receipt, _ = answered(live.translate(good(40, token_ids_sha256=digest)).content)
    assert receipt["token_ids_sha256"] == digest


def test_body_in_small_chunks_and_octet_stream(live: Live) -> None:
    request = good(24)
    body = request.body

    def pieces() -> Iterator[bytes]:
        yield from (body[i : i + 1] for i in range(40))
        yield from (body[i : i + 777] for i in range(40, len(body), 777))

    headers = {"Content-Type": "application/octet-stream; charset=binary"}
    with unharmed(live, TRANSLATED):
        answer = live.client.post("/v1/translate", content=pieces(), headers=headers)
    assert answer.content == live.translate(request).content


def test_tensors_in_any_order_of_the_body(live: Live) -> None:
    request = good(24)
    straight = live.translate(request).content
    request.tensors = dict(reversed(request.tensors.items()))
    assert live.translate(request).content == straight


def test_what_a_client_sends_as_request_id_is_ignored(live: Live) -> None:
    for hostile in ("10.0.0.1:80", "x" * 8000, "other-user"):
        answer = live.translate(good(24), **{"X-Request-Id": hostile})
        assert answer.status_code == 200
        assert len(answer.headers["x-request-id"]) == 32
        assert hostile not in answer.headers["x-request-id"]


def test_plan_says_what_translate_then_does(live: Live) -> None:
    plan = live.client.post("/translate/plan", json=document(40, max_kl=0.015)).json()
    answer = live.translate(good(40, max_kl=0.015))
    receipt, tensors = answered(answer.content)
    shared = plan.keys() & receipt.keys()
    assert {"tokens", "native_tail", "kl_bound", "mapper", "digest", "alpha", "rows"} <= shared
    assert {name: plan[name] for name in shared} == {name: receipt[name] for name in shared}
    assert plan["bytes_out"] == sum(t.nbytes for t in tensors.values())
    assert plan["bytes_in"] == len(good(40).data)
    assert plan["expected_ms"] > 0


def test_claims_that_repeat_the_identity_are_fine(live: Live) -> None:
    said = claim(SOURCE, num_layers=3, num_kv_heads=2, head_dim=8, k_norm=True, kv_dtype="float32")
    assert live.translate(good(40, source=said)).headers["kvt-decision"] == "translate"
