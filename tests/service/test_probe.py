"""A probe over HTTP: what it changes in an answer, what is refused, and both clients."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from starlette.testclient import TestClient

from mappers import artifact
from mappers.cache import DTYPES, KVCache, consecutive
from mappers.errors import LayoutError
from mappers.evidence import Arm, Evidence, EvidenceRow
from mappers.layouts import Geometry, Layout, read, write
from mappers.manifest import ManifestFacts
from mappers.probe import PROBE_TOKENS, ProbeQueries, translation_error
from mappers.quantize import Storage
from mappers.translate import Translator
from service.client import AsyncClient, Client, Reprefill, Translated
from service.schemas import TranslateRequest
from service.settings import Settings
from service.side import Side
from service.upload import Upload, announcing
from service.wire import TensorSpec
from tests.service.live import SAFETENSORS
from tests.service.pair import TARGET, Request, cache, document, good, mapper
from tests.service.reporting import outcomes, served
from tests.service.test_admission import predict, service_of
from tests.service.test_translate import answered

TOKENS = 100
# Certified KL by native tail, for translations near to the probe and far from it.
NEAR = {1: 0.004, 8: 0.003, 32: 0.002}
FAR = {1: 0.2, 8: 0.05, 32: 0.01}
EDGE = 0.25
DOCUMENTS = 700  # enough for four groups


def queries() -> ProbeQueries:
    shape = (TARGET.num_layers, 2 * TARGET.num_kv_heads, 4, TARGET.head_dim)
    content = torch.randn(shape, generator=torch.Generator().manual_seed(6)).bfloat16()
    return ProbeQueries(content, 0.5, TARGET.rope)


def evidence() -> Evidence:
    """Errors spread evenly over 0 to 1, at every length and tail."""
    rows = [
        EvidenceRow(
            document=f"d{number}",
            domain="chat",
            length=length,
            native_tail=tail,
            prefix_known=True,
            probe_tokens=PROBE_TOKENS,
            probe_error=number / DOCUMENTS,
            arm=Arm.TRANSLATED,
            kl=kls[tail],
            kl_max=kls[tail],
            top1=0.9,
            nll=2.0,
        )
        for number in range(DOCUMENTS)
        for kls in [NEAR if number / DOCUMENTS < EDGE else FAR]
        for length in (80, 160)
        for tail in kls
    ]
    return Evidence(continuation_tokens=32, corpora={"chat": "sha256:11"}, rows=tuple(rows))


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair's mapper with queries and evidence for probes."""
    root = tmp_path_factory.mktemp("probed")
    artifact.publish(root, mapper(), ManifestFacts(ridge=0.01), evidence(), probe_queries=queries())
    return root


@pytest.fixture(scope="module")
def client(probed: Path) -> Iterator[TestClient]:
    with served(Settings(artifacts=(probed,), shadow_rate=0)) as running:
        yield running


def translation(tokens: int = TOKENS, dtype: str = "float32") -> KVCache:
    return Translator(mapper()).translate(cache(tokens), dtype=DTYPES[dtype])


def probe(noise: float, tokens: int = PROBE_TOKENS) -> KVCache:
    """As far from the translation of the good request's first tokens as ``noise`` says."""
    near = translation().slice(0, tokens)
    generator = torch.Generator().manual_seed(9)
    tensors = [
        t + noise * torch.randn(t.shape, generator=generator) for t in (*near.keys, *near.values)
    ]
    layers = TARGET.num_layers
    return KVCache(tuple(tensors[:layers]), tuple(tensors[layers:]), near.positions)


def tensors_of(given: KVCache, layout: Layout, block: int | None) -> dict[str, torch.Tensor]:
    found = write(layout, given, block_tokens=block)
    return {f"probe.{name.removeprefix('layers.')}": tensor for name, tensor in found.items()}


def with_probe(given: KVCache, *, layout: Layout = Layout.NHD, **changes: Any) -> Request:
    """The good request, and this probe after its tensors."""
    changes = {"probe": {"tokens": PROBE_TOKENS}, **changes}
    request = good(TOKENS, layout=layout, **changes)
    block = request.document.get("block_tokens")
    return replace(request, tensors={**request.tensors, **tensors_of(given, layout, block)})


