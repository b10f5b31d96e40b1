"""Folders of files that are published whole and verified before use.

Publishing ``<root>/<name>``: everything is written to ``.<name>.new`` beside it, each file and the
folder are flushed to disk, then the names change:

1. an old ``<name>`` becomes ``.<name>.previous``,
2. ``.<name>.new`` becomes ``<name>``, and ``<root>`` is flushed,
3. ``.<name>.previous`` becomes ``.<name>.gone`` and is deleted.

A rename cannot replace a folder that has files, so for a moment between 1 and 2 there is no
``<name>``; a crash can make that moment last. Readers then take ``.<name>.previous``, which is
complete, and the next publication puts it back first. No name that a reader opens ever names a
folder that is being written or deleted. Publishers of one root take turns by a lock on the folder.

``SHA256SUMS`` lists every other file in the form that ``sha256sum -c`` reads. Its own SHA-256 is
the digest of the folder. Files are read once, into memory: what was hashed is what is used, and a
file that changes on disk later can neither change nor kill its reader (a memory map would do both).
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mappers.errors import ArtifactError
from mappers.pages import Bytes, room_for

SUMS = "SHA256SUMS"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,199}")

_SUMS_BYTES_AT_MOST = 64 << 10
_SUMS_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9][A-Za-z0-9._-]{0,99})\n")
_ATTEMPTS = 16
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking, so that a FIFO in the place of a file is refused and not waited for.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Parts = Sequence[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class OpenFolder:
    """A folder whose files are all open; ``sums`` are the SHA-256 that they must have."""

    files: Mapping[str, int]
    sums: Mapping[str, str]
    digest: str

    def size(self, name: str) -> int:
        """Bytes of a file as it is now; ``read`` reads no more than it is told."""
        return os.fstat(self.files[name]).st_size

    def read(self, name: str, *, at_most: int) -> Bytes:
        """All bytes of a file, verified. Raises ``ArtifactError`` for other bytes or too many."""
        data = _read_all(self.files[name], name, at_most)
        if hashlib.sha256(data).hexdigest() != self.sums[name]:
            raise ArtifactError(f"{name} does not have the digest that {SUMS} says")
        return data


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[OpenFolder]:
    """Open every file of a published folder, as of one moment.

    Raises ``ArtifactError`` when it is missing, when something in it is not a plain file, or when
    its files are not exactly those that ``SHA256SUMS`` lists.
    """
    # Of "." and "..", too, the name is needed.
    absolute = Path(os.path.abspath(path))
    with contextlib.ExitStack() as stack:
        files = _open_settled(absolute, stack)
        if SUMS not in files:
            raise ArtifactError(f"the artifact has no {SUMS}")
        raw = bytes(_read_all(files[SUMS], SUMS, _SUMS_BYTES_AT_MOST))
        sums = _parse_sums(raw)
        if sums.keys() != files.keys() - {SUMS}:
            raise ArtifactError(f"the artifact's files are not those that {SUMS} lists")
        yield OpenFolder(files, sums, f"sha256:{hashlib.sha256(raw).hexdigest()}")


def publish_folder(root: Path, name: str, files: Mapping[str, Parts]) -> Path:
    """Write ``files`` and their ``SHA256SUMS`` as ``<root>/<name>``, replacing an older one.

    A file is given as its parts, in order. Whatever fails or crashes, readers see the old folder or
    the new one, whole. Raises ``ArtifactError`` when the disk refuses; the old folder is then in
    place, or the new one if the disk failed only after it was.
    """
    if NAME.fullmatch(name) is None:
        raise ArtifactError("the name of an artifact must be one plain path component")
    complete = {**files, SUMS: [format_sums(files)]}
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root) as folder:
            _recover(folder, name)
            try:
                _write_folder(folder, _new(name), complete)
                _install(folder, name)
            except OSError:
                # The error at hand matters more than one while tidying; the next publisher retries.
                with contextlib.suppress(OSError):
                    _recover(folder, name)
                raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else "unknown error"
        raise ArtifactError(f"the artifact could not be written: {reason}") from error
    return root / name


def find(root: Path) -> list[Path]:
    """The folders published under ``root``, sorted by name; interrupted replacements included."""
    names = {
        entry.name.removeprefix(".").removesuffix(".previous")
        if entry.name.startswith(".") and entry.name.endswith(".previous")
        else entry.name
        for entry in os.scandir(root)
        if entry.is_dir(follow_symlinks=False)
    }
    return [root / name for name in sorted(names) if NAME.fullmatch(name)]


def format_sums(files: Mapping[str, Parts]) -> bytes:
    """The content of ``SHA256SUMS``, by name, in the form of ``sha256sum``."""
    return "".join(f"{_sha256(files[name])}  {name}\n" for name in sorted(files)).encode("ascii")


def _new(name: str) -> str:
    return f".{name}.new"


def _previous(name: str) -> str:
    return f".{name}.previous"


def _gone(name: str) -> str:
    return f".{name}.gone"


def _open_settled(path: Path, stack: contextlib.ExitStack) -> dict[str, int]:
    """Descriptors by name of a folder that nobody was replacing while they were opened."""
    if not path.name:
        raise ArtifactError("the root of a file system is no artifact")
    for _ in range(_ATTEMPTS):
        for candidate in (path, path.with_name(_previous(path.name))):
            with contextlib.ExitStack() as attempt:
                files = _open_all(candidate, attempt)
                if files is not None:
                    stack.push(attempt.pop_all())
                    return files
    raise ArtifactError("there is no such artifact, or something in it is not a plain file")


def _open_all(path: Path, stack: contextlib.ExitStack) -> dict[str, int] | None:
    """None when the folder is missing, has a link or a folder in it, or changed its name."""
    try:
        folder = _opened(os.open(path, _FOLDER), stack)
        names = os.listdir(folder)
        files = {name: _opened(os.open(name, _FILE, dir_fd=folder), stack) for name in names}
        settled = os.path.samestat(os.fstat(folder), os.lstat(path))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            return None
        raise ArtifactError(f"the artifact cannot be opened: {error.strerror}") from error
    return files if settled else None


def _opened(descriptor: int, stack: contextlib.ExitStack) -> int:
    stack.callback(os.close, descriptor)
    return descriptor


def _read_all(descriptor: int, name: str, at_most: int) -> Bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError(f"{name} is not a plain file")
    if status.st_size > at_most:
        raise ArtifactError(f"{name} has {status.st_size} bytes, more than the {at_most} expected")
    data = room_for(status.st_size)
    filled = 0
    with memoryview(data) as view:
        while filled < len(data):
            count = os.preadv(descriptor, [view[filled:]], filled)
            if count == 0:
                raise ArtifactError(f"{name} became shorter while it was read")
            filled += count
    return data


def _parse_sums(raw: bytes) -> dict[str, str]:
    text = raw.decode("ascii", errors="replace")
    lines = _SUMS_LINE.findall(text)
    sums = {name: digest for digest, name in lines}
    if "".join(f"{digest}  {name}\n" for name, digest in sums.items()) != text:
        raise ArtifactError(f"{SUMS} does not have the form of sha256sum")
    return sums


def _sha256(parts: Parts) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[int]:
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(folder)


def _recover(root: int, name: str) -> None:
    """Finish or undo what an earlier publication left behind."""
    if _exists(root, _previous(name)):
        if _exists(root, name):
            _discard_previous(root, name)
        else:
            os.rename(_previous(name), name, src_dir_fd=root, dst_dir_fd=root)
    for leftover in (_new(name), _gone(name)):
        if _exists(root, leftover):
            shutil.rmtree(leftover, dir_fd=root)


def _write_folder(root: int, name: str, files: Mapping[str, Parts]) -> None:
    os.mkdir(name, 0o755, dir_fd=root)
    folder = os.open(name, _FOLDER, dir_fd=root)
    try:
        for file, parts in files.items():
            _write_file(folder, file, parts)
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_file(folder: int, name: str, parts: Parts) -> None:
    descriptor = os.open(name, _NEW_FILE, 0o644, dir_fd=folder)
    try:
        for part in parts:
            rest = memoryview(part).cast("B")
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _install(root: int, name: str) -> None:
    replaced = _exists(root, name)
    if replaced:
        os.rename(name, _previous(name), src_dir_fd=root, dst_dir_fd=root)
    os.rename(_new(name), name, src_dir_fd=root, dst_dir_fd=root)
    os.fsync(root)
    if replaced:
        _discard_previous(root, name)


def _discard_previous(root: int, name: str) -> None:
    if _exists(root, _gone(name)):
        shutil.rmtree(_gone(name), dir_fd=root)
    os.rename(_previous(name), _gone(name), src_dir_fd=root, dst_dir_fd=root)
    shutil.rmtree(_gone(name), dir_fd=root)


def _exists(root: int, name: str) -> bool:
    try:
        os.lstat(name, dir_fd=root)
    except FileNotFoundError:
        return False
    return True
