"""lm-eval over a translated cache: the same answers as by hand, on task files written here."""

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from mappers.errors import UnsupportedTask
from mappers.evidence_rows import TaskRow
from mappers.models import LoadedModel
from mappers.translate import Translator
from tests.mappers.conftest import SYLLABLES
from tests.mappers.identities import broken_mapper, identity_mapper

pytest.importorskip("lm_eval", reason="the extra tasks is not installed")

from mappers import tasks
from mappers.task_model import PairModel, Reader
from mappers.tasks import score_tasks, task_config


def words(chosen: random.Random, count: int) -> str:
    return " ".join("".join(chosen.choices(SYLLABLES, k=2)) for _ in range(count))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """12 questions of two, three or four nonsense answers."""
    chosen, file = random.Random(3), tmp_path / "nonsense.jsonl"
    rows = []
    for number in range(12):
        choices = [words(chosen, 2) for _ in range(2 + number % 3)]
        rows.append({"question": words(chosen, 30), "choices": choices, "answer": number % 2})
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def pair_model(
    target: LoadedModel, reader: Reader, *, tail: int, broken: bool = False
) -> PairModel:
    mapper = broken_mapper(target) if broken else identity_mapper(target)
    return PairModel(
        target, target, Translator(mapper), mapper.prefixes, reader=reader, native_tail=tail
    )


@pytest.mark.parametrize("tail", [1, 8, 500])
def test_the_score_over_an_exact_translation_is_the_models_own(
    target: LoadedModel, tail: int
) -> None:
    chosen = random.Random(1)
    context, answer = words(chosen, 20), " " + words(chosen, 3)
    model = pair_model(target, "translated", tail=tail)
    question, continuation = model.encode(context, answer)
    assert question[0] == 0
    ids = torch.tensor([question + continuation])
    with torch.inference_mode():
        log_p = target.model(ids).logits[0].double().log_softmax(-1)
    at = range(len(question) - 1, ids.shape[1] - 1)
    expected = sum(log_p[row, ids[0, row + 1]].item() for row in at)
    got, greedy = model._score(context, answer)
    assert got == pytest.approx(expected, abs=1e-3)
    assert not greedy
    broken = pair_model(target, "translated", tail=tail, broken=True)
    assert (abs(broken._score(context, answer)[0] - expected) > 1e-2) is (tail < 500)


def test_spaces_go_to_the_continuation(target: LoadedModel) -> None:
    model = pair_model(target, "native", tail=1)
    assert model.encode("ba be ", "bi") == model.encode("ba be", " bi")
    with pytest.raises(UnsupportedTask, match="token"):
        model.encode("ba", "")


def values(rows: Iterable[TaskRow]) -> dict[str, float]:
    return {row.measure: row.value for row in rows}


def test_a_task_is_scored_by_all_three_readers(target: LoadedModel, questions: Path) -> None:
    rows = score_tasks(
        identity_mapper(target), target, target, [questions], native_tail=4, progress=False
    )
    assert {(row.task, row.questions, row.native_tail) for row in rows} == {("nonsense", 12, 4)}
    found = values(rows)
    assert found["chance"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3, rel=1e-5)
    assert found["native"] == found["translated"] == found["source"]
    assert 0 < found["native"] < 1
    assert found["retention"] == 1
    assert math.isnan(found["gap_recovered"]), "no gap between a model and itself"
    (native,) = (row for row in rows if row.measure == "native")
    assert native.low < native.value < native.high


def test_a_yaml_task_reads_the_data_beside_it(target: LoadedModel, questions: Path) -> None:
    config = task_config(questions)
    copied = questions.with_name("again.yaml")
    config["dataset_kwargs"] = {"data_files": {"test": questions.name}}
    copied.write_text(json.dumps({**config, "task": "again"}))
    both = score_tasks(
        broken_mapper(target), target, target, [questions, copied], native_tail=4, progress=False
    )
    assert [row.task for row in both] == ["nonsense"] * 7 + ["again"] * 7
    assert values(both[:7]) == pytest.approx(values(both[7:]), nan_ok=True)


def test_what_was_scored_before_is_not_scored_again(
    target: LoadedModel, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(tail: int) -> tuple[TaskRow, ...]:
        return score_tasks(
            broken_mapper(target), target, target, [questions],
            native_tail=tail, work=tmp_path / "work", progress=False,
        )  # fmt: skip

    asked: list[object] = []
    original = tasks.run_tasks
    monkeypatch.setattr(
        tasks, "run_tasks", lambda *a, **options: (asked.append(a), original(*a, **options))[1]
    )
    first = run(4)
    assert len(asked) == 3
    assert [row.model_dump_json() for row in run(4)] == [row.model_dump_json() for row in first]
    assert len(asked) == 3
    run(8)
    assert len(asked) == 6, "another tail is another score"


@pytest.mark.parametrize(
    "text", ["[1]", "task: a", "output_type: generate_until\ntask: a", "a: !x b"]
)
def test_other_tasks_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(text)
    with pytest.raises(UnsupportedTask):
        task_config(file)
