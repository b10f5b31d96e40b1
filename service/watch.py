"""New and changed artifacts in the configured folders, found by looking at them now and then.

Artifacts are published by a rename, so one look sees a whole folder; names that begin with a dot
are unfinished and never looked at. Where files are copied into place instead, a folder counts when
two looks in a row see the same files. Whatever is found is verified by its digest when it is read.
"""

import asyncio
import os
from pathlib import Path

import structlog

from service.store import Store

log = structlog.get_logger("service.watch")

Stamp = tuple[tuple[str, int, int, int], ...]


class Watch:
    """What the last look has seen, and what the store was told of."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._told = {entry.path: _stamp(entry.path) for entry in store.entries}
        self._seen = dict(self._told)

    def look(self) -> None:
        """Have the store load what is new or has changed."""
        now = {path: _stamp(path) for path in self._store.folders()}
        for path, stamp in now.items():
            settled = stamp and stamp == self._seen.get(path)
            news = stamp != self._told.get(path) or self._store.behind(path)
            if settled and news and self._store.take_up(path):
                self._told[path] = stamp
        self._seen = now

    async def run(self, every_seconds: float) -> None:
        """Look again and again, off the event loop."""
        while True:
            await asyncio.sleep(every_seconds)
            try:
                await asyncio.to_thread(self.look)
            except OSError as error:  # a disk that is away comes back
                log.warning("artifacts not looked at", why=error.strerror)


def _stamp(folder: Path) -> Stamp:
    """Name, inode, size and time of each file; empty for a folder that is not there now."""
    try:
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(folder)]
    except OSError:
        return ()
    return tuple(sorted((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in found))
