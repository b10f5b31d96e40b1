"""Digests of source text: what was made by other code than today's is made again.

They are taken once, for a process runs the code that it has loaded.
"""

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import mappers

LIBRARY = Path(mappers.__file__).parent
BENCH = Path(__file__).parent
SUMMING = ("moments.py", "collect.py", "geometry.py", "cache.py", "hf_compat.py", "rope*.py")
FITTING = (
    "candidates.py",
    "controls.py",
    "defaults.py",
    "growth.py",
    "low_rank.py",
    "rejected.py",
    "rows.py",
    "sums.py",
)


@cache
def summing() -> str:
    """Of the code that sums follow from."""
    return digest([*(file for name in SUMMING for file in LIBRARY.glob(name)), BENCH / "sums.py"])


@cache
def fitting() -> str:
    """Of the whole library, which fits and translates, and of what is fitted here."""
    return digest([*LIBRARY.rglob("*.py"), *(BENCH / name for name in FITTING)])


def digest(files: Iterable[Path]) -> str:
    """Of the files' names and bytes; the order in which they are given does not matter."""
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]
