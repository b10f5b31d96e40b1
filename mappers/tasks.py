"""Multiple-choice tasks, scored by lm-eval: what a translation costs in right answers.

A task file is lm-eval's own YAML (without its ``!function`` tags; files named in ``data_files`` are
looked for beside it), or jsonl with one question a line: ``{"question": "...", "choices": ["...",
...], "answer": 0}``. Nothing is downloaded for either. Needs the extra ``tasks``.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from lm_eval.evaluator import evaluate as run_tasks
from lm_eval.tasks import TaskManager
from numpy.typing import NDArray

from mappers.errors import UnsupportedTask
from mappers.mapper import Mapper
from mappers.models import LoadedModel
from mappers.summary import RESAMPLES, Interval
from mappers.task_model import readers
from mappers.translate import Translator

Floats = NDArray[np.float64]


class TaskScore(NamedTuple):
    """One task: shares of right answers, and how much of the target's the translation keeps.

    ``chance`` is the mean of 1 / choices. ``retention`` is translated / native, ``floor_retention``
    (translated - chance) / (native - chance): retention alone flatters, for guessing keeps some.
    ``gap_recovered`` is (translated - source) / (native - source): 0 is what the source gives by
    itself. NaN where undefined. Intervals (95 %) are resampled over questions, paired.
    """

    task: str
    questions: int
    native: float
    translated: float
    source: float
    chance: float
    retention: float
    retention_interval: Interval
    floor_retention: float
    floor_retention_interval: Interval
    gap_recovered: float


def score_tasks(
    mapper: Mapper,
    source: LoadedModel,
    target: LoadedModel,
    files: list[Path],
    *,
    native_tail: int = 32,
    limit: int | None = None,
) -> list[TaskScore]:
    """Score the tasks in ``files``, of each at most ``limit`` questions, with three readers.

    Raises UnsupportedTask for a file that is not a multiple-choice task.
    """
    translator = Translator(mapper, device=target.model.device)
    models = readers(source, target, translator, mapper.prefixes, native_tail=native_tail)
    found = {name: _answers(model, files, limit) for name, model in models.items()}
    return [
        _score(
            task, found["native"][task], found["translated"][task], found["source"][task], chances
        )
        for task, chances in _chances(files, limit).items()
    ]


def task_config(file: Path) -> dict[str, Any]:
    """The lm-eval config that a task file stands for."""
    config = _questions(file) if file.suffix == ".jsonl" else _yaml(file)
    if config.get("output_type") != "multiple_choice" or "task" not in config:
        raise UnsupportedTask("a task file needs a task name and output_type: multiple_choice")
    return config


def _questions(file: Path) -> dict[str, Any]:
    return {
        "task": file.stem,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file.resolve())}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def _yaml(file: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UnsupportedTask("the task file is not plain YAML") from error
    if not isinstance(config, dict):
        raise UnsupportedTask("the task file is not a YAML mapping")
    given = config.get("dataset_kwargs", {}).get("data_files")
    if isinstance(given, str):
        given = {config.get("test_split", "test"): given}
    if isinstance(given, dict):
        beside = {split: str((file.parent / name).resolve()) for split, name in given.items()}
        config["dataset_kwargs"]["data_files"] = beside
    return config


def _answers(model: Any, files: list[Path], limit: int | None) -> dict[str, Floats]:
    """1 for each question answered right, else 0, by task and in the questions' order."""
    results = run_tasks(model, _loaded(files), limit=limit, bootstrap_iters=0, log_samples=True)
    answers = {}
    for task, samples in results["samples"].items():
        ordered = sorted(samples, key=lambda sample: sample["doc_id"])
        if any("acc" not in sample for sample in ordered):
            raise UnsupportedTask("the task's metrics must include acc")
        answers[task] = np.asarray([sample["acc"] for sample in ordered], dtype=np.float64)
    return answers


def _chances(files: list[Path], limit: int | None) -> dict[str, Floats]:
    """1 / choices of every question, by task."""
    found = {}
    for name, task in _loaded(files)["tasks"].items():
        documents = list(task.eval_docs)[:limit]
        found[name] = np.asarray([1 / len(task.doc_to_choice(doc)) for doc in documents])
    return found


def _loaded(files: list[Path]) -> Any:
    manager = TaskManager(include_defaults=False)
    return manager.load([task_config(file) for file in files])


def _score(
    task: str, native: Floats, translated: Floats, source: Floats, chances: Floats
) -> TaskScore:
    count, chance = len(native), float(chances.mean())
    chosen = np.random.default_rng(0).integers(0, count, size=(RESAMPLES, count))
    own, moved, floor = (x[chosen].mean(axis=1) for x in (native, translated, chances))
    n, t, s = (float(x.mean()) for x in (native, translated, source))
    return TaskScore(
        task=task,
        questions=count,
        native=n,
        translated=t,
        source=s,
        chance=chance,
        retention=_ratio(t, n),
        retention_interval=_interval(moved, own),
        floor_retention=_ratio(t - chance, n - chance),
        floor_retention_interval=_interval(moved - floor, own - floor),
        gap_recovered=_ratio(t - s, n - s),
    )


def _ratio(part: float, whole: float) -> float:
    """``part / whole``; NaN where there is nothing to keep."""
    return part / whole if whole > 0 else math.nan


def _interval(parts: Floats, wholes: Floats) -> Interval:
    usable = wholes > 0
    if not usable.all():
        return math.nan, math.nan
    low, high = np.quantile(parts / wholes, [0.025, 0.975])
    return float(low), float(high)
