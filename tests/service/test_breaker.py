"""The test by betting, the breaker that it moves, and the whole service around it."""

import itertools
import math
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from service.breaker import MAX_CLIENTS, Breaker, Key, Sample, length_bucket
from service.eprocess import EProcess, reserve
from service.policy import Policy
from service.settings import Settings
from service.state_file import Answer, StateError, StateFile
from tests.service.live import Live
from tests.service.reporting import (
    BREAKS,
    KEEPS,
    Clock,
    ask,
    breakers,
    elsewhere,
    outcomes,
    post,
    report,
    served,
    until,
)

EPS, DELTA, CLOSE_DELTA = 0.1, 0.01, 0.05
POLICY = Policy(
    alpha=EPS, breaker_delta=DELTA, breaker_close_delta=CLOSE_DELTA, breaker_cool_down_seconds=60
)
RUNS = 200


def sample(
    violation: bool,
    *,
    client: str = "a",
    shared: bool = False,
    issued: float = 0,
    exact: bool = True,
) -> Sample:
    return Sample(float(violation), violation, exact, client, shared, issued)


def step(breaker: Breaker, given: Sample, now: float = 0.0, policy: Policy = POLICY) -> Breaker:
    return breaker.observe(given, policy, now) if breaker.takes(given, policy, now) else breaker


def opened_after(
    rate: float, samples: int, rng: random.Random, *, good_before: int = 0
) -> int | None:
    """Samples from the change on until the breaker opens; None when it does not."""
    breaker = Breaker.fresh(POLICY)
    for number in range(good_before + samples):
        bad = number >= good_before and rng.random() < rate
        breaker = step(breaker, sample(bad))
        if breaker.opened_seconds is not None:
            return number + 1 - good_before
    return None


def kl(p: float, q: float) -> float:
    """KL(Bernoulli(p) || Bernoulli(q)) in nats."""
    pairs = ((p, q), (1 - p, 1 - q))
    return sum(a * math.log(a / b) for a, b in pairs if a > 0)


class TestEProcess:
    @pytest.mark.parametrize("bound", [0.02, 0.1, 0.9])
    def test_its_mean_over_all_sequences_is_one_at_the_bound(self, bound: float) -> None:
        mean = 0.0
        for outcome in itertools.product((0.0, 1.0), repeat=9):
            process = EProcess(bound)
            for value in outcome:
                process = process.update(value)
            ones = int(sum(outcome))
            mean += bound**ones * (1 - bound) ** (9 - ones) * process.value
        assert mean == pytest.approx(1, abs=1e-12)

    @pytest.mark.parametrize("value", [0.0, 0.05, 0.3, 1.0])
    def test_every_step_is_a_fair_bet_or_a_worse_one(self, value: float) -> None:
        process = EProcess(EPS).update(value).update(0.2)
        up, down = process.update(1.0).value, process.update(0.0).value
        assert EPS * up + (1 - EPS) * down == pytest.approx(process.value, rel=1e-12)
        assert up > process.value > down > 0
        assert process.update(EPS).value == pytest.approx(process.value, rel=1e-12)

    def test_it_starts_at_one_and_takes_nan_as_the_worst(self) -> None:
        assert EProcess(EPS).value == 1
        assert EProcess(EPS).update(math.nan) == EProcess(EPS).update(1.0)
        assert EProcess(EPS).update(7.0) == EProcess(EPS).update(1.0)

    def test_what_is_kept_back_is_never_used_up(self) -> None:
        shares = [reserve(n) for n in range(10_000)]
        assert shares[0] == 1
        assert all(later < earlier for earlier, later in itertools.pairwise(shares))
        assert shares[-1] > 0.05


