"""A pair from its models to its results: kept while the same is fitted, redone when it is not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from mappers.mapper import AffineMap, LayerMap
from mappers.models import LoadedModel
from tests.bench import bench_recipes
from tests.bench.recipe_bench import benched, code
from tests.bench.recipe_bench.benched import PairBench, Wanted
from tests.bench.recipe_bench.candidates import Candidate, Group, bare_mapper
from tests.bench.recipe_bench.fitted import Fitted, Models, of_mapper
from tests.bench.recipe_bench.reading import Readings
from tests.bench.recipe_bench.sums import PairSums
from tests.recipe_bench.test_results import REQUIRED


class TinyPair:
    """In the place of one of the benchmark's pairs."""

    def __init__(self, models: Models) -> None:
        self.models = models

    def load(self, work: Path) -> tuple[LoadedModel, LoadedModel]:
        return self.models.source, self.models.target


@pytest.fixture(autouse=True)
def pair(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benched, "WINDOW_TOKENS", 72)
    monkeypatch.setattr(benched, "PAIRS", {"tiny": TinyPair(models)})
    monkeypatch.setattr(bench_recipes, "PAIRS", {"tiny": TinyPair(models)})


@pytest.fixture
def bench(tmp_path: Path, readings: Readings) -> PairBench:
    """Over documents that have been read."""
    found = PairBench("tiny", tmp_path, documents=2, windows=8)
    shutil.copytree(readings.files[0].parent.parent, tmp_path / "readings" / found.key)
    return found


def test_every_candidate_of_a_pair_can_be_fitted_and_measured(bench: PairBench) -> None:
    groups = (Group.OURS, Group.DEFAULT, Group.PUBLISHED, Group.OPTION, Group.CONTROL)
    parts = ("head k=4", "heads k=4", "quarter", "local k=4", "/N", "Cache", "control")
    wanted = Wanted(parts, groups)
    found = [*bench.run(wanted)]
    names = [one.recipe for one in found]
    assert len(names) == len(set(names))
    assert {one.group for one in found} == {group.value for group in groups}
    for one in found:
        assert one.flops_per_token > 0
        assert all(row.kl > 0 for row in one.rows)
    assert [*bench.run(wanted)] == found


def test_a_finished_result_is_only_printed(
    bench: PairBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = _Counted()
    first = bench.result(counted.candidate)
    assert bench.result(counted.candidate) == first
    assert counted.fits == 1


def test_other_code_fits_again_and_keeps_the_rows_of_the_same_translation(
    bench: PairBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = _Counted()
    first = bench.result(counted.candidate)
    monkeypatch.setattr(code, "fitting", lambda: "other code")
    monkeypatch.setattr(benched, "measure", _must_not_measure)
    again = bench.result(counted.candidate)
    assert counted.fits == 2
    assert again == replace(first, code="other code")


def test_another_translation_drops_the_rows(
    bench: PairBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = _Counted()
    first = bench.result(counted.candidate)
    monkeypatch.setattr(code, "fitting", lambda: "other code")
    counted.scale = 0.5
    again = bench.result(counted.candidate)
    assert again.translation != first.translation
    assert len(again.rows) == len(first.rows)
    assert not {row.kl for row in again.rows} & {row.kl for row in first.rows}


def test_an_interrupted_measurement_goes_on(
    bench: PairBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = _Counted()
    with monkeypatch.context() as patched:
        patched.setattr(Fitted, "digest", lambda self, _: "as it was")
        whole = bench.result(counted.candidate)
        replace(whole, rows=whole.rows[:-1]).save(bench._file(whole.recipe))
        again = bench.result(counted.candidate)
    assert sorted(again.rows, key=str) == sorted(whole.rows, key=str)


def test_code_is_told_by_its_names_and_bytes(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("a")
    other.write_text("b")
    first = code.digest([one, other])
    assert code.digest([other, one]) == first
    one.write_text("b")
    other.write_text("a")
    assert code.digest([one, other]) != first


def test_the_command_prints_a_json_line_a_row_and_draws(bench: PairBench, tmp_path: Path) -> None:
    app = Typer()
    app.command()(bench_recipes.main)
    options = ["--pair", "tiny", "--documents", "2", "--windows", "8", "--work", str(tmp_path)]
    options += ["--recipe", "full_head k=1", "--recipe", "full_head k=2", "--threads", "1"]
    ran = CliRunner().invoke(app, [*options, "--group", "curve", "--json"])
    assert ran.exit_code == 0, ran.output
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert all(REQUIRED <= set(line) for line in lines)
    recipes = {line["recipe"] for line in lines if line["group"] == "curve"}
    assert recipes == {"full_head k=1", "full_head k=2"}
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {
        "tiny-flops.png",
        "tiny-k.png",
    }


def test_what_is_kept_is_printed_without_a_fit_and_told_from_todays(
    bench: PairBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = _Counted()
    bench.result(counted.candidate)
    monkeypatch.setattr(code, "fitting", lambda: "other code")
    app = Typer()
    app.command()(bench_recipes.main)
    options = ["--pair", "tiny", "--documents", "2", "--windows", "8", "--work", str(tmp_path)]
    ran = CliRunner().invoke(app, [*options, "--no-fit"])
    assert ran.exit_code == 0, ran.output
    assert counted.fits == 1
    assert "counted" in ran.stdout
    assert "fitted by other code than today's: tiny: counted" in ran.stderr


class _Counted:
    """A candidate whose fits are counted, and whose weights can be changed."""

    def __init__(self) -> None:
        self.fits, self.scale = 0, 1.0
        self.candidate = Candidate("counted", Group.OPTION, self._fit)

    def _fit(self, models: Models, _: PairSums) -> Fitted:
        self.fits += 1
        g = models.geometry
        weight = self.scale * torch.eye(g.source_dim).repeat(1, g.target_heads)
        same = AffineMap(weight, torch.zeros(g.target_width))
        layers = [LayerMap((0,), same, same)] * g.target_layers
        return of_mapper(bare_mapper(models, "head_local", layers, skipped=0), 1.0)


def _must_not_measure(*given: object, **options: object) -> list[object]:
    *_, done = given
    assert done
    return []
