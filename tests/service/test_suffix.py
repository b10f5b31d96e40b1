"""The suffix probe over HTTP: a likelihood comes in, and what to do goes out."""

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from mappers import artifact
from mappers.evidence import Evidence
from mappers.manifest import ManifestFacts
from mappers.suffix import SuffixCheck
from service.client import AsyncClient, Client, Translated
from service.schemas import TranslateRequest
from service.settings import Settings
from service.shadow import Shadow
from service.suffixes import ANSWERS_AT_MOST, Suffixes
from tests.service.live import SAFETENSORS, assert_problem
from tests.service.pair import cache, document, evidence, good, mapper
from tests.service.reporting import Clock, breakers, post, served

# Of the documents in order: the target's NLL is half of the source's and 1, and up to 0.1 more.
MORE = 0.1


def with_likelihoods() -> Evidence:
    """The tiny pair's evidence, with what both models found of the native tails."""
    given = evidence()
    rows = []
    for place, row in enumerate(given.rows):
        source = 2 + place % 7 / 10
        tail_nll = 1 + source / 2 + MORE * (place % 11) / 10
        likely = {"tail_nll": tail_nll, "source_tail_nll": source}
        rows.append(row.model_copy(update=likely if row.native_tail else {}))
    return given.model_copy(update={"rows": tuple(rows)})


@pytest.fixture(scope="module")
def judging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("judging")
    artifact.publish(root, mapper(), ManifestFacts(ridge=0.01), with_likelihoods())
    return root


@pytest.fixture
def client(judging: Path) -> Iterator[TestClient]:
    with served(Settings(artifacts=(judging,), shadow_rate=0)) as running:
        yield running


def ask(client: httpx.Client, **changes: Any) -> httpx.Response:
    """An answer with a tail of 32, which can be judged."""
    request = good(64, max_kl=0.005, domain="chat", **changes)
    answer = client.post("/translate", content=request.body, headers=SAFETENSORS)
    assert answer.headers["kvt-native-tail"] == "32"
    return answer


def judged(client: httpx.Client, answer: httpx.Response, **nlls: Any) -> httpx.Response:
    body = {"answer_id": answer.headers["kvt-answer-id"], **nlls}
    return post(client, body, answer.headers["kvt-feedback-token"])


