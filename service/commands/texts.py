"""Options for text: which files, and of which domain."""

from pathlib import Path

import typer


def by_domain(given: list[str]) -> dict[str, tuple[Path, ...]]:
    """``["chat=a.jsonl", "chat=b", "code=c"]`` as paths by domain. Raises BadParameter."""
    found: dict[str, tuple[Path, ...]] = {}
    for entry in given:
        domain, mark, path = entry.partition("=")
        if not mark or not domain or not path:
            raise typer.BadParameter("held-out text is given as DOMAIN=PATH")
        found[domain] = (*found.get(domain, ()), Path(path))
    return found