class TestSimulation:
    def test_a_good_mapper_opens_at_most_delta_of_the_runs(self) -> None:
        rng = random.Random(11)
        opened = sum(opened_after(EPS, 400, rng) is not None for _ in range(RUNS))
        assert opened <= RUNS * DELTA

    @pytest.mark.parametrize("rate", [0.3, 0.5, 1.0])
    def test_a_bad_mapper_opens_as_fast_as_predicted(self, rate: float) -> None:
        rng = random.Random(5)
        counts = [opened_after(rate, 2000, rng) for _ in range(40)]
        predicted = math.log(1 / DELTA) / kl(rate, EPS)
        found = [count for count in counts if count is not None]
        assert len(found) == len(counts)
        # Slack: twice, for stakes that are not known beforehand, and one sample of overshoot.
        assert predicted * 0.8 <= sum(found) / len(found) <= 2 * predicted + 1

    @pytest.mark.parametrize("rate", [0.3, 0.6])
    def test_a_mapper_that_turns_bad_is_found_out(self, rate: float) -> None:
        rng, before = random.Random(7), 300
        counts = [opened_after(rate, 3000, rng, good_before=before) for _ in range(12)]
        found = [count for count in counts if count is not None and count > 0]
        assert len(found) == len(counts)
        # A start that late has 1 / (s ln(s)^2) of the capital, which costs so many nats more.
        nats = math.log(1 / DELTA) + math.log(before) + 2 * math.log(math.log(before))
        assert sum(found) / len(found) <= 1.5 * nats / kl(rate, EPS)


class TestStates:
    def opened(self) -> Breaker:
        breaker = Breaker.fresh(POLICY)
        for _ in range(10):
            breaker = step(breaker, sample(True))
        assert breaker.opened_seconds == 0
        return breaker

    def test_few_violations_open_it_and_time_alone_half_opens_it(self) -> None:
        breaker = self.opened()
        assert breaker.phase(POLICY, 59.9) == "open"
        assert breaker.phase(POLICY, 60.0) == "half_open"
        assert Breaker.fresh(POLICY).phase(POLICY, 1e9) == "closed"

    def test_what_was_answered_before_it_half_opened_does_not_count(self) -> None:
        breaker = self.opened()
        assert not breaker.takes(sample(False, issued=59), POLICY, 30)
        assert not breaker.takes(sample(False, issued=59), POLICY, 61)
        assert breaker.takes(sample(False, issued=61), POLICY, 61)

    def test_enough_good_answers_close_it(self) -> None:
        breaker, needed = self.opened(), 0
        while breaker.opened_seconds is not None:
            breaker = step(breaker, sample(False, issued=61), 61)
            needed += 1
        # No test can know it from fewer than ln(delta) / ln(1 - eps) good ones.
        assert math.log(CLOSE_DELTA) / math.log(1 - EPS) <= needed <= 45
        assert breaker.samples == 0

    def test_a_mapper_that_is_still_bad_seldom_closes_it(self) -> None:
        rng, closed = random.Random(3), 0
        for _ in range(RUNS):
            breaker = self.opened()
            for _ in range(150):
                breaker = step(breaker, sample(rng.random() < EPS, issued=61), 61)
                if breaker.opened_seconds != 0:
                    break
            closed += breaker.opened_seconds is None
        assert closed <= RUNS * CLOSE_DELTA + 3 * math.sqrt(RUNS * CLOSE_DELTA)

    def test_violations_open_it_again_at_once(self) -> None:
        breaker = self.opened()
        for _ in range(10):
            breaker = step(breaker, sample(True, issued=61), 61)
        assert breaker.opened_seconds == 61
        assert breaker.phase(POLICY, 100) == "open"

    def test_a_bound_from_below_never_closes_it(self) -> None:
        breaker = self.opened()
        for _ in range(300):
            breaker = step(breaker, sample(False, issued=61, exact=False), 61)
        assert breaker.phase(POLICY, 61) == "half_open"
        assert breaker.samples == 300

    def test_another_eps_begins_the_tests_anew_and_keeps_the_state(self) -> None:
        breaker = step(self.opened(), sample(True, issued=61), 61)
        assert breaker.under(POLICY) is breaker
        changed = breaker.under(POLICY.changed_by(Policy(breaker_eps=0.2)))
        assert (changed.samples, changed.opened_seconds) == (0, 0)
        assert changed.bad.whole.bound == 0.2

    @pytest.mark.parametrize(("tokens", "bucket"), [(1, 1), (2, 2), (3, 4), (32, 32), (33, 64)])
    def test_length_buckets(self, tokens: int, bucket: int) -> None:
        assert length_bucket(tokens) == bucket


