"""The bound against exact arithmetic and simulation; the rule case by case."""

import math
from fractions import Fraction

import numpy as np
import pytest
from pydantic import ValidationError

from mappers.evidence import Arm, Evidence, EvidenceRow, decide, kl_bound

NAN = float("nan")


def exact_bound(values: list[float], alpha: Fraction, delta: Fraction) -> float | None:
    """The definition in rational arithmetic."""
    n, ordered = len(values), sorted(values)
    for r in range(1, n + 1):
        tail = sum(math.comb(n, i) * alpha**i * (1 - alpha) ** (n - i) for i in range(n - r + 1))
        if tail <= delta:
            return ordered[r - 1]
    return None


@pytest.mark.parametrize("rows", [1, 5, 21, 22, 28, 29, 45, 58, 59, 90])
@pytest.mark.parametrize(("alpha", "delta"), [("0.1", "0.1"), ("0.1", "0.05"), ("0.05", "0.05")])
def test_bound_is_the_order_statistic_of_the_definition(rows: int, alpha: str, delta: str) -> None:
    values = [float(v) for v in np.random.default_rng(rows).permutation(rows)]
    assert kl_bound(values, float(alpha), float(delta)) == exact_bound(
        values, Fraction(alpha), Fraction(delta)
    )


@pytest.mark.parametrize(("alpha", "delta", "needed"), [(0.1, 0.1, 22), (0.05, 0.05, 59)])
def test_too_few_rows_give_no_bound(alpha: float, delta: float, needed: int) -> None:
    assert kl_bound([0.0] * (needed - 1), alpha, delta) is None
    assert kl_bound([0.0] * needed, alpha, delta) == 0.0
    assert kl_bound([], alpha, delta) is None


def test_the_bound_holds_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    quantile = -math.log(0.1)  # of Exp(1), exceeded with probability 0.1
    draws = rng.exponential(size=(4_000, 60))
    missed = np.mean([kl_bound(row.tolist(), 0.1, 0.1) < quantile for row in draws])
    assert 0.02 < missed <= 0.1 + 3 * math.sqrt(0.09 / 4_000)


def test_values_that_are_not_finite_fail_closed() -> None:
    assert kl_bound([NAN] + [0.1] * 21, 0.1, 0.1) == math.inf
    assert kl_bound([math.inf] + [0.1] * 21, 0.1, 0.1) == math.inf
    assert kl_bound([NAN] + [0.1] * 59, 0.1, 0.1) == 0.1  # one may be among the worst tenth


@pytest.mark.parametrize(("alpha", "delta"), [(0, 0.1), (1, 0.1), (0.1, 0), (0.1, 1), (NAN, 0.1)])
def test_levels_outside_zero_to_one_are_errors(alpha: float, delta: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        kl_bound([0.1] * 100, alpha, delta)


def rows(
    kl: float,
    *,
    length: int = 128,
    tail: int = 1,
    domain: str = "chat",
    known: bool = True,
    hops: int = 0,
    count: int = 30,
    arm: Arm = Arm.TRANSLATED,
) -> list[EvidenceRow]:
    return [
        EvidenceRow(
            document=f"d{n}",
            domain=domain,
            length=length,
            native_tail=tail,
            prefix_known=known,
            hops=hops,
            arm=arm,
            kl=kl,
            kl_max=kl,
            top1=1.0,
            nll=2.0,
        )
        for n in range(count)
    ]


def evidence(*groups: list[EvidenceRow]) -> Evidence:
    return Evidence(
        continuation_tokens=32,
        corpora={"chat": "sha256:0"},
        rows=tuple(row for group in groups for row in group),
    )


def rule(record: Evidence, **changes: object) -> tuple[str, str | None, int, float | None]:
    asked = {
        "tokens": 128,
        "domain": "chat",
        "prefix_known": True,
        "max_kl": 0.05,
        "alpha": 0.1,
        "delta": 0.1,
    }
    verdict = decide(record, **{**asked, **changes})  # type: ignore[arg-type]
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


def test_json_round_trip_keeps_every_row_even_what_is_not_finite() -> None:
    record = evidence(rows(0.1, count=2), rows(NAN, count=1), rows(math.inf, count=1))
    text = record.model_dump_json()
    again = Evidence.model_validate_json(text)
    assert again.model_dump_json() == text
    assert again.rows[0] == record.rows[0]
    assert math.isnan(again.rows[2].kl)
    assert again.rows[3].kl == math.inf


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"schema_version":2', '"schema_version":3'),
        ('"corpora"', '"surplus":1,"corpora"'),
        ('"translated"', '"other"'),
        (",0.25,", ",-0.25,"),
        (",128,", ',"128",'),
        ('"columns":["document",', '"columns":["name",'),
        ("[[", "[[1,"),
    ],
)
def test_a_record_that_is_not_of_this_schema_is_refused(old: str, new: str) -> None:
    text = evidence(rows(0.25, count=1)).model_dump_json()
    assert old in text
    with pytest.raises(ValidationError):
        Evidence.model_validate_json(text.replace(old, new, 1))
