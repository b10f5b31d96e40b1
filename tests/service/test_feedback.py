"""What is posted about an answer: as a number, as lists, twice, forged, late, and all at once."""

import json
import math
import random
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from service.client import Client, NotTranslated, Translated
from service.errors import Problem
from service.feedback import Feedback, least_kl
from service.schemas import TranslateRequest
from service.settings import Settings
from service.tail_feedback import read_posted
from tests.service.live import assert_problem
from tests.service.pair import cache, document
from tests.service.reporting import (
    BREAKS,
    KEEPS,
    Clock,
    ask,
    breakers,
    elsewhere,
    post,
    report,
    served,
)

ID = "0" * 32
Distribution = list[float]


def distribution(size: int, rng: random.Random, sharpness: float = 3.0) -> Distribution:
    raw = [math.exp(sharpness * rng.gauss(0, 1)) for _ in range(size)]
    return [value / sum(raw) for value in raw]


def listed(of: Distribution, most: int) -> list[tuple[int, float]]:
    """The ``most`` most likely tokens with their log-probabilities."""
    order = sorted(range(len(of)), key=lambda token: -of[token])[:most]
    return [(token, math.log(of[token])) for token in order]


def kl(p: Distribution, q: Distribution) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


class TestLists:
    @pytest.mark.parametrize("seed", range(20))
    def test_a_bound_from_below_that_grows_with_the_lists(self, seed: int) -> None:
        rng = random.Random(seed)
        p, q = distribution(40, rng), distribution(40, rng)
        bounds = [least_kl([listed(p, k)], [listed(q, k)]) for k in (1, 5, 20, 40)]
        assert all(0 <= bound <= kl(p, q) + 1e-5 for bound in bounds)
        assert bounds[1] <= bounds[2] + 1e-5 <= bounds[3] + 2e-5
        assert bounds[3] == pytest.approx(kl(p, q), abs=1e-4)

    @pytest.mark.parametrize("seed", range(10))
    def test_it_is_the_smallest_that_fits_the_lists(self, seed: int) -> None:
        """Against a search over all native masses of the tokens that only one list names."""
        rng = random.Random(seed)
        p, q = distribution(9, rng), distribution(9, rng)
        ours, theirs = dict(listed(p, 3)), dict(listed(q, 3))
        only = [token for token in theirs if token not in ours]
        left, unlisted = (
            1 - sum(map(math.exp, ours.values())),
            1 - sum(map(math.exp, theirs.values())),
        )
        fixed = sum(math.exp(ours[t]) * (ours[t] - theirs[t]) for t in ours if t in theirs)
        other = sum(math.exp(ours[t]) for t in ours if t not in theirs)
        listed_there = sum(math.exp(theirs[t]) for t in only)

        def total(share: float) -> float:
            mine, rest = share * left, other + (1 - share) * left
            first = mine * math.log(mine / listed_there) if only and mine else 0.0
            return fixed + first + (rest * math.log(rest / unlisted) if rest else 0.0)

        shares = [n / 5000 for n in range(5001)] if only else [0.0]
        found = min(total(share) for share in shares)
        bound = least_kl([list(ours.items())], [list(theirs.items())])
        assert bound == pytest.approx(max(0.0, found), abs=1e-4)

    def test_lists_without_a_common_token_are_far_apart(self) -> None:
        one, two = [(1, math.log(0.9))], [(2, math.log(0.9))]
        expected = 0.1 * math.log(0.1 / 0.9) + 0.9 * math.log(0.9 / 0.1)
        assert least_kl([one], [two]) == pytest.approx(expected)

    def test_equal_lists_are_zero_and_positions_are_averaged(self) -> None:
        one, two = [(1, math.log(0.9))], [(2, math.log(0.9))]
        assert least_kl([one], [one]) == 0
        assert least_kl([one, one], [one, two]) == pytest.approx(least_kl([one], [two]) / 2)

    def test_a_log_probability_that_is_nan_makes_the_kl_nan(self) -> None:
        good, bad = [(1, -0.1)], [(1, math.nan)]
        assert math.isnan(least_kl([bad], [good]))
        assert math.isnan(least_kl([good, good], [good, [(2, math.nan)]]))

    @pytest.mark.parametrize(
        ("native", "translated"),
        [
            ([[(1, -0.1)]], [[(1, -0.1)], [(1, -0.1)]]),
            ([[(1, -0.1), (1, -3.0)]], [[(1, -0.1)]]),
            ([[(1, -0.1), (2, -0.1)]], [[(1, -0.1)]]),
        ],
    )
    def test_lists_that_are_no_distributions(self, native: Any, translated: Any) -> None:
        with pytest.raises(Problem) as caught:
            least_kl(native, translated)
        assert caught.value.code == "bad_document"


