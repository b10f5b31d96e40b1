"""Limits of the out-of-distribution score: by domain, by document, and at the stated rate."""

import math
import random

from mappers.conformal import conformal, limits_by_domain
from mappers.evidence_rows import Arm, EvidenceRow


def row(document: int, score: float | None, *, domain: str = "a", length: int = 64) -> EvidenceRow:
    return EvidenceRow(
        document=f"d{document}",
        domain=domain,
        length=length,
        native_tail=1,
        prefix_known=True,
        arm=Arm.TRANSLATED,
        kl=0.1,
        kl_max=0.1,
        top1=1.0,
        nll=2.0,
        score=score,
    )


def test_the_stated_share_of_new_values_is_beyond() -> None:
    drawn = random.Random(0)
    beyond = 0
    for _ in range(2000):
        values = [drawn.gauss(0, 1) for _ in range(199)]
        beyond += drawn.gauss(0, 1) > conformal(values, 0.05)
    # 2,000 draws of 0.05: standard deviation 10.
    assert 60 <= beyond <= 140


def test_too_few_values_give_their_largest() -> None:
    assert conformal([3.0, 1.0, 2.0], 0.01) == 3.0
    assert conformal(range(1, 200), 0.01) == 198


def test_every_domain_has_its_own_limit() -> None:
    rows = [row(i, i / 100) for i in range(99)]
    rows += [row(i, 5 + i / 100, domain="b") for i in range(99)]
    limits = limits_by_domain(rows, 0.1)
    assert limits == {"a": 0.89, "b": 5.89, None: 5.89}


def test_a_document_counts_once_with_its_largest_score() -> None:
    rows = [row(i, float(i + length), length=length) for i in range(9) for length in (1, 2)]
    assert limits_by_domain(rows, 0.1)["a"] == 10.0


def test_without_scores_there_are_no_limits() -> None:
    assert limits_by_domain([row(0, None)], 0.1) == {}


def test_a_score_that_is_not_finite_limits_nothing_but_its_own_document() -> None:
    rows = [row(i, math.inf if i == 0 else float(i)) for i in range(99)]
    assert limits_by_domain(rows, 0.1)["a"] == 90.0
