"""One progress bar, on the error stream, for every long loop."""

from collections.abc import Iterable

from rich.console import Console
from rich.progress import track


def steps(numbers: range, description: str, *, show: bool) -> Iterable[int]:
    """``numbers`` with a bar that disappears when it is done; ``show`` False: without one."""
    console = Console(stderr=True)
    return track(numbers, description, console=console, disable=not show, transient=True)
