"""Drift: hops, and the certified KLs of a conversation against the pair's budget."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from service.sessions import Sessions
from service.settings import Settings
from tests.service.live import SAFETENSORS
from tests.service.pair import KLS, good, publish
from tests.service.reporting import ask, outcomes, served

A, B, C = b"a", b"b", b"c"
COST = KLS[True, 1]
REFUSED = "drift_budget_exhausted"


class TestSessions:
    def sessions(self, *, most: int = 10) -> Sessions:
        return Sessions(most=most, idle_seconds=100)

    def test_charges_add_up_and_refunds_take_back(self) -> None:
        sessions = self.sessions()
        for _ in range(3):
            sessions.charge(A, 0.25, now=0)
        sessions.charge(B, 1.0, now=0)
        sessions.refund(A, 0.25)
        assert (sessions.spent(A, 1), sessions.spent(B, 1), sessions.spent(C, 1)) == (0.5, 1.0, 0)
        sessions.refund(A, 9)
        sessions.refund(C, 9)
        assert (sessions.spent(A, 1), sessions.spent(C, 1)) == (0, 0)

    def test_an_idle_session_begins_anew(self) -> None:
        sessions = self.sessions()
        sessions.charge(A, 1.0, now=0)
        sessions.charge(A, 1.0, now=100)
        assert sessions.spent(A, 200) == 2.0
        assert sessions.spent(A, 201) == 0
        sessions.charge(A, 1.0, now=500)
        assert sessions.spent(A, 500) == 1.0

    def test_the_longest_unused_is_forgotten_first(self) -> None:
        sessions = self.sessions(most=2)
        for now, name in enumerate((A, B, A, C)):
            sessions.charge(name, 1.0, now=now)
        assert len(sessions) == 2
        assert [sessions.spent(name, 4) for name in (A, B, C)] == [2.0, 0, 1.0]

    def test_idle_ones_do_not_pile_up(self) -> None:
        sessions = self.sessions(most=1000)
        for number in range(500):
            sessions.charge(str(number).encode(), 1.0, now=10.0 * number)
        assert len(sessions) <= 11


class TestService:
    def settings(self, artifacts: Path, **changes: object) -> Settings:
        given = {"artifacts": (artifacts,), "shadow_rate": 0, "drift_budget": 3.5 * COST}
        return Settings(**(given | changes))  # type: ignore[arg-type]

    def test_a_session_ends_when_its_budget_does(self, artifacts: Path) -> None:
        with served(self.settings(artifacts)) as client:
            for _ in range(3):
                assert ask(client, session_id="s").headers["kvt-decision"] == "translate"
            before = outcomes(client)
            answer = ask(client, session_id="s")
            assert (answer.status_code, answer.headers["kvt-reason"]) == (200, REFUSED)
            assert outcomes(client) == before | {("reprefill", REFUSED): 1}
            plan = client.post("/translate/plan", json=good(session_id="s").document).json()
            assert (plan["decision"], plan["reason"]) == ("reprefill", REFUSED)
            assert ask(client, session_id="t").headers["kvt-decision"] == "translate"
            assert ask(client).headers["kvt-decision"] == "translate"

    def test_a_plan_costs_nothing(self, artifacts: Path) -> None:
        with served(self.settings(artifacts)) as client:
            for _ in range(6):
                plan = client.post("/translate/plan", json=good(session_id="s").document).json()
                assert plan["decision"] == "translate"

    def test_an_answer_that_was_not_given_costs_nothing(self, artifacts: Path) -> None:
        bad = good(session_id="s")
        bad.tensors["layers.0.k"][3, 0, 0] = torch.nan
        with served(self.settings(artifacts)) as client:
            for _ in range(5):
                answer = client.post("/translate", content=bad.body, headers=SAFETENSORS)
                assert answer.headers["kvt-reason"] == "non_finite"
                cut = client.post("/translate", content=bad.body[:-1], headers=SAFETENSORS)
                assert cut.status_code == 400
            assert ask(client, session_id="s").headers["kvt-decision"] == "translate"

    def test_requests_at_the_same_time_share_one_budget(self, artifacts: Path) -> None:
        with served(self.settings(artifacts)) as client, ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: ask(client, session_id="s"), range(6)))
        decisions = [answer.headers["kvt-decision"] for answer in answers]
        assert decisions.count("translate") == 3

    def test_more_hops_than_were_measured(self, artifacts: Path) -> None:
        with served(self.settings(artifacts, drift_budget=None)) as client:
            assert ask(client, hops=1).headers["kvt-reason"] == REFUSED

    def test_hops_that_no_session_explains_cost_as_much_each(self, tmp_path: Path) -> None:
        publish(tmp_path, proven=False)
        settings = self.settings(tmp_path, allow_unproven=True, max_kl=COST)
        with served(settings) as client:
            for hops, expected in ((0, None), (2, None), (3, REFUSED), (60, REFUSED)):
                assert ask(client, hops=hops).headers.get("kvt-reason") == expected

    def test_without_a_budget_only_the_evidence_speaks(self, artifacts: Path) -> None:
        with served(self.settings(artifacts, drift_budget=None)) as client:
            for _ in range(6):
                assert ask(client, session_id="s").headers["kvt-decision"] == "translate"

    @pytest.mark.parametrize("bad", ["", "x" * 257, 7, ["s"]])
    def test_a_bad_session_id_is_refused(self, artifacts: Path, bad: object) -> None:
        with served(self.settings(artifacts)) as client:
            answer = ask(client, session_id=bad)
        assert (answer.status_code, answer.json()["code"]) == (422, "bad_document")

    def test_the_id_is_not_kept(self, artifacts: Path, tmp_path: Path) -> None:
        settings = self.settings(artifacts, state=tmp_path / "state.sqlite", shadow_rate=1)
        with served(settings) as client:
            ask(client, session_id="very-private-conversation")
            kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
            assert len(kept) > 4096
            sessions = client.app.state.service.guards.sessions  # type: ignore[attr-defined]
            assert len(sessions) == 1
            assert b"very-private" not in b"".join(sessions._accounts) + kept
