"""The accept rule, case by case; ``test_guarantee.py`` holds it against its promise."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from mappers import accept
from mappers.accept import Rule, decide
from mappers.bounds import mean_bound
from mappers.evidence import Arm, Evidence
from tests.mappers.records import evidence, rows, varied

NAN = float("nan")


def rule(record: Evidence, **changes: object) -> tuple[str, str | None, int, float | None]:
    asked = {
        "tokens": 128,
        "domain": "chat",
        "prefix_known": True,
    }
    levels = {name: changes.pop(name) for name in Rule._fields if name in changes}
    asked |= {"rule": Rule(0.05, 0.1, 0.1)._replace(**levels), **changes}
    verdict = decide(record, **asked)  # type: ignore[arg-type]
    return verdict.decision, verdict.reason, verdict.native_tail, verdict.kl_bound


TAILS = evidence(rows(0.09, tail=1), rows(0.04, tail=32), rows(0.02, tail=64), rows(0.01, tail=120))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("translate", None, 32, 0.04)),
        ({"max_kl": 0.04}, ("translate", None, 32, 0.04)),
        ({"max_kl": 0.1}, ("translate", None, 1, 0.09)),
        ({"max_kl": 0.03}, ("translate", None, 64, 0.02)),
        ({"max_kl": 0.005}, ("reprefill", "certified_kl_exceeds_threshold", 0, 0.01)),
        ({"max_kl": NAN}, ("reprefill", "certified_kl_exceeds_threshold", 0, 0.01)),
        (
            {"max_kl": 0.03, "max_native_tail": 32},
            ("reprefill", "certified_kl_exceeds_threshold", 0, 0.04),
        ),
        ({"max_native_tail": 0}, ("reprefill", "no_evidence", 0, None)),
        ({"tokens": 127}, ("reprefill", "length_not_certified", 0, None)),
        ({"tokens": 129}, ("reprefill", "length_not_certified", 0, None)),
        ({"domain": "code"}, ("reprefill", "no_evidence", 0, None)),
        ({"prefix_known": False}, ("reprefill", "no_evidence", 0, None)),
        ({"hops": 1}, ("reprefill", "drift_budget_exhausted", 0, None)),
        ({"alpha": 0.05}, ("reprefill", "no_evidence", 0, None)),
    ],
)
def test_rule(changes: dict[str, object], expected: tuple[object, ...]) -> None:
    assert rule(TAILS, **changes) == expected


def test_testing_stops_at_the_first_tail_that_fails() -> None:
    record = evidence(rows(0.01, tail=1), rows(0.09, tail=32), rows(0.02, tail=64))
    assert rule(record) == ("translate", None, 64, 0.02)


def test_between_two_lengths_both_must_pass_with_the_same_tail() -> None:
    record = evidence(
        rows(0.02, length=128, tail=32),
        rows(0.04, length=256, tail=32),
        rows(0.01, length=256, tail=128),
    )
    assert rule(record, tokens=200) == ("translate", None, 32, 0.04)
    assert rule(record, tokens=200, max_kl=0.03)[:2] == (
        "reprefill",
        "certified_kl_exceeds_threshold",
    )
    assert rule(record, tokens=256, max_kl=0.03) == ("translate", None, 128, 0.01)


def test_without_a_domain_the_worst_one_decides() -> None:
    record = evidence(rows(0.02), rows(0.04, domain="code"))
    assert rule(record, domain=None) == ("translate", None, 1, 0.04)
    assert rule(record, domain=None, max_kl=0.03)[0] == "reprefill"
    assert rule(record, max_kl=0.03)[0] == "translate"
    gap = evidence(rows(0.02), rows(0.04, domain="code", length=256))
    assert rule(gap, domain=None)[1] == "length_not_certified"


def test_hops_have_rows_of_their_own() -> None:
    record = evidence(rows(0.01), rows(0.03, hops=1))
    assert rule(record, hops=1) == ("translate", None, 1, 0.03)
    assert rule(record, hops=2)[1] == "drift_budget_exhausted"
    assert rule(record, hops=-1)[1] == "no_evidence"


def test_only_the_translated_arm_counts() -> None:
    record = evidence(rows(0.0, arm=Arm.NATIVE), rows(0.2))
    assert rule(record)[:2] == ("reprefill", "certified_kl_exceeds_threshold")


def test_a_row_that_is_not_finite_refuses() -> None:
    record = evidence(rows(0.01, count=29), rows(NAN, count=1))
    assert rule(record)[:2] == ("reprefill", "certified_kl_exceeds_threshold")


class TestMean:
    def test_the_mean_of_clipped_kls_decides(self) -> None:
        kls = [0.01] * 195 + [9.0] * 5
        record = evidence(varied(kls))
        bound = mean_bound(kls, 1.0, 0.1)
        assert rule(record, risk="mean", max_kl=0.1) == ("translate", None, 1, bound)
        assert rule(record, risk="mean", max_kl=0.04)[1] == "certified_kl_exceeds_threshold"
        assert rule(record, risk="mean", max_kl=0.1, kl_clip=9.0)[0] == "reprefill"
        # The other risk looks at all but a tenth of them.
        assert rule(record, max_kl=0.02)[0] == "translate"

    def test_how_many_documents_could_prove_it(self) -> None:
        needed = Rule(0.1, 0.1, 0.1, "mean", 2.0).documents_needed()
        assert (
            mean_bound([0.0] * needed, 2.0, 0.1) <= 0.1 < mean_bound([0.0] * (needed - 1), 2.0, 0.1)
        )
        few = evidence(rows(0.0, count=needed - 1))
        assert rule(few, risk="mean", max_kl=0.1, kl_clip=2.0)[1] == "no_evidence"
        assert rule(evidence(rows(0.0, count=needed)), risk="mean", max_kl=0.1, kl_clip=2.0)[0] == (
            "translate"
        )

    def test_a_tiny_threshold_costs_no_more_than_any_other(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A request names its threshold; 1e-9 took billions of documents to say no."""
        sizes: list[int] = []

        def counted(kls: Sequence[float], clip: float, delta: float) -> float:
            sizes.append(len(kls))
            assert len(kls) <= 200
            return mean_bound(kls, clip, delta)

        monkeypatch.setattr(accept, "mean_bound", counted)
        probed = varied([0.01] * 200, errors=[float(n) for n in range(200)], probe_tokens=64)
        record = evidence(varied([0.01] * 200), probed)
        every: list[dict[str, Any]] = [{}, {"probe_tokens": 64}]
        for asked in (*every, {"probe_tokens": 64, "probe_error": 3.0}):
            refused = rule(record, risk="mean", max_kl=1e-9, delta=0.0987, **asked)
            assert refused[0] == "reprefill"
        assert 200 in sizes

    def test_a_row_that_is_not_finite_counts_as_the_clip(self) -> None:
        record = evidence(varied([0.01] * 195 + [NAN] * 5))
        assert rule(record, risk="mean", max_kl=0.1)[3] == mean_bound(
            [0.01] * 195 + [1.0] * 5, 1.0, 0.1
        )

    @pytest.mark.parametrize("clip", [0.05, 0.01, NAN])
    def test_a_clip_that_no_mean_exceeds_is_an_error(self, clip: float) -> None:
        with pytest.raises(ValueError, match="no mean of KLs"):
            rule(TAILS, risk="mean", max_kl=0.05, kl_clip=clip)