class TestClients:
    """Where others are served as well, nobody decides for all of them."""

    def test_a_flood_of_one_client_opens_nothing(self) -> None:
        rng, breaker = random.Random(1), Breaker.fresh(POLICY)
        for _ in range(400):
            breaker = step(breaker, sample(True, client="loud", shared=True))
            if rng.random() < 0.3:
                breaker = step(breaker, sample(False, client=rng.choice("bcd"), shared=True))
        assert breaker.opened_seconds is None
        assert breaker.bad.whole.value > 1 / DELTA
        assert breaker.recent.count("loud") <= len(breaker.recent) / 2 + 1

    def test_alone_it_opens_and_so_it_does_where_one_is_trusted(self) -> None:
        trusting = POLICY.changed_by(Policy(breaker_quorum=1))
        for shared, policy in ((False, POLICY), (True, trusting)):
            breaker = Breaker.fresh(POLICY)
            for _ in range(5):
                breaker = step(breaker, sample(True, shared=shared), policy=policy)
            assert breaker.opened_seconds == 0

    def test_two_that_agree_open_it(self) -> None:
        breaker = Breaker.fresh(POLICY)
        for _ in range(10):
            for client in "ab":
                breaker = step(breaker, sample(True, client=client, shared=True))
        assert breaker.opened_seconds == 0

    def test_two_that_post_alike_do_not_keep_each_other_out(self) -> None:
        """A breaker that counted no more of either would never see that the mapper turned bad."""
        breaker = Breaker.fresh(POLICY)
        for number in range(400):
            breaker = step(breaker, sample(number >= 200, client="ab"[number % 2], shared=True))
            if breaker.opened_seconds is not None:
                break
        assert 200 < number < 260

    def test_what_a_single_client_left_behind_decides_for_nobody(self) -> None:
        for bad, left in ((True, None), (False, 0)):
            breaker = Breaker.fresh(POLICY, opened_seconds=left)
            for number in range(60):
                gone = number % 2 == 0
                violation = bad if gone else not bad and number % 4 == 1
                given = sample(
                    violation, client="gone" if gone else "stays", shared=True, issued=61
                )
                breaker = step(breaker, given, 61)
            before = breaker.opened_seconds
            after = step(breaker, sample(not bad, client="stays", issued=61), 61)
            assert before == after.opened_seconds == left

    def test_one_that_is_left_decides_for_itself(self) -> None:
        breaker = Breaker.fresh(POLICY)
        for client in "abab":
            breaker = step(breaker, sample(False, client=client, shared=True))
        for _ in range(8):
            breaker = step(breaker, sample(True, client="a"))
        assert breaker.opened_seconds == 0

    def test_two_that_disagree_for_ever_stay_numbers(self, tmp_path: Path) -> None:
        """Evidence that no verdict stops has to be shown, written down and read again."""
        breaker = Breaker.fresh(POLICY)
        for number in range(4000):
            bad = number % 2 == 0
            breaker = step(breaker, sample(bad, client="ab"[number % 2], shared=True))
        assert breaker.opened_seconds is None
        assert 1e100 < breaker.bad.whole.value < math.inf
        file = StateFile(tmp_path / "state.sqlite")
        file.settle("a" * 32, "0.4", KEY, breaker, 2.0)
        file.close()
        again = StateFile(tmp_path / "state.sqlite")
        assert again.breakers() == {KEY: breaker}
        again.close()

    def test_one_client_cannot_hide_what_others_see(self) -> None:
        rng, breaker = random.Random(2), Breaker.fresh(POLICY)
        for _ in range(300):
            for _ in range(10):
                breaker = step(breaker, sample(False, client="quiet", shared=True))
            breaker = step(
                breaker, sample(rng.random() < 0.6, client=rng.choice("bc"), shared=True)
            )
        assert breaker.opened_seconds == 0

    def test_one_client_cannot_close_it(self) -> None:
        breaker = Breaker.fresh(POLICY, opened_seconds=0)
        for number in range(300):
            breaker = step(breaker, sample(False, client="kind", shared=True, issued=61), 61)
            if number % 30 == 0:
                breaker = step(breaker, sample(False, client="b", shared=True, issued=61), 61)
        assert breaker.phase(POLICY, 61) == "half_open"

    def test_the_clients_remembered_are_bounded_and_the_loudest_stays(self) -> None:
        breaker = Breaker.fresh(POLICY)
        for _ in range(4):
            breaker = step(breaker, sample(True, client="loud", shared=True))
        for number in range(3 * MAX_CLIENTS):
            breaker = step(breaker, sample(False, client=f"c{number}", shared=True))
        assert len(breaker.bad.without) == MAX_CLIENTS
        assert "loud" in breaker.bad.without


