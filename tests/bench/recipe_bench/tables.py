"""The tables that people read."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from mappers.summary import Setting
from recipe_bench.results import Ratio, Result, TableRow, kls, ratio, translated

console = Console(width=200)
DOMAINS = ("in_domain", "out_of_domain")
COLUMNS = (
    ("1, mapped", 1, "mapped"),
    ("32, mapped", 32, "mapped"),
    ("1", 1, "exact"),
    ("32", 32, "exact"),
    ("64", 64, "exact"),
    ("128", 128, "exact"),
)
PUBLISHED = ("paper", "CacheBridge", "aither")


def print_tables(rows: Sequence[TableRow], results: Sequence[Result]) -> None:
    """Of each pair: KLs, other measures, and ratios to the tail alone and to published recipes."""
    for pair in dict.fromkeys(row.pair for row in rows):
        own = [row for row in rows if row.pair == pair]
        console.print(_kl_table(pair, own))
        console.print(_measures_table(pair, own))
        console.print(_tail_table(pair, own))
        console.print(_ratio_table(pair, [r for r in results if r.pair == pair]))


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


def _ratio_table(pair: str, results: Sequence[Result]) -> Table:
    """Ours against each published recipe, ours being the best at no more FLOPs (in domain, 32)."""
    title = f"{pair}: KL of our best at no more FLOPs over KL as published [95 %], in / out"
    table = Table(title=title)
    for heading in ("published", "ours", "tail 1", "tail 32", "fit seconds, theirs / ours"):
        table.add_column(heading)
    for other in results:
        if other.recipe.startswith(PUBLISHED):
            own = _best(results, other.flops_per_token)
            if own is not None:
                cells = (_ratios(own, other, tail) for tail in (1, 32))
                speed = f"{other.fit_seconds / own.fit_seconds:.1f}"
                table.add_row(other.recipe, own.recipe, *cells, speed)
    return table


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


def _best(results: Sequence[Result], flops: int) -> Result | None:
    """Of ours that cost no more; of those not measured on as many documents none."""
    setting = translated("in_domain", 32, known=True)
    able = [
        result
        for result in results
        if not result.recipe.startswith((*PUBLISHED, "control"))
        and "documents" not in result.recipe
        and result.flops_per_token <= flops
        and kls(result.rows, setting)
    ]
    return min(able, key=lambda result: _mean(result, setting), default=None)


def _mean(result: Result, setting: Setting) -> float:
    found = kls(result.rows, setting)
    return sum(found.values()) / len(found)


def _ratios(own: Result, other: Result, tail: int) -> str:
    """Ours with its first token exact, theirs as published, with it mapped."""
    found = [
        ratio(
            kls(own.rows, translated(domain, tail, known=True)),
            kls(other.rows, translated(domain, tail, known=False)),
        )
        for domain in DOMAINS
    ]
    return " / ".join(_ratio(one) for one in found)


def _ratio(found: Ratio) -> str:
    return f"{found.ratio:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _by_recipe(rows: Sequence[TableRow]) -> dict[str, list[TableRow]]:
    found: dict[str, list[TableRow]] = {}
    for row in rows:
        if "documents" not in row.recipe:
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