class TestScores:
    """Of 200 documents the two with the largest scores are beyond the limit, one sets it."""

    SCORES = [float(n) for n in range(200)]

    def test_rows_that_would_be_refused_do_not_count(self) -> None:
        record = evidence(varied([0.01] * 180 + [0.2] * 20, scores=self.SCORES))
        assert record.score_limit("chat") == 198.0
        verdict = decide(
            record, tokens=128, domain="chat", prefix_known=True, rule=Rule(0.05, 0.1, 0.1)
        )
        assert verdict.rows == 198
        assert (
            rule(evidence(varied([0.01] * 187 + [0.2] * 13, scores=self.SCORES)))[0] == "translate"
        )
        # 15 of 200 above the threshold are too many; 13 of the 198 that count are not.
        kls = [0.01] * 185 + [0.2] * 15
        assert rule(evidence(varied(kls)))[0] == "reprefill"
        assert rule(evidence(varied(kls, scores=self.SCORES)))[0] == "translate"

    def test_a_request_without_a_domain_is_held_to_the_widest_limit(self) -> None:
        near = varied([0.01] * 185 + [0.2] * 15, scores=self.SCORES)
        far = varied([0.01] * 200, scores=[500.0 + n for n in range(200)], domain="code")
        record = evidence(near, far)
        assert rule(record)[0] == "translate"
        assert rule(record, domain=None)[0] == "reprefill"

    def test_scores_are_not_looked_at_after_a_hop(self) -> None:
        first, second = (
            varied([0.01] * 185 + [0.2] * 15, scores=self.SCORES, hops=hops) for hops in (0, 1)
        )
        record = evidence(first, second)
        assert rule(record)[0] == "translate"
        assert rule(record, hops=1)[0] == "reprefill"


