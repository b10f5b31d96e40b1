"""What people look at is drawn from the rows, and holds what it says."""

from pathlib import Path

import pytest
from PIL import Image

from tests.bench.recipe_bench import tables
from tests.bench.recipe_bench.candidates import Group
from tests.bench.recipe_bench.plots import draw
from tests.bench.recipe_bench.results import TableRow, shared_rows, table_rows
from tests.bench.recipe_bench.verdict import against_published, against_tails, speeds
from tests.recipe_bench.bench_results import result, shared

RESULTS = [
    result("default, paper", Group.DEFAULT, kl=0.1, flops=100, seconds=10.0),
    result("full_head k=2", Group.CURVE, kl=0.3, flops=50),
    result("full_head k=4", Group.OURS, kl=0.2, flops=100),
    result("paper k=4, X'X/N + 0.01", Group.PUBLISHED, kl=0.3, flops=100),
    result("aither-kvcache k=4", Group.PUBLISHED, kl=0.3, flops=100, seconds=35.0),
    result("full_head k=4, 10 documents", Group.GROWTH, kl=0.5, flops=100),
    result("full_head k=4, 500 documents", Group.GROWTH, kl=0.2, flops=100),
]


@pytest.fixture
def rows() -> list[TableRow]:
    around = [*shared(1.0)]
    own = [row for one in RESULTS for row in table_rows(one, around)]
    return [*shared_rows("tiny", around), *own]


def test_tables_hold_every_candidate_but_the_growing_ones(
    rows: list[TableRow], capsys: pytest.CaptureFixture[str]
) -> None:
    tables.print_tables(rows)
    printed = capsys.readouterr().out
    for one in RESULTS:
        assert (one.recipe in printed) == (one.group != Group.GROWTH)
    # KL at a tail of 1, in and out of domain, of a candidate with its first token exact.
    exact = [
        row.kl
        for row in rows
        if (row.recipe, row.native_tail, row.first_token) == ("full_head k=4", 1, "exact")
    ]
    assert f"{exact[0]:.3f} / {exact[1]:.3f}" in printed


def test_verdicts_say_met_or_missed(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = [*against_published(RESULTS), *against_tails(RESULTS, [*shared(0.01)])]
    tables.print_verdicts(verdicts, [*speeds(RESULTS)])
    printed = capsys.readouterr().out
    assert printed.count("met") == sum(one.met for one in verdicts) + 2
    assert printed.count("missed") == sum(not one.met for one in verdicts) > 0


def test_a_picture_of_each_kind_is_drawn_small(rows: list[TableRow], tmp_path: Path) -> None:
    files = draw(rows, tmp_path)
    assert [file.name for file in files] == [
        "tiny-flops.png",
        "tiny-k.png",
        "tiny-documents.png",
    ]
    for file in files:
        assert file.stat().st_size < 60_000
        with Image.open(file) as picture:
            assert picture.format == "PNG"
            assert 400 <= picture.width <= 900
            colours = picture.convert("RGB").getcolors(1 << 20)
            assert colours is not None
            assert len(colours) > 8


def test_nothing_is_drawn_without_two_points_of_a_line(
    rows: list[TableRow], tmp_path: Path
) -> None:
    single = [row for row in rows if row.recipe == "full_head k=4"]
    assert draw(single, tmp_path) == []
