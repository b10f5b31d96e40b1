"""What outlives the process: one SQLite file with a secret, the breakers, and shadowed answers.

One thread owns the connection, so statements never wait on the event loop and need no locks. The
journal is a write-ahead log: what was committed survives the end of the process at any point; a
loss of power may take the last moments, never the file. The file is ours alone while we run.
"""

import asyncio
import contextlib
import os
import secrets
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog
from pydantic import TypeAdapter, ValidationError

from mappers.errors import KVTranslatorError
from mappers.identity import shown
from service.breaker import Breaker, Key

log = structlog.get_logger("service.state_file")

Result = TypeVar("Result")

VERSION = 1
MAX_ANSWERS = 100_000
MAX_BREAKERS = 4096
SECRET_BYTES = 32
_SCHEMA = """
CREATE TABLE IF NOT EXISTS secret (one INTEGER PRIMARY KEY CHECK (one = 1), value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS breakers (
    mapper TEXT, digest TEXT, domain TEXT, max_tokens INTEGER, state TEXT NOT NULL,
    changed_seconds REAL NOT NULL, PRIMARY KEY (mapper, digest, domain, max_tokens)
);
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL,
    mapper TEXT NOT NULL, digest TEXT NOT NULL, domain TEXT NOT NULL, max_tokens INTEGER NOT NULL,
    client TEXT NOT NULL, max_kl REAL NOT NULL, issued_seconds REAL NOT NULL,
    value TEXT, counted INTEGER
);
CREATE INDEX IF NOT EXISTS by_age ON answers (issued_seconds);
"""
_BREAKER = TypeAdapter(Breaker)


class StateError(KVTranslatorError):
    """The state file cannot be used; it is never replaced by an empty one."""

    code = "state_error"


class Answer(NamedTuple):
    """A shadowed answer. ``value`` is what was posted for it, None before; ``client`` is hashed."""

    id: str
    key: Key
    client: str
    max_kl: float
    issued_seconds: float
    value: str | None = None
    counted: int | None = None


