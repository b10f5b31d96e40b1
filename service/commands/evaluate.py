"""``kvt evaluate``: measure a mapper again, on other text or longer prompts."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from mappers.errors import IdentityMismatch
from service.commands import models
from service.commands.exits import Code, Failure, say
from service.commands.options import Config, Device
from service.commands.texts import by_domain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mappers.artifact import Artifact
    from mappers.corpus import Corpus
    from mappers.evidence_rows import TaskRow
    from mappers.identity import ModelIdentity
    from mappers.mapper import Mapper
    from mappers.models import LoadedModel, ModelSpec


@models.pair_options
def evaluate(
    artifact: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Its folder.")],
    source: "ModelSpec",
    target: "ModelSpec",
    held_out: Annotated[
        list[str],
        typer.Option(
            metavar="DOMAIN=PATH",
            help="Text that was never fitted on. A jsonl line is a document of its own, unless "
            "lines share a name: they are pieces of one.",
        ),
    ],
    config: Config = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents of a domain and length.")] = 64,
    lengths: Annotated[
        list[int] | None, typer.Option(help="Prompt tokens.", show_default="128 256 512 1024")
    ] = None,
    native_tails: Annotated[
        list[int] | None, typer.Option(help="Native tails.", show_default="1 32 128 512")
    ] = None,
    reverse: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Artifact of the reverse pair: hops and drift are measured too.",
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="Share of answers that may exceed a threshold; too few documents fail."),
    ] = None,
    delta: Annotated[float, typer.Option(help="1 - confidence of alpha.")] = 0.05,
    deep_documents: Annotated[
        int, typer.Option(min=0, help="Of each domain: layers, curve, drift, continuations.")
    ] = 8,
    hops: Annotated[int, typer.Option(min=0, help="Earlier translations, with --reverse.")] = 2,
    turns: Annotated[int, typer.Option(min=1, help="Turns of the drift, with --reverse.")] = 6,
    tasks: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Multiple-choice tasks to score: lm-eval YAML or jsonl. Needs the extra tasks.",
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the domains and tasks that are not measured again.")
    ] = False,
    work: Annotated[
        Path | None,
        typer.Option(help="What is measured is kept here until it is done: a stopped run resumes."),
    ] = None,
    device: Device = "cpu",
) -> None:
    """Measure a mapper on text and put the evidence and the report into its artifact.

    What was measured before is replaced, unless --keep. An interrupted evaluation resumes.
    """
    from mappers import artifact as artifacts
    from mappers.bench import Depth
    from mappers.evaluate import evaluate as measure
    from mappers.evaluate import evaluation_texts, merged, require_documents
    from mappers.models import load_model
    from mappers.plan import FitPlan
    from mappers.report import render

    del config
    score = scorer() if tasks else None
    models.quiet()
    texts = by_domain(held_out)
    loaded = artifacts.load(artifact)
    small, large = (load_model(side, device=device) for side in (source, target))
    check_model("source", loaded.mapper.source, small.identity)
    check_model("target", loaded.mapper.target, large.identity)
    defaults = FitPlan.model_fields
    prompts = tuple(lengths or defaults["lengths"].default)
    corpora = evaluation_texts(texts, small, large, lengths=prompts, documents=documents)
    refuse_calibrated(loaded, corpora)
    if alpha is not None:
        require_documents(corpora, prompts, alpha=alpha, delta=delta)
    folder = work or artifact.resolve().parent / f".evaluate-{loaded.manifest.mapper_id}"
    scores: tuple[TaskRow, ...] = ()
    if score is not None:
        scores = score(loaded.mapper, small, large, tasks or (), work=folder)
        print_scores(scores)
    evidence = measure(
        loaded.mapper,
        small,
        large,
        corpora,
        profile=loaded.profile,
        probe_queries=loaded.probe_queries,
        lengths=prompts,
        native_tails=tuple(native_tails or defaults["native_tails"].default),
        reverse=None if reverse is None else reverse_mapper(reverse, small, large),
        depth=Depth(documents=deep_documents, hops=hops, turns=turns),
        work=folder,
    )
    evidence = evidence.model_copy(update={"tasks": scores})
    evidence = merged(loaded.evidence if keep else None, evidence)
    report = render(loaded.manifest, evidence)
    typer.echo(artifacts.add_evidence(artifact, evidence, report))
    if work is None:
        shutil.rmtree(folder, ignore_errors=True)


def scorer() -> "Callable[..., tuple[TaskRow, ...]]":
    """What scores tasks. Raises Failure (usage) where the extra is not installed."""
    try:
        from mappers.tasks import score_tasks
    except ModuleNotFoundError as error:
        if error.name not in ("lm_eval", "datasets"):
            raise
        message = "tasks are scored by lm-eval: pip install 'kv-translator[tasks]'"
        raise Failure(Code.USAGE, message) from error
    return score_tasks


def refuse_calibrated(artifact: "Artifact", corpora: "Mapping[str, Corpus]") -> None:
    """Raise CorpusError for text that the mapper was fitted on; warn where it cannot be known."""
    from mappers.corpus import refuse_overlap

    calibration = artifact.manifest.calibration
    if calibration is None or calibration.document_digests is None:
        say("the artifact does not list its calibration documents: held-out text is not checked")
        return
    for corpus in corpora.values():
        refuse_overlap(calibration.document_digests, corpus)


def print_scores(rows: "Sequence[TaskRow]") -> None:
    """A line a task on the error stream: every measure with its 95 % interval."""
    measures = list(dict.fromkeys(row.measure for row in rows))
    table = Table("task", "questions", *(name.replace("_", " ") for name in measures))
    for task in dict.fromkeys(row.task for row in rows):
        of_task = {row.measure: row for row in rows if row.task == task}
        cells = [f"{r.value:.3f}\n{r.low:.3f} to {r.high:.3f}" for r in of_task.values()]
        table.add_row(task, str(of_task["native"].questions), *cells)
    Console(stderr=True).print(table)


def reverse_mapper(folder: Path, source: "LoadedModel", target: "LoadedModel") -> "Mapper":
    """The mapper from ``target`` to ``source``; raises IdentityMismatch for any other."""
    from mappers import artifact as artifacts

    mapper = artifacts.load(folder).mapper
    check_model("source", mapper.source, target.identity)
    check_model("target", mapper.target, source.identity)
    return mapper


def check_model(side: str, fitted: "ModelIdentity", given: "ModelIdentity") -> None:
    """Raise IdentityMismatch for the first field in which a loaded model differs."""
    for name in type(fitted).model_fields:
        expected, found = getattr(fitted, name), getattr(given, name)
        if expected != found:
            raise IdentityMismatch(side, name, expected, found)
