"""The accept rule, case by case."""

import pytest

from mappers.accept import Rule, decide
from mappers.evidence import Arm, Evidence
from tests.mappers.records import evidence, rows

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
