"""Every option of ``kvt evaluate``, and those of ``kvt fit`` about evidence, on the tiny family."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mappers import artifact as artifacts
from mappers import evaluate as evaluation
from mappers.evidence import Arm, Evidence
from mappers.manifest import ManifestFacts
from service.commands.exits import Code
from tests.service.test_cli import assert_one_line, kvt
from tests.service.tiny_family import family as tiny_family
from tests.service.tiny_family import fit_arguments

SMALL = ("--documents", 3, "--lengths", 64, "--native-tails", 1)


@pytest.fixture
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_family(tmp_path_factory)


@pytest.fixture
def fitted(family: Path, tmp_path: Path) -> Path:
    """A copy of the mapper from small to large, with evidence of ``in_domain``."""
    original = next((family / "artifacts").glob("small-to-large-*"))
    return Path(shutil.copytree(original, tmp_path / original.name))


def arguments(family: Path, fitted: Path, domain: str = "again") -> tuple[object, ...]:
    text = f"{domain}={family / 'text' / 'held_out.jsonl'}"
    sides = ("--source", family / "small", "--target", family / "large")
    return ("evaluate", fitted, *sides, "--held-out", text)


def evidence_of(folder: Path) -> Evidence:
    found = artifacts.load(folder).evidence
    assert found is not None
    return found


def test_lengths_tails_hops_and_depth(family: Path, fitted: Path) -> None:
    reverse = next((family / "artifacts").glob("large-to-small-*"))
    lists = ("--lengths", 64, "--lengths", 128, "--native-tails", 1, "--native-tails", 16)
    depth = ("--deep-documents", 1, "--hops", 1, "--turns", 2, "--reverse", reverse)
    result = kvt(*arguments(family, fitted), "--documents", 2, *lists, *depth)
    assert result.exit_code == 0, result.output
    assert Path(result.stdout.strip()) == fitted
    record = evidence_of(fitted)
    translated = [row for row in record.rows if row.arm is Arm.TRANSLATED]
    assert {(row.length, row.native_tail) for row in translated} == {
        (64, 1), (64, 16), (128, 1), (128, 16)
    }  # fmt: skip
    assert len({row.document for row in translated}) == 2
    assert {row.hops for row in translated} == {0, 1}
    assert {(row.length, row.native_tail) for row in translated if row.probe_tokens} == {
        (128, 1), (128, 16)
    }  # fmt: skip
    assert all(row.score is not None for row in translated if not row.hops)
    assert [row.turn for row in record.drift] == [1, 2]
    assert len({row.document for row in record.curve}) == 1


def test_a_reverse_of_another_pair_is_refused(family: Path, fitted: Path) -> None:
    result = kvt(*arguments(family, fitted), *SMALL, "--reverse", fitted)
    assert_one_line(result, Code.IDENTITY, "source.model")


def test_text_that_was_fitted_on_is_refused(family: Path, fitted: Path) -> None:
    before = (fitted / "evidence.json").read_bytes()
    again = ("--held-out", f"again={family / 'text' / 'calibration.jsonl'}")
    result = kvt(*arguments(family, fitted), *SMALL, *again)
    assert_one_line(result, Code.DATA, "evaluation documents are in the calibration text")
    assert (fitted / "evidence.json").read_bytes() == before


def test_an_artifact_that_does_not_list_its_calibration_text_is_measured_with_a_warning(
    family: Path, fitted: Path, tmp_path: Path
) -> None:
    artifact = artifacts.load(fitted)
    facts = {name: getattr(artifact.manifest, name) for name in ManifestFacts.model_fields}
    old = facts["calibration"].model_copy(update={"document_digests": None})
    folder = artifacts.publish(
        tmp_path / "old", artifact.mapper, ManifestFacts(**(facts | {"calibration": old}))
    )
    result = kvt(*arguments(family, folder), *SMALL)
    assert result.exit_code == 0, result.output
    assert "kvt: the artifact does not list its calibration documents" in result.stderr
    assert len(evidence_of(folder).rows) > 0


def test_too_few_documents_says_how_many_are_needed(family: Path, fitted: Path) -> None:
    before = (fitted / "evidence.json").read_bytes()
    asked = ("--alpha", 0.1, "--delta", 0.05)
    result = kvt(*arguments(family, fitted), *SMALL, *asked)
    assert_one_line(result, Code.DATA, "3 documents", "need 30")
    assert (fitted / "evidence.json").read_bytes() == before
    refused = kvt(*fit_arguments(family, "small", "large", "never"), "--documents", 5, *asked)
    assert refused.exit_code == Code.DATA
    assert "5 documents" in refused.stderr
    assert not (family / "never").exists()


def test_a_stopped_evaluation_goes_on_where_it_was(
    family: Path, fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, measured = evaluation.measure_document, []

    def stop_at_the_third(*given: Any, **options: Any) -> Any:
        measured.append(options["document"])
        if len(measured) == 3:
            raise KeyboardInterrupt
        return original(*given, **options)

    monkeypatch.setattr(evaluation, "measure_document", stop_at_the_third)
    command = (*arguments(family, fitted), *SMALL, "--work", tmp_path / "work")
    assert kvt(*command).exit_code == Code.INTERRUPTED
    assert kvt(*command).exit_code == 0
    assert len(measured) == 4, "two were kept, the third was measured again"
    assert measured[2] == measured[3]
    assert len({row.document for row in evidence_of(fitted).rows}) == 3
    assert kvt(*command).exit_code == 0
    assert len(measured) == 4


def test_other_domains_are_replaced_unless_kept(family: Path, fitted: Path) -> None:
    before = evidence_of(fitted)
    assert kvt(*arguments(family, fitted, "more"), *SMALL, "--keep").exit_code == 0
    kept = evidence_of(fitted)
    assert list(kept.corpora) == ["in_domain", "more"]
    assert [row for row in kept.rows if row.domain == "in_domain"] == [*before.rows]
    assert len({row.document for row in kept.rows if row.domain == "more"}) == 3
    assert [row for row in kept.layers if row.domain == "in_domain"] == [*before.layers]
    assert kvt(*arguments(family, fitted, "more"), *SMALL).exit_code == 0
    assert list(evidence_of(fitted).corpora) == ["more"]


@pytest.fixture
def questions(family: Path, tmp_path: Path) -> Path:
    """Two questions with two answers each, from the held-out text."""
    lines = (family / "text" / "held_out.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"].split() for line in lines[:4]]
    asked = [
        {"question": " ".join(text[:60]), "choices": [text[60], "zzz"], "answer": number % 2}
        for number, text in enumerate(texts)
    ]
    file = tmp_path / "which.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in asked))
    return file


def test_tasks_are_scored_into_the_evidence(family: Path, fitted: Path, questions: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra tasks is not installed")
    result = kvt(*arguments(family, fitted), *SMALL, "--tasks", questions)
    assert result.exit_code == 0, result.output
    assert Path(result.stdout.strip()) == fitted
    assert "which" in result.stderr
    rows = {row.measure: row for row in evidence_of(fitted).tasks}
    assert {row.task for row in rows.values()} == {"which"}
    assert rows["chance"].value == 0.5
    assert rows["native"].questions == 4
    assert {"translated", "source", "retention", "floor_retention", "gap_recovered"} <= rows.keys()


def test_without_the_extra_tasks_are_refused_before_anything_is_measured(
    family: Path, fitted: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "mappers.tasks", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    result = kvt(*arguments(family, fitted), *SMALL, "--tasks", questions)
    assert_one_line(result, Code.USAGE, "kv-translator[tasks]")


def test_a_file_that_is_no_task(family: Path, fitted: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra tasks is not installed")
    file = tmp_path / "other.yaml"
    file.write_text("task: a\noutput_type: generate_until\n")
    before = (fitted / "evidence.json").read_bytes()
    result = kvt(*arguments(family, fitted), *SMALL, "--tasks", file)
    assert result.exit_code == Code.DATA
    assert "multiple_choice" in result.stderr.splitlines()[-1]
    assert (fitted / "evidence.json").read_bytes() == before
