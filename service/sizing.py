"""One artifact loaded as a server loads it, and what that took."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from mappers.bench_hardware import forget_peak, peak_bytes, resident_bytes
from service.commands.serve import settings_from
from service.loaded import Loaded
from service.logs import configure
from service.store import Store


class Load(NamedTuple):
    """``peak_bytes``: how far the process grew at most; None where the system does not say."""

    seconds: float
    artifact_bytes: int
    peak_bytes: int | None


@contextlib.contextmanager
def loaded_artifact(path: Path, device: str) -> Iterator[tuple[Loaded, Load]]:
    """The mapper as the store has it, unproven or not, as long as the block lasts.

    Raises what a store raises for an artifact that it cannot load.
    """
    settings = settings_from(
        artifacts=(path,), device=device, allow_unproven=True, state=None, log_level="error"
    )
    configure(settings)
    store = Store(settings, _at_once)
    try:
        (entry,) = store.entries
        forget_peak()
        before = resident_bytes()
        store.load(entry)
        peak = peak_bytes()
        grown = None if peak is None or before is None else peak - before
        size = sum(file.stat().st_size for file in path.iterdir())
        yield entry.loaded, Load(entry.load_seconds or 0.0, size, grown)
        store.unload(entry)
    finally:
        store.close()


def _at_once(work: Callable[[], None]) -> None:
    work()
