"""Jobs that wait in a folder (``tests/sglang`` has SGLang ask for them)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.bridge.carry import Job
from service.bridge.inbox import Inbox
from service.bridge.pages import page_hashes
from service.client import Client
from service.hf import claim_of
from service.settings import Settings
from service.vllm.params import salt
from tests.service.pair import PREFIX_IDS, SOURCE, TARGET
from tests.service.threaded import Running, serving

PAGE = 16
CLAIMS = claim_of(SOURCE), claim_of(TARGET)
JOB = Job(token_ids=(*PREFIX_IDS, *range(100, 162)), session="s1", max_kl=0.05)


@pytest.fixture(scope="module")
def running(artifacts: Path) -> Iterator[Running]:
    with serving(Settings(artifacts=(artifacts,), shadow_rate=0)) as found:
        yield found


def test_a_job_is_taken_once_by_its_last_page_under_the_plans_salt(
    running: Running, tmp_path: Path
) -> None:
    inbox, digest = Inbox(tmp_path, PAGE), running.service.store.entries[0].digest
    with Client(running.url) as client:
        promised = inbox.drop(client, CLAIMS, JOB)
        assert inbox.drop(client, CLAIMS, JOB) == promised  # it takes the place of the first
    under = salt(digest, 1, "s1")
    assert (promised.decision, promised.cache_salt, promised.hops) == ("translate", under, 1)
    assert promised.tokens == 48
    pages = page_hashes(JOB.token_ids, under, PAGE)
    assert len(pages) == 4
    assert [path.name for path in tmp_path.iterdir()] == [f"{pages[2]}.json"]
    for others in (page_hashes(JOB.token_ids, "", PAGE), pages[:2], pages[3:]):
        assert inbox.take(others) is None
    assert inbox.take(pages) == JOB
    assert inbox.take(pages) is None


def test_the_longest_job_is_taken_first(running: Running, tmp_path: Path) -> None:
    inbox, shorter = Inbox(tmp_path, PAGE), JOB.model_copy(update={"token_ids": JOB.token_ids[:48]})
    with Client(running.url) as client:
        under = {inbox.drop(client, CLAIMS, job).cache_salt for job in (JOB, shorter)}
    pages = page_hashes(JOB.token_ids, under.pop() or "", PAGE)
    assert [inbox.take(pages), inbox.take(pages), inbox.take(pages)] == [JOB, shorter, None]


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (Job(token_ids=tuple(range(PAGE - 1))), "less_than_a_chunk"),
        (Job(token_ids=tuple(range(PAGE))), "less_than_a_chunk"),  # but for its native tail
        (JOB.model_copy(update={"hops": 1}), "drift_budget_exhausted"),
        (JOB.model_copy(update={"source_salt": "kvt-sha256:00"}), "unknown_hops"),
        (JOB.model_copy(update={"max_kl": 1e-9}), "certified_kl_exceeds_threshold"),
    ],
)
def test_no_job_waits_for_what_will_not_be_translated(
    running: Running, tmp_path: Path, job: Job, reason: str
) -> None:
    with Client(running.url) as client:
        answer = Inbox(tmp_path, PAGE).drop(client, CLAIMS, job)
    assert (answer.decision, answer.reason) == ("reprefill", reason)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_reached_or_written(running: Running, tmp_path: Path) -> None:
    with Client("http://127.0.0.1:1") as client:
        assert Inbox(tmp_path, PAGE).drop(client, CLAIMS, JOB).reason == "not_translated"
    nowhere = Inbox(tmp_path / "none", PAGE)
    with Client(running.url) as client:
        assert nowhere.drop(client, CLAIMS, JOB).reason == "pages_error"
    assert nowhere.take(["00"]) is None