class StateFile:
    """``path`` None keeps everything in memory. Raises StateError when the file is no good.

    All methods but ``run``, ``later`` and ``close`` belong to the owner thread: call them in the
    first two.
    """

    def __init__(self, path: Path | None) -> None:
        self._owner = ThreadPoolExecutor(1, "kvt-state")
        try:
            self._db = _open(path)
            self.secret = _secret(self._db)
        except (sqlite3.Error, OSError) as error:
            raise StateError(_why(error)) from error

    async def run(self, work: Callable[[], Result]) -> Result:
        """Do it on the owner thread; what it raises is raised here."""
        return await asyncio.get_running_loop().run_in_executor(self._owner, work)

    def later(self, work: Callable[[], None]) -> None:
        """Have it done before anything that is asked for after it; nobody waits, and what cannot be
        done, because the file cannot be written or is closed, is left."""
        with contextlib.suppress(RuntimeError):
            self._owner.submit(work).add_done_callback(_say_failed)

    def close(self) -> None:
        """When all work is done."""
        self._owner.shutdown(wait=True)
        self._db.close()

    def breakers(self) -> dict[Key, Breaker]:
        """All that are kept. Raises StateError for one that cannot be read."""
        rows = self._db.execute("SELECT mapper, digest, domain, max_tokens, state FROM breakers")
        try:
            return {Key(*row[:4]): _BREAKER.validate_json(row[4]) for row in rows}
        except ValidationError as error:
            fault = error.errors(include_input=False, include_url=False, include_context=False)[0]
            field = shown(".".join(map(str, fault["loc"])))
            message = f"a breaker of the state file is not of version {VERSION}"
            raise StateError(f"{message}: {field}: {fault['msg']}") from error

    def add(self, answer: Answer, *, forget: float) -> None:
        """Remember an answer; those issued before ``forget``, and too many, are forgotten."""
        row = (answer.id, *answer.key, answer.client, answer.max_kl, answer.issued_seconds)
        with self._db:
            added = self._db.execute(
                "INSERT INTO answers (id, mapper, digest, domain, max_tokens, client, max_kl,"
                " issued_seconds) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            oldest = (added.lastrowid or 0) - MAX_ANSWERS
            self._db.execute(
                "DELETE FROM answers WHERE issued_seconds < ? OR number <= ?",
                (forget, oldest),
            )

    def forget(self, answer_id: str) -> None:
        """An answer was not given after all; what was posted for it stays."""
        with self._db:
            self._db.execute("DELETE FROM answers WHERE id = ? AND value IS NULL", (answer_id,))

    def answer(self, answer_id: str) -> Answer | None:
        """The shadowed answer of this id."""
        row = self._db.execute(
            "SELECT id, mapper, digest, domain, max_tokens, client, max_kl, issued_seconds,"
            " value, counted FROM answers WHERE id = ?",
            (answer_id,),
        ).fetchone()
        return None if row is None else Answer(row[0], Key(*row[1:5]), *row[5:])

    def served(self) -> list[tuple[Key, str, float]]:
        """Each client of each breaker with the time of its last shadowed answer, oldest first."""
        rows = self._db.execute(
            "SELECT mapper, digest, domain, max_tokens, client, MAX(issued_seconds) FROM answers"
            " GROUP BY 1, 2, 3, 4, 5 ORDER BY 6"
        )
        return [(Key(*row[:4]), row[4], row[5]) for row in rows]

    def settle(
        self, answer_id: str, value: str, key: Key, breaker: Breaker | None, now: float
    ) -> None:
        """The value of an answer, and with it the breaker that it moved: both or neither."""
        with self._db:
            self._db.execute(
                "UPDATE answers SET value = ?, counted = ? WHERE id = ?",
                (value, breaker is not None, answer_id),
            )
            if breaker is not None:
                self._put(key, breaker, now)

    def _put(self, key: Key, breaker: Breaker, now: float) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO breakers VALUES (?, ?, ?, ?, ?, ?)",
            (*key, _BREAKER.dump_json(breaker).decode(), now),
        )
        # Artifacts come and go; the breakers of those that went are the oldest.
        self._db.execute(
            "DELETE FROM breakers WHERE rowid IN"
            " (SELECT rowid FROM breakers ORDER BY changed_seconds DESC LIMIT -1 OFFSET ?)",
            (MAX_BREAKERS,),
        )


def _say_failed(work: Future[None]) -> None:
    error = work.exception()
    if error is not None:
        log.error("the state file was not changed", fault=type(error).__name__)


def _why(error: sqlite3.Error | OSError) -> str:
    """What was found in place of a state file that we may write, without its path."""
    if isinstance(error, OSError):
        return f"the state file cannot be opened for writing: {error.strerror}"
    match getattr(error, "sqlite_errorname", ""):
        case "SQLITE_BUSY" | "SQLITE_LOCKED":
            return "the state file is in use by another process, expected one of our own"
        case "SQLITE_NOTADB" | "SQLITE_CORRUPT":
            return "the state file is damaged, or is none: expected an SQLite database"
        case name:
            return f"the state file cannot be used, expected one that can be written: {name}"


def _open(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        # The secret is inside; SQLite gives its journal the mode of the file.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    db = sqlite3.connect(path or ":memory:", timeout=1.0, check_same_thread=False)
    try:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        _check_version(db)
        db.executescript(_SCHEMA)
    except (sqlite3.Error, StateError):
        db.close()
        raise
    return db


def _check_version(db: sqlite3.Connection) -> None:
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found not in (0, VERSION):
        raise StateError(f"the state file has version {found}, expected {VERSION}")
    with db:
        db.execute(f"PRAGMA user_version = {VERSION}")


def _secret(db: sqlite3.Connection) -> bytes:
    with db:
        db.execute(
            "INSERT OR IGNORE INTO secret VALUES (1, ?)", (secrets.token_bytes(SECRET_BYTES),)
        )
    (value,) = db.execute("SELECT value FROM secret").fetchone()
    return bytes(value)
