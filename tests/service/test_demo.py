"""The demonstration over a tiny family, with a real server process and a real curl."""

import functools
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import safetensors.torch
from rich.console import Console
from typer.testing import CliRunner

from mappers import corpus
from mappers.arms import CONTINUATION_TOKENS
from mappers.errors import ArtifactError, CorpusError
from mappers.metrics import Measures
from service.cli import app
from service.client import Reprefill, Translated
from service.commands.exits import Code
from service.demo.family import Direction, directions, prompts
from service.demo.measure import Reading, Result, Texts
from service.demo.process import ServerProcess
from service.demo.run import write
from service.demo.show import show
from service.schemas import Receipt
from tests.service.tiny_family import TOKENS
from tests.service.tiny_family import family as tiny_family

CURL = shutil.which("curl")


@pytest.fixture
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_family(tmp_path_factory)


class TestFamily:
    def test_both_directions_the_way_up_first(self, family: Path) -> None:
        ways = directions(family)
        assert [way.label for way in ways] == ["small -> large", "large -> small"]
        assert ways[0].source is ways[1].target
        assert {way.domain for way in ways} == {"in_domain"}

    def test_prompts_are_not_those_of_the_evidence(self, family: Path) -> None:
        way = directions(family)[0]
        chosen = prompts(family, way, tokens=TOKENS, count=5)
        assert len(chosen) == 5
        assert {len(ids) for ids in chosen} == {TOKENS + CONTINUATION_TOKENS}
        documents = corpus.read([family / "text" / "held_out.jsonl"])
        measured = corpus.evaluation(
            documents,
            way.target.tokenizer,
            sizes=[TOKENS + CONTINUATION_TOKENS],
            documents_at_most=1000,
        )
        seen = {tuple(window.tolist()) for window in measured.windows}
        assert len(seen) >= 29
        assert not seen & {tuple(ids.tolist()) for ids in chosen}

    def test_no_text_is_that_long(self, family: Path) -> None:
        with pytest.raises(CorpusError, match="432 tokens"):
            prompts(family, directions(family)[0], tokens=400, count=1)

    def test_mappers_of_other_models_are_refused(self, family: Path, tmp_path: Path) -> None:
        swapped = tmp_path / "swapped"
        shutil.copytree(family / "artifacts", swapped / "artifacts")
        shutil.copytree(family / "small", swapped / "large")
        shutil.copytree(family / "large", swapped / "small")
        with pytest.raises(ArtifactError, match="not for the"):
            directions(swapped)

    def test_a_family_without_mappers(self, tmp_path: Path) -> None:
        (tmp_path / "artifacts").mkdir()
        with pytest.raises(ArtifactError, match="no mappers"):
            directions(tmp_path)


