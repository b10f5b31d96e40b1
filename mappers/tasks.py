"""Multiple-choice tasks, scored by lm-eval: what a translation costs in right answers.

A task file is lm-eval's own YAML (without its ``!function`` tags; files named in ``data_files`` are
looked for beside it), or jsonl with one question a line: ``{"question": "...", "choices": ["...",
...], "answer": 0}``. Nothing is downloaded for either. Needs the extra ``tasks``.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import datasets  # type: ignore[import-untyped]
import numpy as np
import yaml
from lm_eval.evaluator import evaluate as run_tasks
from lm_eval.tasks import TaskManager
from numpy.typing import NDArray

from mappers.errors import UnsupportedTask
from mappers.evaluate import digest_of
from mappers.evidence_rows import TaskMeasure, TaskRow
from mappers.mapper import Mapper
from mappers.models import LoadedModel
from mappers.summary import RESAMPLES
from mappers.task_model import readers
from mappers.translate import Translator

Floats = NDArray[np.float64]
MEASURES: tuple[TaskMeasure, ...] = get_args(TaskMeasure)


def score_tasks(
    mapper: Mapper,
    source: LoadedModel,
    target: LoadedModel,
    files: Sequence[Path],
    *,
    native_tail: int = 32,
    work: Path | None = None,
    progress: bool = True,
) -> tuple[TaskRow, ...]:
    """Score the tasks in ``files`` with three readers, one row a measure.

    A question but its last ``native_tail`` tokens is translated. A task that was scored before is
    taken from ``work``. Raises UnsupportedTask for a file that is not a multiple-choice task,
    before any model runs.
    """
    configs = [task_config(file) for file in files]
    translator = Translator(mapper, device=target.model.device)
    models = readers(
        source, target, translator, mapper.prefixes, native_tail=native_tail, progress=progress
    )
    rows: list[TaskRow] = []
    for config in configs:
        kept = None
        if work is not None:
            digest = digest_of([mapper], ["tasks-1", config, _contents(config), native_tail])
            kept = work / f"task-{digest[:16]}.json"
        if kept is None or not kept.exists():
            found = _task_rows(config, native_tail, _answers(models, config))
            if kept is None:
                rows += found
                continue
            _write(kept, found)
        rows += (TaskRow.model_validate(row) for row in json.loads(kept.read_text()))
    return tuple(rows)


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


def _contents(config: Mapping[str, Any]) -> list[str]:
    """Digests of the data files that a task names."""
    files = config.get("dataset_kwargs", {}).get("data_files") or {}
    return [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in files.values()]


def _answers(models: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Floats]:
    """By reader, 1 for each question answered right, else 0; and 1 / choices as ``chance``."""
    datasets.disable_progress_bars()
    found = {reader: _right(model, _loaded(config)) for reader, model in models.items()}
    (task,) = _loaded(config)["tasks"].values()
    chances = [1 / len(task.doc_to_choice(document)) for document in task.eval_docs]
    return {**found, "chance": np.asarray(chances)}


def _right(model: Any, task: Any) -> Floats:
    results = run_tasks(model, task, bootstrap_iters=0, log_samples=True)
    (samples,) = results["samples"].values()
    ordered = sorted(samples, key=lambda sample: sample["doc_id"])
    if any("acc" not in sample for sample in ordered):
        raise UnsupportedTask("the task's metrics must include acc")
    return np.asarray([sample["acc"] for sample in ordered], dtype=np.float64)


def _loaded(config: dict[str, Any]) -> Any:
    return TaskManager(include_defaults=False).load([config])


def _task_rows(
    config: Mapping[str, Any], native_tail: int, answers: Mapping[str, Floats]
) -> list[TaskRow]:
    """All measures of one task; their intervals are resampled over questions, together."""
    count = len(answers["native"])
    chosen = np.random.default_rng(0).integers(0, count, size=(RESAMPLES, count))
    chosen = np.concatenate([np.arange(count)[None], chosen])
    found = _measures({name: values[chosen].mean(axis=1) for name, values in answers.items()})
    rows = []
    for name in MEASURES:
        low, high = np.quantile(found[name][1:], [0.025, 0.975])
        value, low, high = (float(f"{x:.6g}") for x in (found[name][0], low, high))
        rows.append(
            TaskRow(
                task=str(config["task"]),
                native_tail=native_tail,
                questions=count,
                measure=name,
                value=value,
                low=low,
                high=high,
            )
        )
    return rows


def _measures(means: Mapping[str, Floats]) -> dict[TaskMeasure, Floats]:
    """Each measure from shares of right answers, resample by resample."""
    native, translated, source, chance = (
        means[name] for name in ("native", "translated", "source", "chance")
    )
    return {
        "native": native,
        "translated": translated,
        "source": source,
        "chance": chance,
        "retention": _ratio(translated, native),
        "floor_retention": _ratio(translated - chance, native - chance),
        "gap_recovered": _ratio(translated - source, native - source),
    }


def _ratio(part: Floats, whole: Floats) -> Floats:
    """``part / whole``; NaN where there is nothing to keep."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(whole > 0, part / whole, np.nan)


def _write(path: Path, rows: Sequence[TaskRow]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps([row.model_dump(mode="json") for row in rows]))
    temporary.rename(path)