class TestProbes:
    """450 documents: three groups of 150, 149 and 149; their edges are the errors 150 and 300."""

    ERRORS = [float(n) for n in range(450)]
    KLS = [0.01] * 150 + [0.03] * 150 + [0.09] * 150

    def record(self, **changes: Any) -> Evidence:
        probed = varied(self.KLS, errors=self.ERRORS, probe_tokens=64, **changes)
        longer = varied([0.01] * 450, errors=self.ERRORS, probe_tokens=64, tail=32)
        return evidence(rows(0.2), probed, longer)

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (None, ("translate", None, 1, 0.01)),
            (0.0, ("translate", None, 1, 0.01)),
            (149.9, ("translate", None, 1, 0.01)),
            (150.0, ("translate", None, 1, 0.03)),
            (299.0, ("translate", None, 1, 0.03)),
            (300.0, ("translate", None, 32, 0.01)),
            (1e9, ("translate", None, 32, 0.01)),
            (NAN, ("reprefill", "probe_kl_exceeds_threshold", 0, None)),
            (math.inf, ("reprefill", "probe_kl_exceeds_threshold", 0, None)),
        ],
    )
    def test_the_group_of_the_error_decides(
        self, error: float | None, expected: tuple[object, ...]
    ) -> None:
        asked = {"probe_tokens": 64, "probe_error": error, "delta": 0.08}
        assert rule(self.record(), **asked) == expected

    def test_no_tail_for_this_error(self) -> None:
        asked = {"probe_tokens": 64, "native_tails": (1,), "delta": 0.08}
        assert rule(self.record(), **asked)[:3] == ("translate", None, 1)
        refused = ("reprefill", "probe_kl_exceeds_threshold", 0, 0.09)
        assert rule(self.record(), probe_error=320.0, **asked) == refused
        hopeless = rule(self.record(), max_kl=0.001, **asked)
        assert hopeless[1] == "certified_kl_exceeds_threshold"

    def test_every_group_is_tested_at_its_share_of_delta(self) -> None:
        # 8 of 149 above the threshold: too many at 0.08 / 3, not at 0.08.
        kls = [0.01] * 292 + [0.09] * 8 + [0.01] * 150
        record = evidence(varied(kls, errors=self.ERRORS, probe_tokens=64))
        asked = {"probe_tokens": 64, "probe_error": 200.0, "delta": 0.08}
        assert rule(record, **asked)[0] == "reprefill"
        assert rule(evidence(varied(kls[151:300])), delta=0.08)[0] == "translate"

    def test_too_few_documents_are_one_group(self) -> None:
        kls = [0.01] * 29 + [0.09]
        record = evidence(varied(kls, errors=self.ERRORS[:30], probe_tokens=64))
        for error in (0.0, 29.0):
            assert rule(record, probe_tokens=64, probe_error=error)[1] == (
                "probe_kl_exceeds_threshold"
            )

    def test_rows_without_a_probe_say_nothing_of_an_answer_with_one(self) -> None:
        assert rule(evidence(rows(0.01)), probe_tokens=64)[1] == "no_evidence"
        assert rule(self.record(), probe_tokens=32)[1] == "no_evidence"
        assert rule(self.record())[1] == "certified_kl_exceeds_threshold"

    def test_a_hop_that_was_measured_without_a_probe_only_is_not_too_many(self) -> None:
        record = evidence(rows(0.01, hops=1), varied(self.KLS, errors=self.ERRORS, probe_tokens=64))
        assert rule(record, probe_tokens=64, hops=1)[1] == "no_evidence"
        assert rule(record, probe_tokens=64, hops=2)[1] == "drift_budget_exhausted"
        assert rule(record, hops=1)[0] == "translate"