class TestDocument:
    @pytest.mark.parametrize(
        ("text", "value"),
        [("0.25", 0.25), ("0", 0), ("-1e-9", 0), ('"Infinity"', math.inf), ("Infinity", math.inf)],
    )
    def test_numbers(self, text: str, value: float) -> None:
        assert read_posted(f'{{"answer_id":"{ID}","kl":{text}}}'.encode()).measured() == value

    @pytest.mark.parametrize("text", ['"NaN"', "NaN"])
    def test_nan_stays_nan(self, text: str) -> None:
        assert math.isnan(read_posted(f'{{"answer_id":"{ID}","kl":{text}}}'.encode()).measured())

    @pytest.mark.parametrize(
        "given",
        [
            {},
            {"kl": -0.1},
            {"kl": True},
            {"kl": "0.1"},
            {"kl": None},
            {"kl": 0.1, "more": 1},
            {"native": [[[1, -1.0]]]},
            {"kl": 0.1, "native": [[[1, -1.0]]], "translated": [[[1, -1.0]]]},
            {"native": [], "translated": []},
            {"native": [[]], "translated": [[]]},
            {"native": [[[1, 0.5]]], "translated": [[[1, -1.0]]]},
            {"native": [[[-1, -0.5]]], "translated": [[[1, -1.0]]]},
            {"native": [[[1, -1.0]]] * 257, "translated": [[[1, -1.0]]] * 257},
        ],
    )
    def test_anything_else_is_refused_without_being_quoted(self, given: dict[str, Any]) -> None:
        with pytest.raises(Problem) as caught:
            read_posted(json.dumps({"answer_id": ID, **given}).encode())
        assert caught.value.code == "bad_document"
        assert "more" not in caught.value.detail

    @pytest.mark.parametrize("answer_id", ["", "0" * 31, "G" * 32, "0" * 33])
    def test_ids_have_our_form(self, answer_id: str) -> None:
        with pytest.raises(Problem):
            read_posted(json.dumps({"answer_id": answer_id, "kl": 0.1}).encode())

    def test_a_client_writes_what_the_service_reads(self) -> None:
        for value in (0.5, math.nan, math.inf):
            text = Feedback(answer_id=ID, kl=value).model_dump_json(exclude_none=True)
            assert repr(read_posted(text.encode()).measured()) == repr(value)


@pytest.fixture
def settings(artifacts: Path, tmp_path: Path) -> Settings:
    return Settings(artifacts=(artifacts,), shadow_rate=1, state=tmp_path / "state.sqlite")


@pytest.fixture
def client(settings: Settings) -> Any:
    with served(settings) as running:
        yield running


