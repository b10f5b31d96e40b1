"""What is expected of a score: monotone, right on average, silent where nothing was measured."""

import numpy as np
import pytest

from mappers.evidence import Bucket, Evidence
from mappers.forecast import expected_kl
from tests.mappers.records import evidence, varied

CHAT = Bucket("chat", prefix_known=True, hops=0)
LAW = CHAT._replace(domain="law")


@pytest.fixture
def scored() -> Evidence:
    """Chat, whose KL grows with the score; law, with ten times the KL."""
    rng = np.random.default_rng(2)
    scores = rng.normal(size=200)
    kls = np.exp(-3 + 0.5 * scores + 0.5 * rng.normal(size=200))
    chat, law = (
        varied((times * kls).tolist(), scores=scores.tolist(), domain=domain)
        for times, domain in ((1, "chat"), (10, "law"))
    )
    return evidence(chat, law)


def expect(record: Evidence, score: float, *places: tuple[Bucket, int], tail: int = 1) -> float:
    found = expected_kl(record, places, tail, score)
    assert found is not None
    return found


def test_it_never_falls_with_the_score(scored: Evidence) -> None:
    levels = [expect(scored, score, (CHAT, 128)) for score in np.linspace(-4, 4, 60)]
    assert levels == sorted(levels)
    assert levels[-1] > 5 * levels[0]


def test_on_average_it_is_the_mean(scored: Evidence) -> None:
    rows = [row for row in scored.rows if row.domain == "chat"]
    levels = [expect(scored, row.score or 0.0, (CHAT, 128)) for row in rows]
    assert np.mean(levels) == pytest.approx(np.mean([row.kl for row in rows]))


def test_the_worst_place_speaks(scored: Evidence) -> None:
    both = expect(scored, 0.0, (CHAT, 128), (LAW, 128))
    assert (
        both
        == expect(scored, 0.0, (LAW, 128))
        == pytest.approx(10 * expect(scored, 0.0, (CHAT, 128)))
    )


def test_where_nothing_was_measured_nothing_is_expected(scored: Evidence) -> None:
    assert expected_kl(scored, [(CHAT, 128)], 2, 0.0) is None
    assert expected_kl(scored, [], 1, 0.0) is None
    assert expected_kl(evidence(varied([0.1] * 9)), [(CHAT, 128)], 1, 0.0) is None
