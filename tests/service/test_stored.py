"""Caches of 8 bits over HTTP: numbers, scales and zero points in and out, and what is refused."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from starlette.testclient import TestClient
from torch import Tensor

from mappers.cache import KVCache, from_hf, to_hf
from mappers.identity import ModelIdentity
from mappers.layouts import Layout, write, write_layer
from mappers.mapper import Mapper
from mappers.quantize import Storage
from mappers.stored import AnyCache, StoredCache, restored, store
from mappers.translate import Translator
from service import output, translation
from service.client import Client, Reprefill, Translated
from service.hf import cache_from, claim_of, request_for
from service.schemas import TranslateRequest
from service.settings import Settings
from service.upload import Upload
from tests.service.live import SAFETENSORS
from tests.service.pair import SOURCE, TARGET, Request, cache, claim, document, mapper, publish
from tests.service.reporting import served
from tests.service.test_translate import answered

TOKENS = 40
SOURCE_STORAGE = Storage("int8", "per_token_head", True)
TARGET_STORAGE = Storage("int8", "per_head")
STORAGES = [
    Storage("float8_e4m3fn"),
    Storage("float8_e5m2", "per_tensor"),
    Storage("float8_e4m3fn", "per_head"),
    Storage("float8_e4m3fn", "per_token_head"),
    Storage("int8", "per_tensor"),
    Storage("int8", "per_head", True),
    Storage("int8", "per_token_head"),
    Storage("int8", "per_token_head", True),
]


def kept(identity: ModelIdentity, storage: Storage) -> ModelIdentity:
    """The model as an engine with such a cache runs it."""
    said = {
        "kv_dtype": storage.dtype,
        "kv_scales": storage.scales,
        "kv_zero_points": storage.zero_points,
    }
    return ModelIdentity.model_validate({**dict(identity), **said})


def mapper_of(source: Storage, target: Storage) -> Mapper:
    return mapper(kept(SOURCE, source), kept(TARGET, target))


def request_of(source: Storage, target: Storage, **changes: Any) -> dict[str, Any]:
    sides = {"source": kept(SOURCE, source), "target": kept(TARGET, target)}
    claims = {
        side: claim(
            of, kv_dtype=of.kv_dtype, kv_scales=of.kv_scales, kv_zero_points=of.kv_zero_points
        )
        for side, of in sides.items()
    }
    return document(TOKENS, **claims, **changes)


def parts_of(stored: AnyCache, layout: Layout, block: int | None) -> dict[str, Tensor]:
    """A body's tensors, written out here and not by the client."""
    if isinstance(stored, KVCache):
        return write(layout, stored, block_tokens=block)
    floats = [[one.numbers.float() for one in side] for side in (stored.keys, stored.values)]
    numbers = write(layout, KVCache(*map(tuple, floats), stored.positions), block_tokens=block)
    found = {name: tensor.to(torch.int8) for name, tensor in numbers.items()}
    if stored.storage.dtype != "int8":
        dtype = stored.keys[0].numbers.dtype
        found = {name: tensor.to(dtype) for name, tensor in numbers.items()}
    for side, layers in (("k", stored.keys), ("v", stored.values)):
        for index, one in enumerate(layers):
            found[f"layers.{index}.{side}_scale"] = one.scale
            found[f"layers.{index}.{side}_zero"] = one.zero
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def post(client: TestClient, request: Request) -> httpx.Response:
    return client.post("/translate", content=request.body, headers=SAFETENSORS)


