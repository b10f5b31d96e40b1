"""The tables that people read."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.bench.recipe_bench.candidates import Group
from tests.bench.recipe_bench.results import Ratio, TableRow
from tests.bench.recipe_bench.verdict import DOMAINS, Speed, Verdict

console = Console(width=200)
COLUMNS = (
    ("1, mapped", 1, "mapped"),
    ("32, mapped", 32, "mapped"),
    ("1", 1, "exact"),
    ("32", 32, "exact"),
    ("64", 64, "exact"),
    ("128", 128, "exact"),
)


def print_tables(rows: Sequence[TableRow]) -> None:
    """Of each pair: KLs, other measures, and ratios to the tail alone."""
    for pair in dict.fromkeys(row.pair for row in rows):
        own = [row for row in rows if row.pair == pair]
        console.print(_kl_table(pair, own))
        console.print(_measures_table(pair, own))
        console.print(_tail_table(pair, own))


def print_verdicts(verdicts: Sequence[Verdict], speeds: Sequence[Speed]) -> None:
    """All promises, one line each, met or missed."""
    table = Table(title="KL of the defaults over that of others [95 %], the aim at most")
    for heading in ("pair", "ours", "other", "tail", "first token", "domain"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ratio", "aim", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in verdicts:
        named = (one.pair, one.ours, one.other, str(one.native_tail), one.first_token)
        table.add_row(*named, one.domain, _ratio(one.ratio), f"{one.aim:.1f}", _met(one))
    console.print(table)
    table = Table(title="CPU seconds of their fit over those of ours, the aim at least")
    for heading in ("pair", "ours", "other", "ratio", "aim", ""):
        table.add_column(heading, no_wrap=True)
    for speed in speeds:
        sides = (speed.pair, speed.ours, speed.other)
        table.add_row(*sides, f"{speed.ratio:.2f}", f"{speed.aim:.1f}", _met(speed))
    console.print(table)


def _met(promise: Verdict | Speed) -> str:
    return "met" if promise.met else "missed"


def _ratio(found: Ratio) -> str:
    return f"{found.ratio:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _kl_table(pair: str, rows: Sequence[TableRow]) -> Table:
    documents = max(row.documents for row in rows)
    title = f"{pair}: KL in / out of domain by native tail and first token, {documents} documents"
    table = Table(title=title)
    table.add_column("recipe", no_wrap=True)
    for heading in ("MFLOP/token", "MB", "fit s", *(name for name, *_ in COLUMNS)):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, own in _by_recipe(rows).items():
        table.add_row(name, *_costs(own[0]), *(_kls(own, *column[1:]) for column in COLUMNS))
    return table


def _measures_table(pair: str, rows: Sequence[TableRow]) -> Table:
    """Intervals, top-1 agreement, gap and context recovered, in domain."""
    table = Table(title=f"{pair}: in domain, first token exact, by native tail")
    table.add_column("recipe", no_wrap=True)
    for tail in (1, 32, 128):
        table.add_column(f"{tail}: KL [95 %]", justify="right", no_wrap=True)
        table.add_column("top-1 / gap / context", justify="right", no_wrap=True)
    for name, own in _by_recipe(rows).items():
        cells: list[str] = []
        for tail in (1, 32, 128):
            row = _find(own, DOMAINS[0], tail, ("exact", "none"))
            cells += _measures(row) if row else ["-"] * 2
        table.add_row(name, *cells)
    return table


def _measures(row: TableRow) -> list[str]:
    interval = f"{row.kl:.3f} [{row.kl_low:.3f}, {row.kl_high:.3f}]"
    recovered = f"{row.gap_recovered:5.2f} / {row.context_recovered:4.2f}"
    return [interval, f"{100 * row.top1:.0f} % / {recovered}"]


def _tail_table(pair: str, rows: Sequence[TableRow]) -> Table:
    """Every recipe of ours and others against what the tail does alone, mean over mean."""
    table = Table(title=f"{pair}: KL over that of reading only the tail, in / out")
    table.add_column("recipe", no_wrap=True)
    tails = (32, 64, 128)
    for tail in tails:
        table.add_column(f"tail {tail}", justify="right", no_wrap=True)
    alone = {
        (row.domain, row.native_tail): row.kl
        for row in rows
        if row.recipe == "control: only the tail"
    }
    for name, own in _by_recipe(rows).items():
        found = [[_find(own, domain, tail, ("exact",)) for domain in DOMAINS] for tail in tails]
        if found[0][0] is not None and not name.startswith("control"):
            table.add_row(name, *(_shares(of_tail, alone) for of_tail in found))
    return table


def _shares(rows: Sequence[TableRow | None], alone: dict[tuple[str, int], float]) -> str:
    return " / ".join(
        "-" if row is None else f"{row.kl / alone[row.domain, row.native_tail]:.2f}" for row in rows
    )


def _by_recipe(rows: Sequence[TableRow]) -> dict[str, list[TableRow]]:
    found: dict[str, list[TableRow]] = {}
    for row in rows:
        if row.group != Group.GROWTH:
            found.setdefault(row.recipe, []).append(row)
    return found


def _costs(row: TableRow) -> list[str]:
    if not row.flops_per_token:
        return ["-"] * 3
    seconds = f"{row.fit_seconds:.0f}" if row.fit_seconds else "-"
    return [f"{row.flops_per_token / 1e6:.2f}", f"{row.bytes / 1e6:.1f}", seconds]


def _kls(rows: Sequence[TableRow], tail: int, first: str) -> str:
    found = [_find(rows, domain, tail, (first, "none")) for domain in DOMAINS]
    if first == "mapped":
        found = [row if row and row.first_token == first else None for row in found]
    return " / ".join("-" if row is None else f"{row.kl:.3f}" for row in found)


def _find(
    rows: Sequence[TableRow], domain: str, tail: int, first: tuple[str, ...]
) -> TableRow | None:
    def fits(row: TableRow) -> bool:
        # The source alone has no tail: it is shown under the first.
        same = row.native_tail == tail or (row.native_tail == 0 and tail == 1)
        return row.domain == domain and same and row.first_token in first

    return next((row for row in rows if fits(row)), None)
