"""The clients through buffers: the body's bits, and the body wherever buffers are not to be had."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from starlette.testclient import TestClient

from mappers.cache import KVCache, from_hf, to_hf
from mappers.errors import LayoutError
from mappers.quantize import Stored
from service import buffer_pair
from service.answer import BadAnswer, translated_in
from service.app import create_app
from service.buffer_socket import NotHandedOver
from service.client import AsyncClient, Client, NotTranslated, Outcome, Reprefill, Translated
from service.hf import translate_cache
from service.schemas import TranslateRequest
from service.settings import Settings
from tests.service.pair import SOURCE, TARGET, cache, document

TOKENS = 40


def request(tokens: int = TOKENS, **changes: Any) -> TranslateRequest:
    return TranslateRequest.model_validate(document(tokens, **changes), strict=False)


@pytest.fixture
def shared(settings: Settings, tmp_path: Path) -> Settings:
    return settings.model_copy(update={"buffers": tmp_path / "s"})


@pytest.fixture
def service(shared: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(shared), raise_server_exceptions=False) as running:
        while running.get("/startupz").status_code != 200:
            pass
        yield running


class Passing(httpx.BaseTransport):
    """The client's requests, to the application in this process; remembers what was asked."""

    def __init__(self, service: TestClient) -> None:
        self._service = service
        self.asked: list[str] = []
        self.change: Callable[[httpx.Response], httpx.Response] = lambda answer: answer

    def handle_request(self, given: httpx.Request) -> httpx.Response:
        self.asked.append(f"{given.method} {given.url.path.partition('s/')[0]}")
        answer = self._service.request(
            given.method, str(given.url.path), content=given.read(), headers=given.headers
        )
        headers = {k: v for k, v in answer.headers.items() if k != "content-length"}
        return self.change(
            httpx.Response(answer.status_code, headers=headers, content=answer.content)
        )


@pytest.fixture
def passing(service: TestClient) -> Passing:
    return Passing(service)


@pytest.fixture
def client(passing: Passing) -> Iterator[Client]:
    with Client("http://service", transport=passing) as running:
        yield running


def translated(outcome: Outcome, transport: str) -> Translated:
    assert isinstance(outcome, Translated), outcome
    assert outcome.transport == transport
    return outcome


def assert_equal(given: KVCache, expected: KVCache) -> None:
    pairs = zip(given.keys + given.values, expected.keys + expected.values, strict=True)
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert torch.equal(given.positions, expected.positions)