def counted(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    found = [line.split() for line in lines if line.startswith("kvt_suffix_total")]
    return {name.split('"')[1]: float(value) for name, value in found}


def test_a_likely_tail_is_kept_and_an_unlikely_one_is_not(client: TestClient) -> None:
    answer = ask(client)
    assert answer.headers["kvt-suffix"] == "accepted"
    assert "kvt-shadow" not in answer.headers
    kept = judged(client, answer, tail_nll=2.0, source_tail_nll=2.0).json()
    assert kept["answer_id"] == answer.headers["kvt-answer-id"]
    suffix = kept["suffix"]
    assert suffix["decision"] == "keep"
    assert suffix["expected_nll"] == pytest.approx(2.0 + MORE / 2, abs=MORE / 4)
    assert 2.0 + MORE / 2 < suffix["limit"] < 2.0 + 2 * MORE
    sent_back = judged(client, ask(client), tail_nll=2.3, source_tail_nll=2.0).json()["suffix"]
    assert sent_back == {**suffix, "decision": "reprefill"}
    assert counted(client) == {"keep": 1, "reprefill": 1}


def test_without_the_sources_likelihood_the_tail_is_judged_by_itself(client: TestClient) -> None:
    found = judged(client, ask(client), tail_nll=2.3).json()["suffix"]
    assert (found["decision"], found["expected_nll"]) == ("keep", None)
    assert judged(client, ask(client), tail_nll=9.0).json()["suffix"]["decision"] == "reprefill"


@pytest.mark.parametrize("nll", ["NaN", "Infinity"])
def test_what_is_no_number_is_sent_back(client: TestClient, nll: str) -> None:
    answer = ask(client)
    for _ in range(2):
        found = judged(client, answer, tail_nll=nll).json()["suffix"]
        assert found["decision"] == "reprefill"
    found = judged(client, ask(client), tail_nll=2.0, source_tail_nll=nll).json()["suffix"]
    assert (found["decision"], found["expected_nll"]) == ("reprefill", None)


def test_the_same_again_gives_the_same_and_counts_once(client: TestClient) -> None:
    answer = ask(client)
    first, second = (judged(client, answer, tail_nll=2.0).json() for _ in range(2))
    assert first == second
    assert counted(client) == {"keep": 1}
    for other in ({"tail_nll": 2.1}, {"tail_nll": 2.0, "source_tail_nll": 2.0}):
        assert_problem(judged(client, answer, **other), 409, "feedback_differs")


def test_no_breaker_hears_of_it(client: TestClient) -> None:
    for _ in range(40):
        judged(client, ask(client), tail_nll=50.0)
    assert breakers(client) == []
    assert ask(client).headers["kvt-decision"] == "translate"


def test_only_who_was_given_the_answer_can_ask(client: TestClient) -> None:
    one, two = ask(client), ask(client)
    body = {"answer_id": one.headers["kvt-answer-id"], "tail_nll": 2.0}
    for token in ("", "0" * 64, two.headers["kvt-feedback-token"]):
        assert_problem(post(client, body, token), 403, "wrong_feedback_token")
    unknown = {"answer_id": "0" * 32, "tail_nll": 2.0}
    token = one.headers["kvt-feedback-token"]
    assert_problem(post(client, unknown, token), 404, "answer_not_found")
    assert counted(client) == {}


@pytest.mark.parametrize(
    "nlls",
    [
        {},
        {"source_tail_nll": 2.0},
        {"tail_nll": -1.0},
        {"tail_nll": "2.0"},
        {"tail_nll": None},
        {"tail_nll": 2.0, "kl": 0.1},
        {"tail_nll": 2.0, "more": 1},
    ],
)
def test_bad_posts(client: TestClient, nlls: dict[str, Any]) -> None:
    assert_problem(judged(client, ask(client), **nlls), 422, "bad_document")


def test_an_answer_that_nothing_can_judge_has_no_token(client: TestClient) -> None:
    body = good(64, domain="chat").body
    answer = client.post("/translate", content=body, headers=SAFETENSORS)
    assert answer.headers["kvt-native-tail"] == "1"
    assert not {"kvt-suffix", "kvt-feedback-token"} & answer.headers.keys()


def test_a_shadowed_answer_has_one_token_for_both(judging: Path) -> None:
    with served(Settings(artifacts=(judging,), shadow_rate=1)) as running:
        answer = ask(running)
        assert answer.headers["kvt-shadow"] == "requested"
        assert judged(running, answer, tail_nll=2.0).json()["suffix"]["decision"] == "keep"
        assert judged(running, answer, kl=0.001).json()["violation"] is False
        assert judged(running, answer, tail_nll=2.0).json()["suffix"]["decision"] == "keep"


def test_where_no_domain_is_named_the_worst_of_all_decides(tmp_path: Path) -> None:
    given = with_likelihoods()
    strict = [
        row.model_copy(update={"domain": "prose", "tail_nll": (row.tail_nll or 0) - 0.5})
        for row in given.rows
    ]
    both = given.model_copy(update={"rows": (*given.rows, *strict)})
    artifact.publish(tmp_path, mapper(), ManifestFacts(ridge=0.01), both)
    with served(Settings(artifacts=(tmp_path,), shadow_rate=0)) as running:
        chat = ask(running)
        body = good(64, max_kl=0.005).body
        unnamed = running.post("/translate", content=body, headers=SAFETENSORS)
        said = {"tail_nll": 2.0, "source_tail_nll": 2.0}
        assert judged(running, chat, **said).json()["suffix"]["decision"] == "keep"
        assert judged(running, unnamed, **said).json()["suffix"]["decision"] == "reprefill"


def test_answers_are_forgotten_in_time(judging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    settings = Settings(artifacts=(judging,), shadow_rate=0, feedback_seconds=60)
    with served(settings) as running:
        answer = ask(running)
        clock.now += 61
        assert_problem(judged(running, answer, tail_nll=2.0), 404, "answer_not_found")


def test_the_book_is_bounded_in_number_and_age() -> None:
    book, checks = Suffixes(Shadow(b"secret"), seconds=60), (SuffixCheck(0, 1, 0.1, 3.0),)
    for number in range(ANSWERS_AT_MOST + 10):
        assert book.give(f"{number:032x}", "m", checks, now=0.0)
    assert len(book) == ANSWERS_AT_MOST
    assert book.give("f" * 32, "m", checks, now=61.0)
    assert len(book) == 1
    assert book.give("e" * 32, "m", (), now=61.0) is None


class TestClients:
    """Both ask in one call, with the answer in hand."""

    def request(self, **changes: Any) -> TranslateRequest:
        said = document(64, domain="chat", **{"max_kl": 0.005, **changes})
        return TranslateRequest.model_validate(said, strict=False)

    def test_the_asynchronous_client(self, client: TestClient) -> None:
        async def exchange() -> Any:
            transport = httpx.ASGITransport(app=client.app)
            async with AsyncClient("http://service", transport=transport) as running:
                answer = await running.translate(cache(64), self.request())
                assert isinstance(answer, Translated)
                return await running.suffix(answer, tail_nll=2.0, source_tail_nll=2.0)

        assert asyncio.run(exchange()).decision == "keep"

    def test_the_blocking_client(self, client: TestClient) -> None:
        def forward(request: httpx.Request) -> httpx.Response:
            answer = client.post(
                request.url.path, content=request.read(), headers=dict(request.headers)
            )
            return httpx.Response(200, headers=dict(answer.headers), content=answer.content)

        with Client("http://service", transport=httpx.MockTransport(forward)) as running:
            answer = running.translate(cache(64), self.request())
            assert isinstance(answer, Translated)
            found = running.suffix(answer, tail_nll=math.nan)
            assert (found.decision, found.expected_nll) == ("reprefill", None)
            short = running.translate(cache(64), self.request(max_kl=0.15))
            assert isinstance(short, Translated)
            with pytest.raises(ValueError, match="judged"):
                running.suffix(short, tail_nll=2.0)


def test_the_interface_is_documented(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    said = schema["paths"]["/feedback"]["post"]
    assert "TailFeedback" in json.dumps(said["requestBody"])
    assert "SuffixReceipt" in json.dumps(said["responses"]["200"])
    assert "Probe" in schema["components"]["schemas"]
