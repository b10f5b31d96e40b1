"""The breaker of a pair whose mean KL is certified: it bets on the cut KL, not on violations."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from service.breaker import Breaker, Sample
from service.loss import loss_of, tolerated, violates
from service.policy import Policy
from service.settings import Settings
from tests.service.reporting import ask, breakers, post, report, served, until

MEAN = Policy(
    risk="mean", max_kl=0.1, kl_clip=1.0, breaker_delta=0.01, breaker_cool_down_seconds=60
)
SHARE = MEAN.changed_by(Policy(risk="exceedance", alpha=0.1))
RUNS = 200
Draw = Callable[[random.Random], float]


def observed(breaker: Breaker, kl: float, policy: Policy = MEAN, *, exact: bool = True) -> Breaker:
    given = Sample(loss_of(kl, policy.max_kl, policy), violates(kl, policy.max_kl), exact, "a",
                   shared=False, issued_seconds=61)  # fmt: skip
    return breaker.observe(given, policy, 61) if breaker.takes(given, policy, 61) else breaker


def opened_after(draw: Draw, samples: int, rng: random.Random, policy: Policy) -> int | None:
    breaker = Breaker.fresh(policy)
    for number in range(1, samples + 1):
        breaker = observed(breaker, draw(rng), policy)
        if breaker.opened_seconds is not None:
            return number
    return None


class TestLoss:
    @pytest.mark.parametrize(
        ("kl", "loss"), [(0, 0), (0.1, 0.1), (0.999, 0.999), (1, 1), (7, 1), (math.inf, 1)]
    )
    def test_of_the_mean_it_is_the_cut_kl(self, kl: float, loss: float) -> None:
        assert loss_of(kl, 0.1, MEAN) == pytest.approx(loss)

    def test_nan_is_the_worst(self) -> None:
        assert loss_of(math.nan, 0.1, MEAN) == loss_of(math.nan, 0.1, SHARE) == 1

    def test_of_the_share_it_is_a_violation_or_none(self) -> None:
        assert [loss_of(kl, 0.1, SHARE) for kl in (0.1, 0.1001, 9)] == [0, 1, 1]

    def test_a_tightened_threshold_counts_in_shares_of_itself(self) -> None:
        assert loss_of(0.02, 0.05, MEAN) == pytest.approx(0.04)
        # What a mapper that keeps the tightened promise loses is tolerable.
        kls = [0.0, 0.0, 0.0, 0.2]
        mean = sum(loss_of(kl, 0.05, MEAN) for kl in kls) / len(kls)
        assert sum(kls) / len(kls) == 0.05
        assert mean <= tolerated(MEAN)

    def test_what_is_tolerated(self) -> None:
        assert tolerated(MEAN) == pytest.approx(0.1)
        assert tolerated(MEAN.changed_by(Policy(kl_clip=0.5))) == pytest.approx(0.2)
        assert tolerated(SHARE) == SHARE.eps


def at_the_threshold(rng: random.Random) -> float:
    """Mean exactly 0.1, nothing cut; a fifth of the KLs are far above the threshold."""
    return 0.35 if rng.random() < 0.2 else 0.0375


def rare_but_large(rng: random.Random) -> float:
    """A fifth violates, by far: the mean is above 0.2."""
    return 4.0 if rng.random() < 0.2 else 0.02


class TestSimulation:
    @pytest.mark.parametrize(
        "draw", [at_the_threshold, lambda rng: 1.0 if rng.random() < 0.1 else 0.0, lambda _: 0.1]
    )
    def test_a_mean_at_the_threshold_opens_at_most_delta_of_the_runs(self, draw: Draw) -> None:
        rng, delta = random.Random(4), MEAN.breaker_delta
        opened = sum(opened_after(draw, 300, rng, MEAN) is not None for _ in range(RUNS))
        assert opened <= RUNS * delta + 3 * math.sqrt(RUNS * delta * (1 - delta))

    def test_a_larger_mean_opens_it_although_few_violate(self) -> None:
        uniform: Draw = lambda rng: rng.uniform(0.1, 0.5)  # noqa: E731
        for draw, most in ((uniform, 60), (lambda _: 0.4, 40)):
            rng = random.Random(6)
            counts = [opened_after(draw, most, rng, MEAN) for _ in range(20)]
            assert None not in counts

    def test_either_risk_sees_what_the_other_does_not(self) -> None:
        """A tolerated share of KLs that are large, and nothing but KLs that are just too large."""
        lenient = SHARE.changed_by(Policy(alpha=0.3))
        assert opened_after(rare_but_large, 500, random.Random(8), MEAN) is not None
        assert opened_after(rare_but_large, 500, random.Random(8), lenient) is None
        assert opened_after(lambda _: 0.101, 10, random.Random(8), SHARE) is not None
        assert opened_after(lambda _: 0.101, 500, random.Random(8), MEAN) is None


class TestStates:
    def half_open(self) -> Breaker:
        return Breaker.fresh(MEAN, opened_seconds=0)

    def test_good_answers_close_it_and_poor_ones_do_not(self) -> None:
        good, poor = self.half_open(), self.half_open()
        count = 0
        while good.opened_seconds is not None:
            good, poor = observed(good, 0.01), observed(poor, 0.1)
            count += 1
        assert math.log(MEAN.breaker_close_delta) / math.log(0.9) <= count <= 60
        assert poor.phase(MEAN, 61) == "half_open"
        assert poor.good.whole.value == pytest.approx(1)

    def test_a_bound_from_below_never_closes_it(self) -> None:
        breaker = self.half_open()
        for _ in range(300):
            breaker = observed(breaker, 0.01, exact=False)
        assert breaker.phase(MEAN, 61) == "half_open"

    def test_a_bound_from_below_that_is_the_worst_counts_against_closing(self) -> None:
        breaker = observed(self.half_open(), 0.0)
        assert observed(breaker, 3.0, exact=False).good.whole.value < breaker.good.whole.value
        assert observed(breaker, 0.5, exact=False).good == breaker.good

    def test_a_bound_from_below_opens_it(self) -> None:
        breaker = Breaker.fresh(MEAN)
        for _ in range(6):
            breaker = observed(breaker, 2.0, exact=False)
        assert breaker.opened_seconds == 61

    @pytest.mark.parametrize("change", [{"risk": "exceedance"}, {"kl_clip": 2.0}, {"max_kl": 0.05}])
    def test_another_question_begins_the_tests_anew(self, change: dict[str, object]) -> None:
        breaker = observed(self.half_open(), 0.5)
        assert breaker.under(MEAN) is breaker
        asked = MEAN.changed_by(Policy.model_validate(change))
        changed = breaker.under(asked)
        assert (changed.samples, changed.opened_seconds, changed.risk) == (0, 0, asked.risk)


class TestService:
    def test_it_opens_stays_open_after_a_restart_and_says_so(
        self, artifacts: Path, tmp_path: Path
    ) -> None:
        settings = Settings(
            artifacts=(artifacts,),
            shadow_rate=1,
            state=tmp_path / "state.sqlite",
            risk="mean",
            max_kl=0.15,
        )
        with served(settings) as client:
            count = until(client, "open", 0.25, most=60)
            assert report(client, ask(client, tokens=64), 0.1).json()["breaker"] == "closed"
        assert count > 10  # as violations they would need 5
        with served(settings) as client:
            assert ask(client).headers["kvt-reason"] == "breaker_open"
            assert [b["state"] for b in breakers(client)] == ["open", "closed"]

    def test_lists_are_bounds_from_below(self, artifacts: Path) -> None:
        settings = Settings(artifacts=(artifacts,), shadow_rate=1, risk="mean", max_kl=0.15)
        with served(settings) as client:
            for _ in range(12):
                answer = ask(client)
                body = {
                    "answer_id": answer.headers["kvt-answer-id"],
                    "native": [[[1, math.log(0.9)]]],
                    "translated": [[[2, math.log(0.9)]]],
                }
                said = post(client, body, answer.headers["kvt-feedback-token"]).json()
                if said["breaker"] == "open":
                    break
            assert (said["breaker"], said["lower_bound"]) == ("open", True)