class TestService:
    def test_the_same_again_is_the_same_and_another_is_refused(self, client: TestClient) -> None:
        answer = ask(client)
        first = report(client, answer, KEEPS)
        assert (first.status_code, first.json()) == (
            200,
            {
                "answer_id": answer.headers["kvt-answer-id"],
                "kl": KEEPS,
                "lower_bound": False,
                "violation": False,
                "counted": True,
                "breaker": "closed",
            },
        )
        assert report(client, answer, KEEPS).json() == first.json()
        assert_problem(report(client, answer, BREAKS), 409, "feedback_differs")
        assert breakers(client)[0]["samples"] == 1

    @pytest.mark.parametrize(
        ("kl", "violation"),
        [(0.15, False), (0.150001, True), ("NaN", True), ("Infinity", True), (0, False)],
    )
    def test_a_violation_is_what_exceeds_the_threshold_in_force(
        self, client: TestClient, kl: object, violation: bool
    ) -> None:
        said = report(client, ask(client), kl).json()
        assert (said["violation"], said["kl"], said["counted"]) == (violation, kl, True)
        assert breakers(client)[0]["violations"] == violation

    def test_the_threshold_is_the_one_that_the_request_tightened(self, client: TestClient) -> None:
        assert report(client, ask(client, max_kl=0.02), 0.03).json()["violation"] is True

    def test_lists_give_a_bound(self, client: TestClient) -> None:
        answer = ask(client)
        body = {
            "answer_id": answer.headers["kvt-answer-id"],
            "native": [[[1, math.log(0.9)]]] * 32,
            "translated": [[[2, math.log(0.9)]]] * 32,
        }
        said = post(client, body, answer.headers["kvt-feedback-token"]).json()
        assert (said["lower_bound"], said["violation"]) == (True, True)
        assert said["kl"] == pytest.approx(1.7578, abs=1e-3)

    def test_unknown_unsolicited_and_forged(self, client: TestClient, settings: Settings) -> None:
        one, two = ask(client), ask(client)
        body = {"answer_id": one.headers["kvt-answer-id"], "kl": BREAKS}
        assert_problem(post(client, body | {"answer_id": ID}, "x"), 404, "answer_not_found")
        plain = client.get("/livez").headers["x-request-id"]
        assert_problem(post(client, body | {"answer_id": plain}, "x"), 404, "answer_not_found")
        for token in ("", "x", "0" * 64, two.headers["kvt-feedback-token"]):
            assert_problem(post(client, body, token), 403, "wrong_feedback_token")
        assert breakers(client) == []
        assert 'kvt_feedback_total{outcome="wrong_feedback_token",pair="unknown"} 4.0' in (
            client.get("/metrics").text
        )

    def test_an_answer_that_was_not_chosen(self, artifacts: Path) -> None:
        with served(Settings(artifacts=(artifacts,), shadow_rate=0)) as client:
            answer = ask(client)
            body = {"answer_id": answer.headers["kvt-answer-id"], "kl": BREAKS}
            assert_problem(post(client, body, "0" * 64), 404, "answer_not_found")

    def test_too_late(self, artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock(monkeypatch)
        settings = Settings(artifacts=(artifacts,), shadow_rate=1, feedback_seconds=60)
        with served(settings) as client:
            timely, late = ask(client), ask(client)
            report(client, timely, KEEPS)
            clock.now += 61
            assert_problem(report(client, late, KEEPS), 410, "answer_expired")
            assert report(client, timely, KEEPS).status_code == 200
            clock.now += 61
            ask(client)
            assert_problem(report(client, late, KEEPS), 404, "answer_not_found")

    def test_the_bearer_token_where_one_is_set(self, artifacts: Path) -> None:
        secret = "a-token-for-feedback"
        settings = Settings(artifacts=(artifacts,), shadow_rate=1, feedback_token=secret)  # type: ignore[arg-type]
        with served(settings) as client:
            answer = ask(client)
            for bad in ({}, {"Authorization": "Bearer x"}, {"Authorization": secret}):
                assert_problem(report(client, answer, KEEPS, **bad), 401, "unauthorized")
            good = {"Authorization": f"Bearer {secret}"}
            assert report(client, answer, KEEPS, **good).status_code == 200

    def test_bodies_of_another_kind_or_size(self, client: TestClient) -> None:
        answer = client.post("/feedback", content=b"{}", headers={"Content-Type": "text/plain"})
        assert_problem(answer, 415, "unsupported_media_type")
        kind = {"Content-Type": "application/json"}
        assert_problem(client.post("/feedback", content=b"[", headers=kind), 422, "bad_document")
        large = client.post("/feedback", content=b" " * (1 << 20), headers=kind)
        assert_problem(large, 413, "body_too_large")

    def test_many_at_the_same_time_count_once_each(self, client: TestClient) -> None:
        answers = [ask(client) for _ in range(6)]
        with ThreadPoolExecutor(8) as pool:
            said = list(pool.map(lambda n: report(client, answers[n % 6], KEEPS), range(36)))
        assert {answer.status_code for answer in said} == {200}
        assert breakers(client)[0]["samples"] == 6

    def test_of_different_values_at_the_same_time_one_wins(self, client: TestClient) -> None:
        answer = ask(client)
        with ThreadPoolExecutor(8) as pool:
            said = list(pool.map(lambda n: report(client, answer, n / 1000), range(8)))
        assert sorted(answer.status_code for answer in said) == [200] + [409] * 7
        assert breakers(client)[0]["samples"] == 1

    def test_a_flood_of_one_client_among_others_is_not_counted(self, client: TestClient) -> None:
        other = elsewhere(client, "192.0.2.7")
        report(other, ask(other), KEEPS)
        said = [report(client, ask(client), BREAKS).json() for _ in range(20)]
        assert 4 <= sum(answer["counted"] for answer in said) <= 6
        assert said[-1]["breaker"] == "closed"

    def test_no_address_is_written_down(self, client: TestClient, settings: Settings) -> None:
        other = elsewhere(client, "192.0.2.77")
        report(other, ask(other), KEEPS)
        assert settings.state is not None
        folder = settings.state.parent
        assert b"192.0.2.77" not in b"".join(path.read_bytes() for path in folder.iterdir())

    def test_a_file_that_cannot_be_written_stops_no_translation(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answer = ask(client)

        def full(*_: object, **__: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr("service.state_file.StateFile.add", full)
        monkeypatch.setattr("service.state_file.StateFile.settle", full)
        plain = ask(client)
        assert plain.headers["kvt-decision"] == "translate"
        assert "kvt-shadow" not in plain.headers
        refused = report(client, answer, BREAKS)
        assert_problem(refused, 503, "state_unavailable")
        assert breakers(client) == []
        monkeypatch.undo()
        assert report(client, answer, BREAKS).json()["counted"] is True


class TestReporting:
    """The clients of the project; the real transport is a process elsewhere in these tests."""

    def translated(self, running: TestClient) -> tuple[Client, Translated]:
        ours = Client("http://testserver")
        ours._http = running
        outcome = ours.translate(
            cache(32), TranslateRequest.model_validate_json(json.dumps(document(32)))
        )
        assert isinstance(outcome, Translated)
        return ours, outcome

    def test_it_reports(self, client: TestClient) -> None:
        ours, outcome = self.translated(client)
        assert outcome.receipt.shadow is not None
        said = ours.feedback(outcome.receipt, kl=math.nan)
        assert (said.kl, said.violation, said.counted) == ("NaN", True, True)
        assert ours.feedback(outcome.receipt, kl=math.nan) == said
        with pytest.raises(NotTranslated) as caught:
            ours.feedback(outcome.receipt, kl=0.1)
        assert caught.value.outcome.code == "feedback_differs"

    def test_it_reports_lists(self, client: TestClient) -> None:
        ours, outcome = self.translated(client)
        lists = [[(1, -0.1)]] * 3
        said = ours.feedback(outcome.receipt, native=lists, translated=lists)
        assert (said.kl, said.lower_bound) == (0, True)

    def test_what_is_not_asked_for_or_not_a_kl_is_not_sent(self, client: TestClient) -> None:
        ours, outcome = self.translated(client)
        for given in ({}, {"kl": -1.0}, {"native": [[(1, -0.1)]]}):
            with pytest.raises(ValueError, match=r"kl|KL"):
                ours.feedback(outcome.receipt, **given)  # type: ignore[arg-type]
        plain = outcome.receipt.model_copy(update={"shadow": None})
        with pytest.raises(ValueError, match="not to be measured"):
            ours.feedback(plain, kl=0.1)