def post(client: httpx.Client, request: Request) -> httpx.Response:
    return client.post("/translate", content=request.body, headers=SAFETENSORS)


def spliced(given: KVCache, tokens: int) -> KVCache:
    """What the library gives: the probe, then the translation."""
    return Translator(mapper()).translate(
        cache(TOKENS), tokens=tokens, prefix=given, dtype=torch.float32
    )


def assert_same(given: KVCache, wanted: KVCache) -> None:
    for ours, theirs in zip(given.keys + given.values, wanted.keys + wanted.values, strict=True):
        assert torch.equal(ours, theirs)


def read_answer(body: bytes, layout: Layout = Layout.NHD, block: int | None = None) -> KVCache:
    receipt, tensors = answered(body)
    rows = int(str(receipt["tokens"]))
    return read(layout, tensors, Geometry(4, rows, 2, 8, block), consecutive(rows))


@pytest.mark.parametrize(("noise", "tail"), [(0.05, 1), (1.0, 8)], ids=["near", "far"])
def test_the_error_chooses_the_tail_and_the_probe_is_in_the_answer(
    client: TestClient, noise: float, tail: int
) -> None:
    given = probe(noise)
    answer = post(client, with_probe(given))
    receipt, _ = answered(answer.content)
    found = read_answer(answer.content)
    error = translation_error(queries(), Translator(mapper()), cache(TOKENS), given)
    assert (error < EDGE) == (tail == 1)
    assert receipt["probe_error"] == pytest.approx(error)
    assert (receipt["native_tail"], receipt["tokens"]) == (tail, TOKENS - tail)
    assert answer.headers["kvt-native-tail"] == str(tail)
    assert receipt["prefix_tokens"] == PROBE_TOKENS
    assert receipt["kl_bound"] == (NEAR if tail == 1 else FAR)[tail]
    assert_same(found.slice(0, PROBE_TOKENS), given)
    assert_same(found, spliced(given, TOKENS - tail))


def test_too_far_from_the_probe_is_refused_after_all(client: TestClient) -> None:
    before = outcomes(client)
    answer = post(client, with_probe(probe(1.0), max_kl=0.005))
    body = answer.json()
    assert answer.headers["kvt-decision"] == "reprefill"
    assert (body["reason"], body["max_kl"]) == ("probe_kl_exceeds_threshold", 0.005)
    assert body["kl_bound"] == FAR[32]
    counted = ("reprefill", "probe_kl_exceeds_threshold")
    assert outcomes(client)[counted] == before.get(counted, 0) + 1
    assert post(client, with_probe(probe(0.05), max_kl=0.005)).headers["kvt-native-tail"] == "1"


def test_what_no_error_could_save_is_refused_before_the_body(client: TestClient) -> None:
    request = with_probe(probe(0.05), max_kl=0.001)
    answer = client.post("/translate", content=request.header, headers=SAFETENSORS)
    assert answer.json()["reason"] == "certified_kl_exceeds_threshold"


def test_a_plan_is_for_the_best_error(client: TestClient) -> None:
    said = document(TOKENS, probe={"tokens": PROBE_TOKENS})
    found = client.post("/translate/plan", json=said).json()
    assert (found["decision"], found["native_tail"]) == ("translate", 1)
    without = document(TOKENS)
    assert client.post("/translate/plan", json=without).json()["reason"] == "no_evidence"
    request = with_probe(probe(0.0))
    assert found["bytes_in"] == len(request.data)


@pytest.mark.parametrize("layout", list(Layout))
def test_every_layout_carries_a_probe(client: TestClient, layout: Layout) -> None:
    block = 24 if layout in (Layout.VLLM_HN2D, Layout.VLLM_2BNHD) else None
    given = probe(1.0)
    answer = post(client, with_probe(given, layout=layout, block_tokens=block))
    assert_same(read_answer(answer.content, layout, block), spliced(given, TOKENS - 8))