class TestThroughBuffers:
    def test_the_bodys_bits_and_receipt(self, client: Client, passing: Passing) -> None:
        body = translated(client.translate(cache(TOKENS), request()), "body")
        with client.buffers() as buffers:
            outcome = client.translate(cache(TOKENS), request(), buffers=buffers)
            found = translated(outcome, "buffers")
            assert_equal(found.cache, body.cache)
            assert buffers.ready_layers == 4
            assert buffers.why_not is None
        assert found.receipt.model_dump() | {"buffer": "", "tensors": {}} == (
            body.receipt.model_dump() | {"buffer": "", "tensors": {}}
        )
        assert_equal(found.cache, body.cache)  # also when the leases are given back
        assert passing.asked[-2:] == ["DELETE /buffer"] * 2

    def test_leases_are_kept_and_grow(self, client: Client, passing: Passing) -> None:
        with client.buffers() as buffers:
            for tokens in (20, 16, 40, 40):
                body = translated(client.translate(cache(tokens), request(tokens)), "body")
                passing.asked.clear()
                outcome = client.translate(cache(tokens), request(tokens), buffers=buffers)
                assert_equal(translated(outcome, "buffers").cache, body.cache)
                new = ["DELETE /buffer", "POST /buffers"] * 2 if tokens == 40 else []
                if passing.asked != ["POST /translate"]:
                    assert [*new, "POST /translate"] == passing.asked or tokens == 20
            assert passing.asked == ["POST /translate"]

    def test_an_answer_lies_in_the_buffer_until_the_next(self, client: Client) -> None:
        with client.buffers() as buffers:
            first = translated(
                client.translate(cache(TOKENS), request(), buffers=buffers), "buffers"
            )
            kept = [keys.clone() for keys in first.cache.keys]
            other = cache(TOKENS, seed=1)
            second = translated(client.translate(other, request(), buffers=buffers), "buffers")
            assert_equal(first.cache, second.cache)
            assert not torch.equal(kept[1], second.cache.keys[1])

    def test_strided_layers_and_sixteen_bits(self, client: Client) -> None:
        sent = cache(TOKENS, dtype="bfloat16")
        strided = KVCache(
            tuple(k.transpose(0, 1).contiguous().transpose(0, 1) for k in sent.keys),
            sent.values,
            sent.positions,
        )
        said = document(TOKENS)
        for side in ("source", "target"):
            said[side]["kv_dtype"] = "bfloat16"
        asked = TranslateRequest.model_validate(said, strict=False)
        body = translated(client.translate(sent, asked), "body")
        with client.buffers() as buffers:
            outcome = client.translate(strided, asked, buffers=buffers)
            assert_equal(translated(outcome, "buffers").cache, body.cache)
            assert body.cache.dtype == torch.bfloat16

    def test_a_dynamic_cache_does_not_lie_in_the_buffer(self, client: Client) -> None:
        ids = torch.randint(20, 60, (1, TOKENS + 1))
        sides: dict[str, Any] = {"source": SOURCE, "target": TARGET, "prompt_ids": ids}
        with client.buffers() as buffers:
            caches = [
                translate_cache(to_hf(cache(TOKENS, seed=s)), client, buffers=buffers, **sides)
                for s in (0, 1)
            ]
            assert buffers.ready_layers == 4
        for seed, found in enumerate(caches):
            expected = translate_cache(to_hf(cache(TOKENS, seed=seed)), client, **sides)
            assert found is not None
            assert expected is not None
            assert_equal(from_hf(found), from_hf(expected))

    def test_refusals_are_the_bodys(self, client: Client) -> None:
        spoilt = cache(TOKENS)
        spoilt.values[1][3, 0, 0] = float("nan")
        cases = (
            (cache(TOKENS), request(max_kl=1e-6)),
            (spoilt, request()),
            (cache(TOKENS), request(hops=9)),
        )
        with client.buffers() as buffers:
            for sent, asked in cases:
                outcome = client.translate(sent, asked, buffers=buffers)
                assert isinstance(outcome, Reprefill)
                assert outcome == client.translate(sent, asked)
            with pytest.raises(NotTranslated):
                client.translate(*cases[0], buffers=buffers, strict=True)
            with pytest.raises(LayoutError):
                client.translate(cache(TOKENS), request(TOKENS + 1), buffers=buffers)

    @pytest.mark.parametrize("by_buffers", [True, False])
    def test_each_layer_is_told_once_and_in_order(self, client: Client, by_buffers: bool) -> None:
        told: list[tuple[int, KVCache]] = []

        def note(layer: int, keys: Stored, values: Stored) -> None:
            told.append((layer, KVCache((keys.numbers,), (values.numbers,), torch.arange(39))))

        with client.buffers() as buffers:
            pair = buffers if by_buffers else None
            for asked in (request(), request(max_kl=1e-6)):
                outcome = client.translate(cache(TOKENS), asked, buffers=pair, on_layer=note)
        assert isinstance(outcome, Reprefill)
        assert [layer for layer, _ in told] == [0, 1, 2, 3]
        expected = translated(client.translate(cache(TOKENS), request()), "body").cache
        for layer, found in told:
            assert torch.equal(found.keys[0], expected.keys[layer])
            assert torch.equal(found.values[0], expected.values[layer])

    def test_the_asynchronous_client_says_the_same(self, shared: Settings) -> None:
        told: list[int] = []

        def note(layer: int, *_: Stored) -> None:
            told.append(layer)

        async def exchange() -> tuple[Outcome, Outcome, list[str | None]]:
            app = create_app(shared)
            transport = httpx.ASGITransport(app=app)
            async with (
                app.router.lifespan_context(app),
                AsyncClient("http://service", transport=transport) as running,
            ):
                while not app.state.service.store.ready:
                    await asyncio.sleep(0.01)
                body = await running.translate(cache(TOKENS), request(), on_layer=note)
                async with running.buffers() as buffers:
                    found = await running.translate(
                        cache(TOKENS), request(), buffers=buffers, on_layer=note
                    )
                    said = [buffers.why_not]
                async with running.buffers(socket="/nowhere") as buffers:
                    await running.translate(cache(TOKENS), request(), buffers=buffers)
                    said.append(buffers.why_not)
                return body, found, said

        body, found, said = asyncio.run(exchange())
        assert_equal(translated(found, "buffers").cache, translated(body, "body").cache)
        assert said == [None, "not_handed_over"]
        assert told == [0, 1, 2, 3] * 2


class TestThroughTheBodyAfterAll:
    """Whatever keeps buffers from being used, the cache is translated all the same."""

    def check(self, client: Client, why: str | None, **more: Any) -> None:
        body = translated(client.translate(cache(TOKENS), request()), "body")
        with client.buffers(**more) as buffers:
            for _ in range(2):
                outcome = client.translate(cache(TOKENS), request(), buffers=buffers)
                assert_equal(translated(outcome, "body").cache, body.cache)
                assert buffers.why_not == why

    def test_a_service_without_buffers(self, settings: Settings) -> None:
        with TestClient(create_app(settings)) as service:
            while service.get("/startupz").status_code != 200:
                pass
            passing = Passing(service)
            with Client("http://service", transport=passing) as client:
                self.check(client, "buffers_off")
            assert passing.asked.count("POST /buffers") == 1

    def test_another_host(self, client: Client, passing: Passing, tmp_path: Path) -> None:
        self.check(client, "not_handed_over", socket=str(tmp_path / "nowhere"))
        assert passing.asked.count("POST /buffers") == 1
        assert passing.asked.count("DELETE /buffer") == 1  # nothing waits for its time to pass

    def test_another_user(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: object) -> None:
            raise NotHandedOver("wrong_user")

        monkeypatch.setattr(buffer_pair, "fetch", refused)
        self.check(client, "not_handed_over")

    def test_no_budget(self, settings: Settings, tmp_path: Path) -> None:
        small = {"buffers": tmp_path / "s", "buffer_client_bytes": 40_000}
        with TestClient(create_app(settings.model_copy(update=small))) as service:
            while service.get("/startupz").status_code != 200:
                pass
            with Client("http://service", transport=Passing(service)) as client:
                self.check(client, "buffer_budget")

    def test_an_unknown_pair_is_refused_as_ever(self, client: Client) -> None:
        said = document(TOKENS)
        said["target"]["model"] = "unheard-of"
        asked = TranslateRequest.model_validate(said, strict=False)
        with client.buffers() as buffers:
            outcome = client.translate(cache(TOKENS), asked, buffers=buffers)
            assert isinstance(outcome, Reprefill)
            assert (outcome.code, buffers.why_not) == ("pair_not_found", "pair_not_found")