def expected(sent: AnyCache, built: Mapper, storage: Storage, tokens: int) -> AnyCache:
    """The library's translation of what the numbers stand for, stored as asked."""
    prefix = built.prefixes.longest_match((7, 9))
    found = Translator(built).translate(
        restored(sent), prefix=prefix[1] if prefix else None, tokens=tokens, dtype=torch.float32
    )
    return store(found, storage)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A service for caches of int8, in and out, with zero points in."""
    root = tmp_path_factory.mktemp("stored")
    publish(root, mapper_of(SOURCE_STORAGE, TARGET_STORAGE))
    with served(Settings(artifacts=(root,), shadow_rate=0)) as running:
        yield running


def good() -> Request:
    sent = store(cache(TOKENS), SOURCE_STORAGE)
    said = request_of(SOURCE_STORAGE, TARGET_STORAGE)
    return Request(said, parts_of(sent, Layout.NHD, None))


@pytest.mark.parametrize("source", STORAGES, ids=str)
def test_what_comes_is_read_and_what_goes_is_stored(tmp_path: Path, source: Storage) -> None:
    target = STORAGES[(STORAGES.index(source) + 3) % len(STORAGES)]
    built = mapper_of(source, target)
    publish(tmp_path, built)
    sent = store(cache(TOKENS), source)
    request = Request(request_of(source, target), parts_of(sent, Layout.NHD, None))
    with served(Settings(artifacts=(tmp_path,), shadow_rate=0)) as running:
        receipt, tensors = answered(post(running, request).content)
    said = (receipt["dtype"], receipt["kv_scales"], receipt["kv_zero_points"])
    assert said == (target.dtype, target.scales, target.zero_points)
    wanted = parts_of(expected(sent, built, target, TOKENS - 1), Layout.NHD, None)
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))


@pytest.mark.parametrize("layout", list(Layout))
def test_scales_have_the_same_names_in_every_layout(client: TestClient, layout: Layout) -> None:
    block = 16 if layout in (Layout.VLLM_HN2D, Layout.VLLM_2BNHD) else None
    sent = store(cache(TOKENS), SOURCE_STORAGE)
    said = request_of(SOURCE_STORAGE, TARGET_STORAGE, layout=layout.value, block_tokens=block)
    _, tensors = answered(post(client, Request(said, parts_of(sent, layout, block))).content)
    built = mapper_of(SOURCE_STORAGE, TARGET_STORAGE)
    wanted = parts_of(expected(sent, built, TARGET_STORAGE, TOKENS - 1), layout, block)
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensors[name], tensor)


def test_answers_stand_for_what_plain_arithmetic_says(client: TestClient) -> None:
    request = good()
    _, tensors = answered(post(client, request).content)
    sent = {name: tensor.numpy() for name, tensor in request.tensors.items()}
    for layer, side in product(range(SOURCE.num_layers), "kv"):
        stem = f"layers.{layer}.{side}"
        numbers = sent[stem].astype(np.float32)
        values = (numbers - sent[f"{stem}_zero"][..., None]) * sent[f"{stem}_scale"][..., None]
        exact = getattr(cache(TOKENS), {"k": "keys", "v": "values"}[side])[layer].numpy()
        assert np.abs(values - exact).max() < 0.02
    for layer, side in product(range(TARGET.num_layers), "kv"):
        stem = f"layers.{layer}.{side}"
        assert tensors[stem].dtype == torch.int8
        assert tensors[f"{stem}_scale"].shape == (TARGET.num_kv_heads,)
        # Each head's largest number is that of the scale.
        assert tensors[stem].abs().amax((0, 2)).tolist() == [127, 127]


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Request:
    request = good()
    spoiled = {**request.tensors, name: change(request.tensors[name].clone())}
    return replace(request, tensors=spoiled)


def put(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor[3, 1] = value
        return tensor

    return change


def without(name: str) -> Request:
    request = good()
    return replace(request, tensors={n: t for n, t in request.tensors.items() if n != name})


def said(side: str, **changes: Any) -> Request:
    request = good()
    request.document[side] |= changes
    return request


K_SCALE, V_ZERO = "layers.1.k_scale", "layers.2.v_zero"
BAD: dict[str, tuple[Request, int, str, str]] = {
    "no scales": (without(K_SCALE), 422, "layer_set", "per_token_head scales and zero points"),
    "no zero points": (without(V_ZERO), 422, "layer_set", "18 tensors"),
    "scale of nan": (changed(K_SCALE, put(torch.nan)), 422, "bad_scales", "layer 1, k: scale"),
    "scale of inf": (changed(K_SCALE, put(torch.inf)), 422, "bad_scales", "finite"),
    "scale of 0": (changed(K_SCALE, put(0.0)), 422, "bad_scales", "above 0"),
    "negative scale": (changed(K_SCALE, put(-1.0)), 422, "bad_scales", "above 0"),
    "zero point too high": (changed(V_ZERO, put(127.5)), 422, "bad_scales", "-128 to 127"),
    "zero point too low": (changed(V_ZERO, put(-129.0)), 422, "bad_scales", "layer 2, v: zero"),
    "zero point of nan": (changed(V_ZERO, put(torch.nan)), 422, "bad_scales", "finite"),
    "scales per head": (changed(K_SCALE, lambda t: t[0]), 422, "bad_shape", "[40, 2]"),
    "scales the other way": (changed(K_SCALE, lambda t: t.T), 422, "bad_shape", "[40, 2]"),
    "scales of 16 bits": (changed(K_SCALE, Tensor.half), 422, "dtype_unsupported", "float32"),
    "numbers in float8": (
        changed("layers.0.k", lambda t: t.to(torch.float8_e5m2)),
        422,
        "dtype_unsupported",
        "int8",
    ),
    "another dtype said": (
        said("source", kv_dtype="float8_e5m2", kv_zero_points=False),
        409,
        "identity_mismatch",
        "source.kv_dtype: the mapper was fitted for int8, not float8_e5m2",
    ),
    "other scales said": (
        said("source", kv_scales="per_head"),
        409,
        "identity_mismatch",
        "source.kv_scales: the mapper was fitted for per_token_head, not per_head",
    ),
    "zero points said away": (
        said("source", kv_zero_points=False),
        409,
        "identity_mismatch",
        "source.kv_zero_points: the mapper was fitted for true, not false",
    ),
    "an answer in 16 bits": (
        said("target", kv_dtype="bfloat16", kv_scales="none"),
        409,
        "identity_mismatch",
        "target.kv_dtype: the mapper was fitted for int8, not bfloat16",
    ),
    "a scheme that there is not": (said("source", kv_scales="per_block"), 422, "bad_document", ""),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_refused(client: TestClient, name: str) -> None:
    request, status, code, text = BAD[name]
    answer = post(client, request)
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (status, code)
    assert text in problem["detail"]
    assert problem["decision"] == "reprefill"
    assert post(client, good()).headers["kvt-decision"] == "translate"


def test_values_beyond_float32_are_not_finite(client: TestClient) -> None:
    answer = post(client, changed(K_SCALE, put(3e38)))
    assert (answer.status_code, answer.json()["reason"]) == (200, "non_finite")


@pytest.mark.parametrize(
    ("name", "poison"),
    [("layers.2.v", output.INT8_POISON), ("layers.2.k_scale", output.POISON)],
)
def test_what_was_never_written_does_not_leave(
    client: TestClient, name: str, poison: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(layout: Layout, parts: dict[str, Tensor], layer: int, *rest: Any) -> None:
        write_layer(layout, parts, layer, *rest)
        if layer == 2:
            parts[name].view(torch.uint8).view(-1)[-4:] = poison

    monkeypatch.setattr(output, "write_layer", forget)
    monkeypatch.setattr(translation.Translation, "_bounded", lambda *_: False)
    assert post(client, good()).json()["reason"] == "non_finite"


def test_listed_with_its_storage(client: TestClient) -> None:
    listed = client.get("/mappers").json()["mappers"][0]
    assert listed["state"] == "ready"
    found = {
        side: (listed[side]["kv_dtype"], listed[side]["kv_scales"], listed[side]["kv_zero_points"])
        for side in ("source", "target")
    }
    assert found == {
        "source": ("int8", "per_token_head", True),
        "target": ("int8", "per_head", False),
    }
    assert "int8" in client.get("/info").json()["dtypes"]


def test_a_plan_counts_the_bytes_of_scales(client: TestClient) -> None:
    found = client.post("/translate/plan", json=good().document).json()
    sent = 2 * SOURCE.num_layers * (TOKENS * 2 * 8 + 2 * TOKENS * 2 * 4)
    answer = 2 * TARGET.num_layers * ((TOKENS - 1) * 2 * 8 + 2 * 4)
    assert (found["bytes_in"], found["bytes_out"]) == (sent, answer)


def test_the_openapi_document_names_the_tensors(client: TestClient) -> None:
    body = client.get("/openapi.json").json()["paths"]["/translate"]["post"]["requestBody"]
    for word in ("k_scale", "v_scale", "k_zero", "v_zero", "per_token_head"):
        assert word in body["description"]


def client_of(running: TestClient) -> Client:
    """Our client, which talks to the application in this process."""

    def forward(request: httpx.Request) -> httpx.Response:
        headers = {"content-type": request.headers["content-type"]}
        answer = running.post(request.url.path, content=request.read(), headers=headers)
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    return Client("http://service", transport=httpx.MockTransport(forward))


class TestClients:
    def test_stored_in_and_stored_out(self, client: TestClient) -> None:
        sent = store(cache(TOKENS), SOURCE_STORAGE)
        said = TranslateRequest.model_validate_json(json.dumps(good().document))
        outcome = client_of(client).translate(sent, said)
        assert isinstance(outcome, Translated)
        assert isinstance(outcome.stored, StoredCache)
        built = mapper_of(SOURCE_STORAGE, TARGET_STORAGE)
        wanted = restored(expected(sent, built, TARGET_STORAGE, TOKENS - 1))
        assert outcome.stored.storage == TARGET_STORAGE
        assert outcome.cache.dtype == torch.float32
        for ours, theirs in zip(
            (*outcome.cache.keys, *outcome.cache.values),
            (*wanted.keys, *wanted.values),
            strict=True,
        ):
            assert torch.equal(ours, theirs)

    def test_a_body_is_what_the_safetensors_library_reads(self) -> None:
        sent = store(cache(TOKENS), SOURCE_STORAGE)
        said = TranslateRequest.model_validate_json(json.dumps(good().document))
        upload = Upload.of(sent, said)
        found = safetensors.torch.load(b"".join(upload))
        assert upload.content_length == len(b"".join(upload))
        assert found.keys() == good().tensors.keys()
        for name, tensor in good().tensors.items():
            assert torch.equal(found[name], tensor)

    def test_a_plain_cache_is_refused_where_a_stored_one_is_declared(
        self, client: TestClient
    ) -> None:
        said = TranslateRequest.model_validate_json(json.dumps(good().document))
        outcome = client_of(client).translate(cache(TOKENS), said)
        assert isinstance(outcome, Reprefill)
        assert outcome.code == "layer_set"

    def test_transformers_caches_are_stored_as_the_identity_says(self, client: TestClient) -> None:
        sides = {
            "source": kept(SOURCE, SOURCE_STORAGE),
            "target": claim_of(kept(TARGET, TARGET_STORAGE)),
        }
        ids = torch.tensor([[7, 9, *range(10, TOKENS + 8)]])
        sent, said = request_for(to_hf(cache(TOKENS)), **sides, prompt_ids=ids)
        assert isinstance(sent, StoredCache)
        assert sent.storage == SOURCE_STORAGE
        moved = cache_from(client_of(client).translate(sent, said), ids)
        assert moved is not None
        wanted = restored(
            expected(sent, mapper_of(SOURCE_STORAGE, TARGET_STORAGE), TARGET_STORAGE, TOKENS - 1)
        )
        for ours, theirs in zip(from_hf(moved).values, wanted.values, strict=True):
            assert torch.equal(ours, theirs)