def test_a_probe_may_come_before_the_cache(client: TestClient) -> None:
    request = with_probe(probe(0.05))
    turned = replace(request, tensors=dict(reversed(request.tensors.items())))
    assert post(client, turned).content == post(client, request).content


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_probe_comes_back_bit_for_bit_in_the_targets_dtype(
    client: TestClient, dtype: str
) -> None:
    given = probe(0.05)
    stored = KVCache(
        tuple(k.to(DTYPES[dtype]) for k in given.keys),
        tuple(v.to(DTYPES[dtype]) for v in given.values),
        given.positions,
    )
    request = with_probe(stored)
    request.document["target"]["kv_dtype"] = dtype
    found = read_answer(post(client, request).content).slice(0, PROBE_TOKENS)
    for ours, theirs in zip(found.keys + found.values, stored.keys + stored.values, strict=True):
        assert ours.dtype == DTYPES[dtype]
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_probe_that_is_not_finite_is_refused(client: TestClient, value: float) -> None:
    given = probe(0.05)
    given.values[3][63, 1, 7] = value
    assert post(client, with_probe(given)).json()["reason"] == "non_finite"


def without(name: str) -> Request:
    request = with_probe(probe(0.05))
    return replace(request, tensors={n: t for n, t in request.tensors.items() if n != name})


def changed(name: str, tensor: torch.Tensor) -> Request:
    request = with_probe(probe(0.05))
    return replace(request, tensors={**request.tensors, name: tensor})