KEY = Key("m", "sha256:1", "chat", 32)
# Settles one good answer after another, and says so after each.
WRITER = """
import itertools, sys
from pathlib import Path
from service.breaker import Breaker, Key, Sample
from service.policy import Policy
from service.state_file import Answer, StateFile
file, key = StateFile(Path(sys.argv[1])), Key("m", "d", "chat", 32)
policy = Policy()
breaker = Breaker.fresh(policy)
for number in itertools.count(1):
    file.add(Answer(f"{number:032x}", key, "c", 0.05, 0.0), forget=-1.0)
    breaker = breaker.observe(Sample(0.0, False, True, "c", False, 0.0), policy, 0.0)
    file.settle(f"{number:032x}", "0.0", key, breaker, 0.0)
    print(number, flush=True)
"""


class TestStateFile:
    def test_breakers_come_back_bit_for_bit(self, tmp_path: Path) -> None:
        breaker = step(step(Breaker.fresh(POLICY), sample(True)), sample(False, client="b"))
        file = StateFile(tmp_path / "state.sqlite")
        secret = file.secret
        file.add(Answer("a" * 32, KEY, "client", 0.05, 1.0), forget=0)
        file.settle("a" * 32, "0.4", KEY, breaker, 2.0)
        file.close()
        again = StateFile(tmp_path / "state.sqlite")
        assert again.breakers() == {KEY: breaker}
        assert again.answer("a" * 32) == Answer("a" * 32, KEY, "client", 0.05, 1.0, "0.4", 1)
        assert again.served() == [(KEY, "client", 1.0)]
        assert again.secret == secret
        again.close()

    def test_what_was_acknowledged_survives_kill_9(self, tmp_path: Path) -> None:
        path = tmp_path / "state.sqlite"
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        ) as writer:
            assert writer.stdout is not None
            acknowledged = [int(writer.stdout.readline()) for _ in range(40)][-1]
            writer.kill()
            acknowledged = max([acknowledged, *map(int, writer.stdout.read().split())])
        file = StateFile(path)
        [breaker] = file.breakers().values()
        # One more may have been committed that nobody was told of.
        assert breaker.samples in (acknowledged, acknowledged + 1)
        values = [file.answer(f"{n:032x}") for n in range(1, breaker.samples + 1)]
        assert all(answer is not None and answer.counted for answer in values)
        file.close()

    def test_only_its_owner_may_read_it(self, tmp_path: Path) -> None:
        StateFile(tmp_path / "state.sqlite").close()
        assert (tmp_path / "state.sqlite").stat().st_mode & 0o777 == 0o600

    def test_two_processes_do_not_share_it(self, tmp_path: Path) -> None:
        first = StateFile(tmp_path / "state.sqlite")
        with pytest.raises(StateError, match="in use"):
            StateFile(tmp_path / "state.sqlite")
        first.close()

    @pytest.mark.parametrize("content", [b"not a database, but long enough to look like one" * 40])
    def test_a_damaged_file_is_refused_and_left_alone(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "state.sqlite"
        path.write_bytes(content)
        with pytest.raises(StateError, match="damaged, or is none: expected an SQLite database"):
            StateFile(path)
        assert path.read_bytes() == content

    def test_a_file_of_another_version_is_refused(self, tmp_path: Path) -> None:
        db = sqlite3.connect(tmp_path / "state.sqlite")
        db.execute("PRAGMA user_version = 7")
        db.close()
        with pytest.raises(StateError, match="has version 7, expected 1"):
            StateFile(tmp_path / "state.sqlite")

    def test_what_is_no_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(StateError, match="cannot be opened for writing: Is a directory"):
            StateFile(tmp_path)

    def test_a_breaker_of_another_form_is_named(self, tmp_path: Path) -> None:
        StateFile(tmp_path / "state.sqlite").close()
        with sqlite3.connect(tmp_path / "state.sqlite") as db:
            row = ("m", "d", "chat", 32, '{"bad": 3}', 0.0)
            db.execute("INSERT INTO breakers VALUES (?, ?, ?, ?, ?, ?)", row)
        db.close()
        file = StateFile(tmp_path / "state.sqlite")
        with pytest.raises(StateError, match="not of version 1: bad: Input should be"):
            file.breakers()
        file.close()

    def test_old_answers_are_forgotten(self, tmp_path: Path) -> None:
        file = StateFile(None)
        for number in range(5):
            answer = Answer(f"{number:032x}", KEY, "c", 0.05, float(number))
            file.add(answer, forget=number - 2)
        assert [file.answer(f"{n:032x}") is not None for n in range(5)] == [0, 0, 1, 1, 1]
        file.close()


class TestService:
    """Through HTTP, and in a process that is killed."""

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        return Clock(monkeypatch)

    def settings(self, artifacts: Path, **changes: object) -> Settings:
        given = {"artifacts": (artifacts,), "shadow_rate": 1, "breaker_cool_down_seconds": 60}
        return Settings(**(given | changes))  # type: ignore[arg-type]

    def test_it_opens_probes_and_closes(self, artifacts: Path, clock: Clock) -> None:
        with served(self.settings(artifacts)) as client:
            assert until(client, "open", BREAKS, most=10) <= 5
            assert breakers(client)[0]["state"] == "open"
            before = outcomes(client)
            refused = ask(client)
            assert (refused.headers["kvt-reason"], refused.json()["decision"]) == (
                "breaker_open",
                "reprefill",
            )
            after = outcomes(client)
            assert after == before | {("reprefill", "breaker_open"): 1}
            clock.now += 61
            assert 'kvt_breaker_state{domain="any"' in client.get("/metrics").text
            assert until(client, "closed", KEEPS, most=60) >= 29
            assert breakers(client)[0] | {"e_value": 1} == {
                "domain": "any",
                "max_tokens": 32,
                "state": "closed",
                "e_value": 1,
                "close_e_value": 1,
                "samples": 0,
                "violations": 0,
                "clients": 0,
                "opened_seconds_ago": None,
            }

    def test_opening_closing_and_each_report_are_logged(
        self, artifacts: Path, clock: Clock
    ) -> None:
        with served(self.settings(artifacts)) as client, capture_logs() as lines:
            opened = until(client, "open", BREAKS, most=10)
            clock.now += 61
            closed = until(client, "closed", KEEPS, most=60)
            post(client, {"answer_id": "0" * 32, "kl": 0.1}, "")
        moves = [line for line in lines if line["event"].startswith("breaker")]
        [mapper] = [path.name for path in artifacts.iterdir()]
        key = {"id": mapper, "domain": "any", "max_tokens": 32}
        assert [line | {"violations": 0} for line in moves] == [
            {"event": "breaker opened", "log_level": "warning", "samples": opened} | key
            | {"violations": 0},
            {"event": "breaker closed", "log_level": "info", "samples": closed} | key
            | {"violations": 0},
        ]  # fmt: skip
        assert moves[0]["violations"] == opened
        reports = [line for line in lines if line.get("path") == "/feedback"]
        assert len(reports) == opened + closed + 1
        said = ("pair", "outcome", "kl", "breaker")
        assert [reports[opened - 1][name] for name in said] == [mapper, "violation", BREAKS, "open"]
        assert (reports[-1]["outcome"], reports[-1]["reason"]) == ("refused", "answer_not_found")

    def test_half_open_serves_so_many_probes_and_all_are_to_be_measured(
        self, artifacts: Path, clock: Clock
    ) -> None:
        settings = self.settings(artifacts, breaker_probes=3)
        with served(settings) as client:
            until(client, "open", BREAKS, most=10)
            clock.now += 61
            probes = [ask(client) for _ in range(3)]
            assert {probe.headers["kvt-shadow"] for probe in probes} == {"requested"}
            assert ask(client).headers["kvt-reason"] == "breaker_open"
            report(client, probes[0], KEEPS)
            assert ask(client).headers["kvt-decision"] == "translate"
            assert ask(client).headers["kvt-reason"] == "breaker_open"

    def test_a_client_that_never_reports_keeps_nobody_from_probing(
        self, artifacts: Path, clock: Clock
    ) -> None:
        settings = self.settings(artifacts, breaker_probes=4)
        with served(settings) as client:
            until(client, "open", BREAKS, most=10)
            other = elsewhere(client, "192.0.2.7")
            clock.now += 61
            taken = [ask(client).headers["kvt-decision"] for _ in range(5)]
            assert taken == ["translate"] * 4 + ["reprefill"], "alone it may have all places"
            probes = [ask(other) for _ in range(3)]
            found = [probe.headers["kvt-decision"] for probe in probes]
            assert found == ["translate"] * 2 + ["reprefill"], "a newcomer has its half"
            report(other, probes[0], KEEPS)
            assert ask(client).headers["kvt-reason"] == "breaker_open"
            assert ask(other).headers["kvt-decision"] == "translate"

    def test_a_request_that_was_queued_when_it_opened_is_not_answered(
        self, artifacts: Path
    ) -> None:
        with served(self.settings(artifacts)) as client, ThreadPoolExecutor(2) as threads:
            answers = [ask(client) for _ in range(10)]
            worker = client.app.state.service.worker
            release = threading.Event()
            busy = threads.submit(worker.on_device, release.wait)
            queued = threads.submit(ask, client)
            while "kvt_queue_depth 1.0" not in client.get("/metrics").text:
                pass
            opened = [report(client, answer, BREAKS).json()["breaker"] for answer in answers]
            release.set()
            assert busy.result()
            assert opened[-1] == "open"
            refused = queued.result()
            assert refused.headers["kvt-reason"] == "breaker_open"
            assert refused.json()["decision"] == "reprefill"
            assert outcomes(client)["reprefill", "breaker_open"] == 1
            assert worker.in_flight == worker.in_flight_bytes == 0

    def test_other_lengths_and_domains_are_served_meanwhile(self, artifacts: Path) -> None:
        with served(self.settings(artifacts)) as client:
            until(client, "open", BREAKS, most=10)
            assert ask(client, tokens=64).headers["kvt-decision"] == "translate"
            assert ask(client, domain="chat").headers["kvt-decision"] == "translate"
            assert ask(client).headers["kvt-reason"] == "breaker_open"

    def test_one_of_two_clients_does_not_open_it_for_both(self, artifacts: Path) -> None:
        with served(self.settings(artifacts)) as client:
            other = elsewhere(client, "192.0.2.7")
            ask(other)
            for _ in range(12):
                report(client, ask(client), BREAKS)
            assert ask(other).headers["kvt-decision"] == "translate"
            assert breakers(client)[0]["state"] == "closed"
            for _ in range(6):
                answer = ask(other)
                if "kvt-reason" in answer.headers:
                    break
                report(other, answer, BREAKS)
            assert ask(client).headers["kvt-reason"] == "breaker_open"

    def test_an_open_breaker_survives_kill_9(self, artifacts: Path, tmp_path: Path) -> None:
        settings = self.settings(
            artifacts, state=tmp_path / "state.sqlite", breaker_cool_down_seconds=3600
        ).model_dump_json(exclude_defaults=True)
        first = Live(settings, tmp_path / "first.log")
        answer = ask(first.client)
        assert report(first.client, answer, BREAKS).json()["counted"] is True
        until(first.client, "open", BREAKS, most=10)
        first.stop(signal.SIGKILL)
        second = Live(settings, tmp_path / "second.log")
        assert ask(second.client).headers["kvt-reason"] == "breaker_open"
        assert breakers(second.client)[0]["state"] == "open"
        assert report(second.client, answer, BREAKS).json()["counted"] is True
        assert report(second.client, answer, KEEPS).status_code == 409
        second.stop()
