"""Promises are judged against the right rival, at the right setting, and a NaN never keeps one."""

import math

import pytest

from tests.bench.recipe_bench.candidates import Group
from tests.bench.recipe_bench.results import Ratio
from tests.bench.recipe_bench.verdict import (
    Speed,
    Verdict,
    against_published,
    against_tails,
    speeds,
)
from tests.recipe_bench.bench_results import result, shared

RESULTS = [
    result("default, paper", Group.DEFAULT, kl=0.1, flops=100, seconds=10.0),
    result("default, quarter", Group.DEFAULT, kl=0.2, flops=25, seconds=5.0),
    result("full_head k=4", Group.OURS, kl=0.01, flops=25),
    result("paper k=4", Group.PUBLISHED, kl=0.3, flops=100),
    result("CacheBridge k=4", Group.PUBLISHED, kl=0.3, flops=30),
    result("CacheBridge k=1", Group.PUBLISHED, kl=0.3, flops=7),
    result("aither-kvcache k=4", Group.PUBLISHED, kl=0.3, flops=100, seconds=35.0),
]


def _verdicts(other: str) -> list[Verdict]:
    return [one for one in against_published(RESULTS) if one.other == other]


def test_the_dearest_default_that_costs_no_more_stands_against_a_published_recipe() -> None:
    assert {one.ours for one in _verdicts("paper k=4")} == {"default, paper"}
    assert {one.ours for one in _verdicts("CacheBridge k=4")} == {"default, quarter"}
    assert _verdicts("CacheBridge k=1") == []


def test_both_tails_domains_and_first_tokens_are_judged() -> None:
    found = _verdicts("paper k=4")
    settings = {(one.domain, one.native_tail, one.first_token) for one in found}
    assert len(found) == len(settings) == 2 * 2 * 2
    exact = next(one for one in found if one.first_token == "exact")
    mapped = next(one for one in found if one.first_token == "mapped")
    assert mapped.ratio.ratio == pytest.approx(exact.ratio.ratio / 3)
    assert (exact.aim, mapped.met) == (0.5, True)
    assert {one.aim for one in _verdicts("CacheBridge k=4")} == {0.8}


def test_every_default_stands_against_the_tail_alone() -> None:
    found = [*against_tails(RESULTS, [*shared(1.0)])]
    assert {(one.ours, one.native_tail) for one in found} == {
        (name, tail) for name in ("default, paper", "default, quarter") for tail in (32, 64, 128)
    }
    assert {one.met for one in found} == {True}
    assert not any(one.met for one in against_tails(RESULTS, [*shared(0.01)]))


def test_a_fit_is_faster_by_the_ratio_of_seconds() -> None:
    same, chosen = speeds(RESULTS)
    assert (same.ours, same.ratio) == ("full_head k=4", 35.0)
    assert (chosen.ours, chosen.ratio, chosen.met) == ("default, paper", 3.5, True)
    assert not Speed("tiny", "a", "b", 2.9, 3.0).met


def test_a_nan_keeps_no_promise() -> None:
    unknown = Ratio(*[math.nan] * 3)
    assert not Verdict("tiny", "a", "b", "in_domain", 1, "exact", unknown, 0.5).met
