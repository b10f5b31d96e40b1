"""What a benchmark says: a JSON line a row as it is measured, and all rows as a table at last."""

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


def told(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Print the rows as they come, then a table of them on stderr; all of them."""
    found: list[Row] = []
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        found.append(dict(row))
    if found:
        _show(found)
    return found


def _show(rows: list[Row]) -> None:
    """The columns that differ from row to row; what all have in common stands above."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    common = {n: rows[0].get(n) for n in names if len({_cell(row, n) for row in rows}) == 1}
    differing = [name for name in names if name not in common]
    title = ", ".join(f"{name}: {value}" for name, value in common.items())
    table = Table(*differing, box=box.SIMPLE, title=title, title_justify="left", pad_edge=False)
    for row in rows:
        table.add_row(*(_cell(row, name) for name in differing))
    console = Console(stderr=True)
    # In a file, where nobody folds lines, a table may be as wide as it is.
    console.width = console.width if console.is_terminal else 250
    console.print(table)


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items()) or "-"
    return "-" if value is None else str(value)
