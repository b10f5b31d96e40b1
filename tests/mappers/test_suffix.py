"""The suffix probe against lines and limits that are known beforehand."""

import math
import random
from typing import Any

import numpy as np
import pytest

from mappers.evidence import Arm, Bucket, EvidenceRow
from mappers.suffix import FALSE_ALARMS, SuffixCheck, fit_suffix

KIND = Bucket("chat", True, 0), 32


def row(document: int, tail_nll: float | None, source: float | None, **changes: Any) -> EvidenceRow:
    given = {
        "document": f"d{document:04}",
        "domain": "chat",
        "length": 128,
        "native_tail": 32,
        "prefix_known": True,
        "arm": Arm.TRANSLATED,
        "kl": 0.1,
        "kl_max": 0.1,
        "top1": 0.9,
        "nll": 2.0,
        "tail_nll": tail_nll,
        "source_tail_nll": source,
    }
    return EvidenceRow(**{**given, **changes})


def noisy_rows(seed: int, documents: int = 200, *, worse: float = 0.0) -> list[EvidenceRow]:
    """The target finds 0.3 + 0.8 of what the source does, and some noise."""
    chance = random.Random(seed)
    sources = [chance.uniform(1, 5) for _ in range(documents)]
    return [
        row(n, 0.3 + 0.8 * x + abs(chance.gauss(0, 0.1)) + worse, x) for n, x in enumerate(sources)
    ]


def test_the_line_is_that_of_least_squares_on_half_of_the_documents() -> None:
    rows = noisy_rows(1)
    check = fit_suffix(rows)[KIND]
    first = rows[0::2]
    slope, intercept = np.polyfit(
        [r.source_tail_nll or 0 for r in first], [r.tail_nll or 0 for r in first], 1
    )
    assert (check.intercept, check.slope) == pytest.approx((intercept, slope))
    residuals = sorted(
        (r.tail_nll or 0) - intercept - slope * (r.source_tail_nll or 0) for r in rows[1::2]
    )
    assert check.residual_limit == pytest.approx(residuals[math.ceil(0.95 * 101) - 1])


def test_good_answers_are_sent_back_as_seldom_as_is_said() -> None:
    """Over many evidences: how often a fresh document of the same kind is beyond the limit."""
    alarms = {True: 0, False: 0}
    for seed in range(60):
        check = fit_suffix(noisy_rows(seed, 60))[KIND]
        for fresh in noisy_rows(1000 + seed, 40):
            for knows in alarms:
                source = fresh.source_tail_nll if knows else None
                alarms[knows] += check.judge(fresh.tail_nll or 0, source).decision == "reprefill"
    for count in alarms.values():
        assert 0 < count / 2400 <= FALSE_ALARMS + 3 * math.sqrt(FALSE_ALARMS * 0.95 / 2400)


def test_the_sources_likelihood_finds_bad_answers_that_the_tail_alone_hides() -> None:
    check = fit_suffix(noisy_rows(3))[KIND]
    bad = noisy_rows(4, 100, worse=0.5)
    found = [check.judge(r.tail_nll or 0, r.source_tail_nll).decision for r in bad]
    alone = [check.judge(r.tail_nll or 0).decision for r in bad]
    assert found.count("reprefill") >= 95
    assert alone.count("reprefill") <= 30


def test_a_judgement_says_what_was_expected_and_the_limit() -> None:
    check = SuffixCheck(0.5, 0.5, 0.25, 4.0)
    assert check.judge(1.75, 2.0) == (1.5, 1.75, "keep")
    assert check.judge(1.76, 2.0) == (1.5, 1.75, "reprefill")
    assert check.judge(4.0) == (None, 4.0, "keep")


@pytest.mark.parametrize(
    ("tail_nll", "source"),
    [(math.nan, None), (math.inf, None), (math.nan, 1.0), (1.0, math.nan), (1.0, math.inf)],
)
def test_what_is_no_number_is_never_kept(tail_nll: float, source: float | None) -> None:
    assert SuffixCheck(0.5, 0.5, 0.25, 4.0).judge(tail_nll, source).decision == "reprefill"


@pytest.mark.parametrize(
    "rows",
    [
        noisy_rows(1, 37),
        [r.model_copy(update={"arm": Arm.WRONG_DOCUMENT}) for r in noisy_rows(1)],
        [r.model_copy(update={"native_tail": 31}) for r in noisy_rows(1)],
        [r.model_copy(update={"source_tail_nll": None}) for r in noisy_rows(1)],
        [r.model_copy(update={"tail_nll": math.nan}) for r in noisy_rows(1)],
    ],
    ids=["too few", "another arm", "a short tail", "without the source", "not numbers"],
)
def test_rows_from_which_nothing_follows(rows: list[EvidenceRow]) -> None:
    assert fit_suffix(rows) == {}


def test_thirty_eight_documents_are_enough() -> None:
    assert KIND in fit_suffix(noisy_rows(1, 38))


def test_a_document_of_many_lengths_counts_once_and_with_its_worst() -> None:
    rows = noisy_rows(1, 60)
    worse = [
        r.model_copy(update={"length": 256, "tail_nll": (r.tail_nll or 0) + 2.0})
        for r in rows[1::2]
    ]
    once, twice = (fit_suffix(given)[KIND] for given in (rows, rows + worse))
    assert twice[:2] == once[:2]
    assert twice.residual_limit == pytest.approx(once.residual_limit + 2.0)
    assert fit_suffix(noisy_rows(1, 30) * 2) == {}


def test_kinds_are_apart() -> None:
    other = [r.model_copy(update={"domain": "code", "native_tail": 128}) for r in noisy_rows(2)]
    hopped = [r.model_copy(update={"hops": 1}) for r in noisy_rows(5)]
    found = fit_suffix([*noisy_rows(1), *other, *hopped])
    assert set(found) == {KIND, (Bucket("code", True, 0), 128), (Bucket("chat", True, 1), 32)}
    assert found[KIND] == fit_suffix(noisy_rows(1))[KIND]


def test_a_source_that_finds_all_alike_gives_a_flat_line() -> None:
    rows = [row(n, 2.0 + n % 5 / 10, 3.0) for n in range(60)]
    check = fit_suffix(rows)[KIND]
    assert check.slope == 0
    assert check.judge(2.4, 3.0).decision == "keep"
