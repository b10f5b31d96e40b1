"""What the content gate refuses over HTTP, under which reason, and what it lets through."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from torch import Tensor

from mappers import artifact
from mappers.cache import KVCache
from mappers.evidence import Evidence, EvidenceRow
from mappers.layouts import Layout, write
from mappers.manifest import ManifestFacts
from service.app import create_app
from service.settings import Settings
from tests.bench.corruptions import CORRUPTIONS, Context
from tests.mappers.test_profile import UNSEEN
from tests.mappers.texts import AUTHOR, profile
from tests.service.live import OUTCOME
from tests.service.pair import ROWS, TARGET, Request, claim, document, evidence, mapper

SOURCE = AUTHOR.source.model_copy(update={"tokenizer_digest": TARGET.tokenizer_digest})
TOKENS = 64
IDS = AUTHOR.ids(9000, TOKENS)
OTHER = AUTHOR.cache(AUTHOR.ids(9001, TOKENS))


def publish(root: Path, given: Evidence) -> Path:
    """A mapper from the author's caches, with their profile."""
    made = mapper(SOURCE, TARGET)
    return artifact.publish(root, made, ManifestFacts(ridge=0.01), given, profile=profile())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("profiled"), evidence())


@contextmanager
def serving(folder: Path) -> Iterator[TestClient]:
    settings = Settings(artifacts=(folder,), shadow_rate=0, default_domain="chat")
    with TestClient(create_app(settings), raise_server_exceptions=False) as running:
        while running.get("/startupz").status_code != 200:
            pass
        yield running


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with serving(folder) as running:
        yield running


def ask(client: TestClient, cache: KVCache, **changes: Any) -> httpx.Response:
    """The answer to a request with this cache."""
    said = {"source": claim(SOURCE), "prefix_token_ids": [], **changes}
    request = Request(document(cache.tokens, **said), write(Layout.NHD, cache))
    answer: httpx.Response = client.post(
        "/translate", content=request.body, headers={"Content-Type": "application/vnd.safetensors"}
    )
    return answer


def counted(client: TestClient) -> dict[tuple[str, str], float]:
    """How often each (outcome, reason) was answered."""
    found = OUTCOME.findall(client.get("/metrics").text)
    return {(outcome, reason): float(value) for outcome, _, reason, value in found}


def assert_refused(
    client: TestClient, reasons: set[str], ask: Callable[[], httpx.Response]
) -> None:
    """A re-prefill for one of the reasons, which moves its counter and no other."""
    before, answer = counted(client), ask()
    assert (answer.status_code, answer.headers["kvt-decision"]) == (200, "reprefill")
    reason = answer.headers["kvt-reason"]
    assert reason in reasons
    assert answer.json()["reason"] == reason
    moved = {key for key, value in counted(client).items() if value != before.get(key, 0)}
    assert moved == {("reprefill", reason)}


def assert_translated(answer: httpx.Response) -> None:
    assert (answer.status_code, answer.headers.get("kvt-decision")) == (200, "translate")


def test_good_caches_are_translated(client: TestClient) -> None:
    for seed in range(9100, 9120):
        assert_translated(ask(client, AUTHOR.cache(AUTHOR.ids(seed, TOKENS))))


@pytest.mark.parametrize("name", sorted(CORRUPTIONS.keys() - UNSEEN))
def test_a_spoiled_cache_is_refused(name: str, client: TestClient) -> None:
    context = Context(SOURCE.rope, OTHER, seed=1)
    spoiled = CORRUPTIONS[name](AUTHOR.cache(IDS), context)
    dtype = str(spoiled.dtype).removeprefix("torch.")
    assert_refused(
        client,
        {"implausible_values", "non_finite"},
        lambda: ask(client, spoiled, source=claim(SOURCE, kv_dtype=dtype)),
    )


def sampled(ids: Tensor) -> dict[str, list[int]]:
    """Every fourth token, as a request names it."""
    rows = list(range(0, len(ids), 4))
    return {"rows": rows, "ids": ids[rows].tolist()}


def test_another_texts_cache_is_refused_when_tokens_are_named(client: TestClient) -> None:
    assert_translated(ask(client, AUTHOR.cache(IDS), sample_token_ids=sampled(IDS)))
    assert_translated(ask(client, OTHER))
    assert_refused(
        client,
        {"implausible_values"},
        lambda: ask(client, OTHER, sample_token_ids=sampled(IDS)),
    )


def test_prefix_token_ids_name_tokens_too(client: TestClient) -> None:
    first = IDS[:10].tolist()
    assert_translated(ask(client, AUTHOR.cache(IDS), prefix_token_ids=first))
    assert_refused(
        client, {"implausible_values"}, lambda: ask(client, OTHER, prefix_token_ids=first)
    )


@pytest.mark.parametrize(
    "sample",
    [
        {"rows": [0, 1], "ids": [3]},
        {"rows": [TOKENS], "ids": [3]},
        {"rows": [], "ids": []},
        {"rows": [-1], "ids": [3]},
        {"rows": [0], "ids": [3.5]},
        {"rows": [0]},
    ],
)
def test_a_token_sample_must_fit_the_rows(sample: dict[str, Any], client: TestClient) -> None:
    answer = ask(client, AUTHOR.cache(IDS), sample_token_ids=sample)
    assert answer.status_code == 422
    assert answer.json()["decision"] == "reprefill"


def hopped(rows: Sequence[EvidenceRow], hops: int) -> tuple[EvidenceRow, ...]:
    return tuple(row.model_copy(update={"hops": hops, "score": None}) for row in rows)


def test_a_cache_that_was_translated_before_may_deviate_more_but_not_be_spoiled(
    tmp_path: Path,
) -> None:
    measured = evidence()
    rows = (*measured.rows, *hopped(measured.rows, 1))
    folder = publish(tmp_path, measured.model_copy(update={"rows": rows}))
    good = AUTHOR.cache(IDS)
    spoiled = dataclasses.replace(good, keys=good.values, values=good.keys)
    with serving(folder) as client:
        assert ask(client, good, hops=1).headers["kvt-decision"] == "translate"
        assert_refused(client, {"implausible_values"}, lambda: ask(client, spoiled, hops=1))


def test_less_familiar_than_what_was_measured_is_out_of_distribution(tmp_path: Path) -> None:
    rows = tuple(
        row.model_copy(update={"score": -50.0 - n % ROWS}) for n, row in enumerate(evidence().rows)
    )
    folder = publish(tmp_path, evidence().model_copy(update={"rows": rows}))
    with serving(folder) as client:
        assert_refused(client, {"out_of_distribution"}, lambda: ask(client, AUTHOR.cache(IDS)))


def test_the_stage_is_timed_for_refusals_too(client: TestClient) -> None:
    def times() -> float:
        text = client.get("/metrics").text
        line = next(x for x in text.splitlines() if x.startswith(COUNT))
        return float(line.rpartition(" ")[2])

    ask(client, AUTHOR.cache(IDS))
    before = times()
    ask(client, CORRUPTIONS["layer_zeroed"](AUTHOR.cache(IDS), Context(SOURCE.rope, OTHER)))
    assert times() == before + 1


COUNT = 'kvt_stage_seconds_count{stage="content_gate"}'


def test_a_mapper_without_a_profile_refuses_only_what_is_not_finite(tmp_path: Path) -> None:
    made = mapper(SOURCE, TARGET)
    folder = artifact.publish(tmp_path, made, ManifestFacts(ridge=0.01), evidence())
    with serving(folder) as client:
        swapped = KVCache(OTHER.values, OTHER.keys, OTHER.positions)
        assert_translated(ask(client, swapped))