def test_the_whole_demonstration(family: Path) -> None:
    options = ["--family", str(family), "--tokens", str(TOKENS), "--prompts", "2"]
    result = CliRunner().invoke(app, ["demo", *options], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    for words in (
        "small -> large",
        "large -> small",
        "translate (2 of 2)",
        "KL, only last 64 tokens read",
        "gap recovered",
        "target, translated",
        "make serve",
        "--data-binary @request.safetensors",
    ):
        assert words in shown


@pytest.mark.skipif(CURL is None, reason="there is no curl here")
def test_the_curl_line_works(family: Path, tmp_path: Path) -> None:
    file = tmp_path / "request.safetensors"
    options = ["--family", str(family), "--tokens", str(TOKENS), "--write-request", str(file)]
    written = CliRunner().invoke(app, ["demo", *options])
    assert written.exit_code == 0, written.output
    line = written.stdout[written.stdout.index("curl ") :].replace("\\\n", " ")
    with ServerProcess([family / "artifacts"]) as server:
        line = line.replace("http://127.0.0.1:8080", server.url)
        ran = subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
    assert ran.returncode == 0, ran.stderr
    assert "kvt-decision: translate" in ran.stdout.lower()
    tensors = safetensors.torch.load_file(tmp_path / "answer.safetensors")
    assert tensors["layers.3.v"].shape == (TOKENS - 1, 2, 16)


def test_a_request_file_is_one_for_kvt_translate(family: Path, tmp_path: Path) -> None:
    file, answer = tmp_path / "request", tmp_path / "answer"
    write(family, file, TOKENS)
    mapper = next((family / "artifacts").glob("small-to-large-*"))
    options = [str(file), str(answer), "--artifact", str(mapper)]
    result = CliRunner().invoke(app, ["translate", *options])
    assert result.exit_code == 0, result.output


def arm(kl: float, nll: float = 3.0) -> Measures:
    return Measures(
        kl=kl, kl_max=kl, top1=0.9, nll=nll, kl_p95=kl, kl_p99=kl, worst_position=0, top5=0.9
    )


@functools.cache
def ways(family: Path) -> list[Direction]:
    """Loaded once."""
    return directions(family)


class TestVerdict:
    """When the demonstration may say that it went well."""

    def result(self, family: Path, *, translated: float, bare: float, tail: float) -> Result:
        outcome = Translated.__new__(Translated)
        object.__setattr__(outcome, "receipt", self.receipt())
        reading = Reading(
            outcome=outcome,
            round_trip_ms=1.0,
            native=arm(0.0, 2.0),
            source=arm(0.2, 2.5),
            no_context=arm(1.0),
            bare=arm(bare),
            bare_same_tail=arm(tail),
            translated=arm(translated, 2.1),
        )
        texts = Texts("a [bold]prompt", "b", "c", "d")
        return Result(ways(family)[0], [reading], TOKENS, 1.0, 1.0, texts)

    def receipt(self) -> Receipt:
        return Receipt.model_construct(
            tokens=127, native_tail=1, kl_bound=0.02, max_kl=0.05, alpha=0.1, delta=0.05
        )

    def test_better_than_every_cheap_way(self, family: Path) -> None:
        result = self.result(family, translated=0.01, bare=0.1, tail=0.3)
        assert result.good
        assert math.isclose(result.gap, 0.8)
        assert math.isclose(result.context, 0.99)

    @pytest.mark.parametrize(("bare", "tail"), [(0.01, 0.3), (0.3, 0.01), (0.005, 0.005)])
    def test_no_better_than_reading_the_end(self, family: Path, bare: float, tail: float) -> None:
        assert not self.result(family, translated=0.01, bare=bare, tail=tail).good

    def test_not_a_number_is_not_good(self, family: Path) -> None:
        assert not self.result(family, translated=math.nan, bare=0.1, tail=0.3).good

    def test_one_refusal_is_one_too_many(self, family: Path) -> None:
        result = self.result(family, translated=0.01, bare=0.1, tail=0.3)
        first = result.readings[0]
        refused = Reading(
            outcome=Reprefill("no_evidence", "not measured", status=200),
            round_trip_ms=1.0,
            native=first.native,
            source=first.source,
            no_context=first.no_context,
            bare=first.bare,
            bare_same_tail=None,
            translated=None,
        )
        result.readings.append(refused)
        assert not result.good
        assert result.mean("translated") == 0.01
        console = Console(record=True, width=100)
        show(console, [result])
        shown = console.export_text()
        assert "reprefill (1 of 2)" in shown
        assert "no evidence" in shown

    def test_nothing_translated_is_shown_as_nothing(self, family: Path) -> None:
        result = self.result(family, translated=math.nan, bare=0.1, tail=math.nan)
        console = Console(record=True, width=100)
        show(console, [result])
        assert "nan" not in console.export_text()

    def test_text_is_not_markup(self, family: Path) -> None:
        console = Console(record=True, width=100)
        show(console, [self.result(family, translated=0.01, bare=0.1, tail=0.3)])
        assert "a [bold]prompt" in console.export_text()


def test_a_demonstration_that_went_badly_is_code_10(
    family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.demo.run.run", lambda *_, **__: False)
    result = CliRunner().invoke(app, ["demo", "--family", str(family)])
    assert result.exit_code == Code.REPREFILL
    assert result.stderr == "kvt: not every prompt was translated well\n"
    assert "make serve" in result.stdout
