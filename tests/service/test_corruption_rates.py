"""What is refused of the embedded source model's own caches after something happened to them.

The fast tests are on fewer caches than the slow ones, and else the same.
"""

from collections.abc import Iterable

import pytest

from tests.bench.corruptions import CORRUPTIONS
from tests.bench.gate_corruptions import (
    Line,
    Spoiler,
    content_lines,
    made_smaller,
    served_lines,
    unseen,
)
from tests.bench.gate_data import DEMO, Family
from tests.mappers.test_profile import UNSEEN

LENGTH, FEW, MANY = 128, 16, 100
SEEN = CORRUPTIONS.keys() - UNSEEN
REFUSED_AT_LEAST, GOOD_REFUSED_AT_MOST = 0.99, 0.02
HARMLESS = 1e-3
"""Nats a token: by how much an answer's KL may move because of what was not seen."""


@pytest.fixture(scope="module")
def family() -> Family:
    return Family.load(DEMO / "small", DEMO / "large", DEMO / "artifacts")


@pytest.fixture(scope="module")
def few(family: Family) -> Spoiler:
    return Spoiler(family, unseen(family, length=LENGTH, count=FEW))


@pytest.fixture(scope="module")
def many(family: Family) -> Spoiler:
    return Spoiler(family, unseen(family, length=LENGTH, count=MANY))


def assert_refused(lines: Iterable[Line], names: Iterable[str], count: int) -> None:
    """These are refused, and of the good caches hardly any."""
    found = {line["corruption"]: line for line in lines}
    assert {line["total"] for line in found.values()} == {count}
    for name in names:
        assert found[name]["refused"] >= REFUSED_AT_LEAST * count, name
    good = [line["refused"] for name, line in found.items() if name.startswith("none")]
    assert good
    assert max(good) <= max(1, GOOD_REFUSED_AT_MOST * count)


CONTENT = [*SEEN, "another_documents_cache_with_token_ids"]
SERVED = [
    "exponent_bit_flipped_with_content_digest",
    "exponent_bit_cleared_with_content_digest",
    "lowest_bit_flipped_with_content_digest",
    "theta_off_by_2_percent_declared",
]


def test_spoiled_caches_are_refused(few: Spoiler) -> None:
    assert_refused(content_lines(few), CONTENT, FEW)


def test_whatever_happens_on_the_way_is_refused_when_the_digest_is_sent(few: Spoiler) -> None:
    assert_refused(served_lines(few), SERVED, FEW)


@pytest.mark.slow
def test_many_spoiled_caches_are_refused(many: Spoiler) -> None:
    assert_refused(content_lines(many), CONTENT, MANY)


@pytest.mark.slow
def test_many_are_refused_when_the_digest_is_sent(many: Spoiler) -> None:
    assert_refused(served_lines(many), SERVED, MANY)


def test_a_number_that_became_smaller_unseen_does_no_harm(few: Spoiler) -> None:
    found = made_smaller(few)
    assert found["refused"] < found["total"]
    assert found["median"] <= HARMLESS