class TestTime:
    def test_leases_that_ended_are_leased_again(
        self, client: Client, service: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        books = service.app.state.service.sharing.buffers  # type: ignore[attr-defined]
        with client.buffers() as buffers:
            body = translated(client.translate(cache(TOKENS), request()), "body")
            for later, transport in ((0.0, "buffers"), (0.0, "body"), (200.0, "buffers")):
                now = time.monotonic() + later
                monkeypatch.setattr(buffer_pair.time, "monotonic", lambda now=now: now)
                outcome = client.translate(cache(TOKENS), request(), buffers=buffers)
                assert_equal(translated(outcome, transport).cache, body.cache)
                service.portal.call(books.close)  # type: ignore[union-attr]

    def test_a_lease_is_renewed_before_it_ends(
        self, client: Client, passing: Passing, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with client.buffers() as buffers:
            translated(client.translate(cache(TOKENS), request(), buffers=buffers), "buffers")
            passing.asked.clear()
            now = time.monotonic() + 151
            monkeypatch.setattr(buffer_pair.time, "monotonic", lambda: now)
            translated(client.translate(cache(TOKENS), request(), buffers=buffers), "buffers")
        assert passing.asked[:3] == ["GET /buffer", "GET /buffer", "POST /translate"]


class TestAnswersThatNobodyMayBelieve:
    @pytest.mark.parametrize(
        "spoil",
        [
            lambda said: said.pop("tensors"),
            lambda said: said.update(tensors={}),
            lambda said: said.update(buffer="0" * 32),
            lambda said: said.update(tokens=40),
            lambda said: said.update(layout="HND"),
            lambda said: said["tensors"].pop("layers.3.v"),
            lambda said: said["tensors"]["layers.0.k"].update(dtype="F64"),
            lambda said: said["tensors"]["layers.0.k"].update(dtype="BF16"),
            lambda said: said["tensors"]["layers.0.k"].update(shape=[39, 4, 4]),
            lambda said: said["tensors"]["layers.0.k"].update(data_offsets=[8, 2504]),
            lambda said: said["tensors"]["layers.3.v"].update(data_offsets=[17472, 1 << 40]),
            lambda said: said["tensors"]["layers.0.k"].update(data_offsets=[-1, 2495]),
        ],
    )
    def test_it_is_not_used(
        self, client: Client, passing: Passing, spoil: Callable[[dict[str, Any]], object]
    ) -> None:
        def changed(answer: httpx.Response) -> httpx.Response:
            if "kvt-decision" not in answer.headers:
                return answer
            said = answer.json()
            spoil(said)
            headers = {k: v for k, v in answer.headers.items() if k != "content-length"}
            return httpx.Response(200, headers=headers, json=said)

        with client.buffers() as buffers:
            translated(client.translate(cache(TOKENS), request(), buffers=buffers), "buffers")
            passing.change = changed
            outcome = client.translate(cache(TOKENS), request(), buffers=buffers)
            assert isinstance(outcome, Reprefill)
            assert outcome.reason == "bad_answer"

    def test_no_status_but_200_is_a_translation(self, client: Client, passing: Passing) -> None:
        def changed(answer: httpx.Response) -> httpx.Response:
            if "kvt-decision" not in answer.headers:
                return answer
            return httpx.Response(503, headers=answer.headers, content=answer.read())

        with client.buffers() as buffers:
            passing.change = changed
            outcome = client.translate(cache(TOKENS), request(), buffers=buffers)
            assert isinstance(outcome, Reprefill)
            assert outcome.reason == "http_503"

    def test_tensors_larger_than_the_buffer(self, client: Client) -> None:
        with client.buffers() as buffers:
            outcome = client.translate(cache(TOKENS), request(), buffers=buffers)
            receipt = translated(outcome, "buffers").receipt
        small = torch.zeros(100, dtype=torch.uint8)
        body = receipt.model_dump_json().encode()
        with pytest.raises(BadAnswer, match="larger"):
            translated_in(small, receipt.buffer, body, {}, request())  # type: ignore[attr-defined]