BAD: dict[str, tuple[Request, str, str]] = {
    "another size": (with_probe(probe(0.05), probe={"tokens": 32}), "bad_probe", "64.*32"),
    "as long as the prompt": (
        good(PROBE_TOKENS, probe={"tokens": PROBE_TOKENS}),
        "bad_probe",
        "none of 64",
    ),
    "later in the prompt": (
        with_probe(probe(0.05), start_position=5),
        "bad_probe",
        "position 0.*5",
    ),
    "no tokens": (with_probe(probe(0.05), probe={"tokens": 0}), "bad_document", "probe.tokens"),
    "more than tokens": (
        with_probe(probe(0.05), probe={"tokens": 64, "layers": 1}),
        "bad_document",
        "probe",
    ),
    "not sent": (good(TOKENS, probe={"tokens": PROBE_TOKENS}), "layer_set", "probe.*8 tensors"),
    "a layer missing": (without("probe.2.v"), "layer_set", "probe"),
    "a layer too many": (changed("probe.4.k", torch.zeros(64, 2, 8)), "layer_set", "probe"),
    "too few rows": (
        changed("probe.1.k", torch.zeros(63, 2, 8)),
        "bad_shape",
        r"probe.*\[64, 2, 8\].*\[63, 2, 8\]",
    ),
    "another dtype": (
        changed("probe.1.k", torch.zeros(64, 2, 8).bfloat16()),
        "dtype_unsupported",
        "probe.*float32.*bfloat16",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_probes(client: TestClient, case: str) -> None:
    request, code, detail = BAD[case]
    answer = post(client, request)
    assert (answer.status_code, answer.json()["code"]) == (422, code)
    assert re.search(detail, answer.json()["detail"])


def test_a_truncated_probe(client: TestClient) -> None:
    answer = client.post(
        "/translate", content=with_probe(probe(0.05)).body[:-1], headers=SAFETENSORS
    )
    assert (answer.status_code, answer.json()["code"]) == (400, "truncated_body")


def test_a_probe_that_nobody_announced(settings: Settings) -> None:
    request = good(64)
    tensors = {**request.tensors, **tensors_of(probe(0.05, tokens=32), Layout.NHD, None)}
    with served(settings) as running:
        answer = post(running, replace(request, tensors=tensors))
    assert (answer.status_code, answer.json()["code"]) == (422, "layer_set")


def test_a_mapper_without_queries_takes_no_probe_and_says_so(
    settings: Settings, client: TestClient
) -> None:
    with served(settings) as other:
        answer = post(other, with_probe(probe(0.05)))
        assert (answer.status_code, answer.json()["code"]) == (422, "bad_probe")
        [unable] = other.get("/mappers").json()["mappers"]
    [able] = client.get("/mappers").json()["mappers"]
    assert (unable["probe_tokens"], able["probe_tokens"]) == (0, PROBE_TOKENS)


def test_a_refusal_of_the_second_ruling_for_the_time_is_a_doubt_too(probed: Path) -> None:
    """99 tokens are predicted to be worth it, the 92 that are left with this probe are not."""
    with served(Settings(artifacts=(probed,), shadow_rate=0)) as running:
        predict(running.app, t63=10.0, t99=1.0)
        [entry] = service_of(running.app).store.entries
        request = with_probe(probe(1.0), reprefill_ms=2000)
        refused = 0
        while post(running, request).headers["kvt-decision"] == "reprefill":
            refused += 1
            assert entry.timing.trust(TOKENS) == 0.98**refused
        assert refused == 20
        assert entry.timing.trust(TOKENS) == 1.0


def test_a_session_pays_for_what_was_certified_in_the_end(probed: Path) -> None:
    settings = Settings(artifacts=(probed,), shadow_rate=0, drift_budget=2 * FAR[8])
    with served(settings) as running:
        answers = [
            post(running, with_probe(probe(1.0), session_id="one")).headers["kvt-decision"]
            for _ in range(3)
        ]
        last = post(running, with_probe(probe(1.0), session_id="one")).json()
        other = post(running, with_probe(probe(0.05), session_id="two"))
    assert answers == ["translate", "translate", "reprefill"]
    assert last["reason"] == "drift_budget_exhausted"
    assert other.headers["kvt-decision"] == "translate"


def test_a_tensor_that_does_not_begin_at_a_whole_number_is_read_all_the_same() -> None:
    side = Side(Layout.NHD, Geometry(1, 1, 1, 2), Storage("float32"), "probe")
    wanted = torch.tensor([[[1.5, -2.0]]]), torch.tensor([[[3.0, 4.0]]])
    before = torch.zeros(3, dtype=torch.uint8)
    data = torch.cat([before, *(tensor.view(-1).view(torch.uint8) for tensor in wanted)])
    specs = {
        "probe.0.k": TensorSpec("float32", (1, 1, 2), 3, 11),
        "probe.0.v": TensorSpec("float32", (1, 1, 2), 11, 19),
    }
    found = side.read(data, specs, 0)
    assert torch.equal(found.keys[0], wanted[0])
    assert torch.equal(found.values[0], wanted[1])


class TestClients:
    """Both send it from the caches that a caller has."""

    def request(self, **changes: Any) -> TranslateRequest:
        return TranslateRequest.model_validate(document(TOKENS, **changes), strict=False)

    def test_both_clients_send_a_probe(self, client: TestClient) -> None:
        given = probe(1.0)

        async def ask() -> Any:
            transport = httpx.ASGITransport(app=client.app)
            async with AsyncClient("http://service", transport=transport) as running:
                return await running.translate(cache(TOKENS), self.request(), probe=given)

        outcome = asyncio.run(ask())
        assert isinstance(outcome, Translated)
        assert outcome.receipt.probe_error is not None
        assert_same(outcome.cache, spliced(given, TOKENS - 8))

    def test_the_blocking_client_says_the_same(self, client: TestClient) -> None:
        given = probe(1.0)

        def forward(request: httpx.Request) -> httpx.Response:
            answer = client.post(request.url.path, content=request.read(), headers=SAFETENSORS)
            return httpx.Response(200, headers=dict(answer.headers), content=answer.content)

        with Client("http://service", transport=httpx.MockTransport(forward)) as running:
            outcome = running.translate(cache(TOKENS), self.request(), probe=given)
            refused = running.translate(cache(TOKENS), self.request(max_kl=0.005), probe=given)
        assert isinstance(outcome, Translated)
        assert_same(outcome.cache, spliced(given, TOKENS - 8))
        assert isinstance(refused, Reprefill)
        assert refused.reason == "probe_kl_exceeds_threshold"

    def test_a_probe_that_is_not_what_is_announced_is_not_sent(self) -> None:
        given = probe(0.0)
        announced = self.request(probe={"tokens": PROBE_TOKENS})
        assert announcing(self.request(), given) == announced
        for sent, said in ((None, announced), (given, self.request())):
            with pytest.raises(LayoutError, match="64"):
                Upload.of(cache(TOKENS), said, sent)
        late = KVCache(given.keys, given.values, given.positions + 1)
        with pytest.raises(LayoutError, match="position 0"):
            Upload.of(cache(TOKENS), announced, late)
