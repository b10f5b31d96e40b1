"""Results on disk, their rows, and ratios with paired intervals."""

import math
from pathlib import Path

import numpy as np
import pytest

from tests.bench.recipe_bench.candidates import Group
from tests.bench.recipe_bench.results import (
    Result,
    TableRow,
    kls,
    ratio,
    shared_rows,
    table_rows,
    translated,
)
from tests.recipe_bench.bench_results import DOCUMENTS, result, shared

REQUIRED = {
    "pair",
    "recipe",
    "native_tail",
    "kl",
    "kl_low",
    "kl_high",
    "flops_per_token",
    "bytes",
    "fit_seconds",
}


def test_a_result_comes_back_from_disk_as_it_was(tmp_path: Path) -> None:
    made = result("full_head k=4", Group.OURS, kl=0.1, flops=10)
    made.save(tmp_path / "new folder" / "one.json")
    assert Result.load(tmp_path / "new folder" / "one.json") == made
    assert len([*tmp_path.rglob("*")]) == 2


def test_a_row_names_what_was_promised(tmp_path: Path) -> None:
    assert REQUIRED | {"domain", "first_token", "group"} <= set(TableRow._fields)
    made = result("paper k=4", Group.PUBLISHED, kl=0.1, flops=10, seconds=7.0)
    rows = [*table_rows(made, [*shared(1.0)])]
    assert len(rows) == 2 * 4
    settings = {(row.domain, row.native_tail, row.first_token) for row in rows}
    assert len(settings) == len(rows)
    for row in rows:
        assert (row.pair, row.recipe, row.flops_per_token) == ("tiny", "paper k=4", 10)
        assert (row.bytes, row.fit_seconds, row.documents) == (40, 7.0, DOCUMENTS)
        assert row.kl_low < row.kl < row.kl_high
        assert row.context_recovered == pytest.approx(1 - row.kl / 1.0, abs=1e-6)


def test_arms_without_a_mapper_cost_nothing_and_are_controls() -> None:
    rows = [*shared_rows("tiny", [*shared(1.0)])]
    names = {row.recipe for row in rows}
    assert names == {"control: only the tail", "control: source alone"}
    assert all(row.group == Group.CONTROL and row.flops_per_token == 0 for row in rows)
    tails = {row.native_tail for row in rows if row.recipe == "control: only the tail"}
    assert tails == {1, 32, 64, 128}


def test_a_ratio_is_paired_so_what_both_share_cancels() -> None:
    own = kls(result("x", Group.OURS, kl=0.2, flops=1).rows, translated("in_domain", 1, known=True))
    found = ratio(own, {name: 2 * kl for name, kl in own.items()})
    assert found == pytest.approx((0.5, 0.5, 0.5))


def test_an_interval_agrees_with_the_delta_method() -> None:
    """Another route: the standard error of a ratio of means from the residuals own - r * other."""
    drawn = np.random.default_rng(7)
    other = drawn.uniform(0.5, 1.5, 60)
    own = 0.4 * other + drawn.normal(0, 0.05, 60)
    names = [f"document {n}" for n in range(60)]
    found = ratio(dict(zip(names, own, strict=True)), dict(zip(names, other, strict=True)))
    share = own.mean() / other.mean()
    error = (own - share * other).std() / math.sqrt(60) / other.mean()
    assert found.ratio == pytest.approx(share)
    assert found.low == pytest.approx(share - 1.96 * error, abs=0.3 * error)
    assert found.high == pytest.approx(share + 1.96 * error, abs=0.3 * error)


def test_a_ratio_is_of_shared_documents_and_the_same_every_time() -> None:
    own = {"a": 1.0, "b": 3.0, "c": 100.0}
    other = {"b": 1.0, "a": 2.0, "d": 0.001}
    assert ratio(own, other).ratio == pytest.approx(4 / 3)
    assert ratio(own, other) == ratio(own, other)
    assert ratio(own, other) != ratio(own, other, seed=1) or ratio(own, other).low == 0.5
    assert all(math.isnan(number) for number in ratio(own, {"e": 1.0}))
