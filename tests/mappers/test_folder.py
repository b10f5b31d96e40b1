"""Published folders: whole or not at all, whatever fails, dies or reads meanwhile."""

import errno
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mappers.errors import ArtifactError
from mappers.folder import find, format_sums, open_folder, publish_folder

NAME = "a-to-b-full_head-b1-0123456789ab"
OLD = {"manifest.json": [b"old"], "weights": [b"o" * 100, b"ld" * 50]}
NEW = {"manifest.json": [b"new"], "weights": [b"n" * 300], "evidence.json": [b"{}"]}
LIMIT = 1 << 20
STEPS = ("write", "fsync", "rename", "mkdir", "open", "unlink", "rmdir")


def contents(path: Path) -> dict[str, bytes]:
    with open_folder(path) as folder:
        return {name: bytes(folder.read(name, at_most=LIMIT)) for name in folder.sums}


def joined(files: dict[str, list[bytes]]) -> dict[str, bytes]:
    return {name: b"".join(parts) for name, parts in files.items()}


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk, where what survives a loss of power is not the question."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Crash(BaseException):
    """Not an Exception, so that nothing tidies up as a dead process could not."""


class Fault:
    """Let ``fail`` happen at the n-th call of any of ``STEPS``, before or after its effect."""

    def __init__(self, at: int, fail: Callable[[], BaseException], *, after: bool) -> None:
        self.at, self.fail, self.after, self.calls = at, fail, after, 0
        self.trace: list[str] = []

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.trace.append(name)
            if self.calls == self.at and not self.after:
                raise self.fail()
            result = real(*args, **kwargs)
            if self.calls == self.at:
                raise self.fail()
            return result

        return step


def publish_with(fault: Fault, root: Path) -> BaseException | None:
    """Publish NEW under the fault; what was raised."""
    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, fault.wrap(name, getattr(os, name)))
        try:
            publish_folder(root, NAME, NEW)
        except (Crash, ArtifactError) as error:
            return error
    return None


def number_of_steps(tmp_path: Path, *, replacing: bool) -> int:
    counter = Fault(0, Crash, after=False)
    root = tmp_path / "counted"
    if replacing:
        publish_folder(root, NAME, OLD)
    assert publish_with(counter, root) is None
    return counter.calls


def every_fault(tmp_path: Path, fail: Callable[[], BaseException]) -> Iterator[tuple[Fault, Path]]:
    for after in (False, True):
        # The first step makes the root, which is there already: nothing can come of it.
        for at in range(2, number_of_steps(tmp_path / str(after), replacing=True) + 1):
            root = tmp_path / f"{at}-{after}"
            publish_folder(root, NAME, OLD)
            yield Fault(at, fail, after=after), root


def test_round_trip_and_digest(tmp_path: Path) -> None:
    path = publish_folder(tmp_path / "new" / "root", NAME, OLD)
    assert path == tmp_path / "new" / "root" / NAME
    assert contents(path) == joined(OLD)
    with open_folder(path) as folder:
        sums = (path / "SHA256SUMS").read_bytes()
        assert folder.digest == f"sha256:{hashlib.sha256(sums).hexdigest()}"


def test_golden_sums() -> None:
    files = {"weights.safetensors": [b"ab", b"c"], "manifest.json": [b"{}\n"]}
    assert format_sums(files) == (
        b"ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356  manifest.json\n"
        b"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  weights.safetensors\n"
    )


def test_sha256sum_agrees(tmp_path: Path) -> None:
    path = publish_folder(tmp_path, NAME, NEW)
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=path, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b": OK\n") == 3


def test_replacing_leaves_nothing_behind(tmp_path: Path) -> None:
    publish_folder(tmp_path, NAME, OLD)
    path = publish_folder(tmp_path, NAME, NEW)
    assert contents(path) == joined(NEW)
    assert os.listdir(tmp_path) == [NAME]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    assert contents(publish_folder(tmp_path, NAME, OLD)) == joined(OLD)


def test_publishing_again_what_was_just_read(tmp_path: Path) -> None:
    path = publish_folder(tmp_path, NAME, OLD)
    with open_folder(path) as folder:
        data = {name: folder.read(name, at_most=LIMIT) for name in folder.sums}
    publish_folder(tmp_path, NAME, {name: [memoryview(raw)] for name, raw in data.items()})
    assert contents(path) == joined(OLD)


def test_everything_is_on_disk_before_the_name_changes(tmp_path: Path) -> None:
    publish_folder(tmp_path, NAME, OLD)
    fault = Fault(0, Crash, after=False)
    assert publish_with(fault, tmp_path) is None
    # NEW has three parts, the sums are a fourth; each file, their folder, then the root is flushed.
    steps = [step for step in fault.trace if step in ("write", "fsync", "rename", "rmdir")]
    files = ["write", "fsync"] * 4
    assert steps == [*files, "fsync", "rename", "rename", "fsync", "rename", "rmdir"]


@pytest.mark.usefixtures("quick_disk")
def test_a_crash_at_any_step_leaves_old_or_new(tmp_path: Path) -> None:
    seen = set()
    for fault, root in every_fault(tmp_path, Crash):
        assert isinstance(publish_with(fault, root), Crash), fault.at
        found = contents(root / NAME)
        assert found in (joined(OLD), joined(NEW)), fault.at
        seen.add(found["manifest.json"])
        assert find(root) == [root / NAME]
        publish_folder(root, NAME, NEW)
        assert contents(root / NAME) == joined(NEW)
        assert os.listdir(root) == [NAME], fault.at
    assert seen == {b"old", b"new"}


@pytest.mark.usefixtures("quick_disk")
def test_a_crash_of_the_first_publication_leaves_nothing_or_all(tmp_path: Path) -> None:
    outcomes = set()
    for at in range(1, number_of_steps(tmp_path, replacing=False) + 1):
        root = tmp_path / str(at)
        assert isinstance(publish_with(Fault(at, Crash, after=True), root), Crash)
        if find(root):
            assert contents(root / NAME) == joined(NEW)
        else:
            with pytest.raises(ArtifactError):
                contents(root / NAME)
        outcomes.add(bool(find(root)))
    assert outcomes == {False, True}


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_disk_error_at_any_step_is_told_and_leaves_old_or_new(tmp_path: Path, code: int) -> None:
    for fault, root in every_fault(tmp_path, lambda: OSError(code, "no", str(tmp_path))):
        error = publish_with(fault, root)
        assert isinstance(error, ArtifactError), (fault.at, fault.trace)
        assert str(error) == f"the artifact could not be written: {os.strerror(code)}"
        assert contents(root / NAME) in (joined(OLD), joined(NEW))
        publish_folder(root, NAME, NEW)
        assert os.listdir(root) == [NAME]


@pytest.mark.usefixtures("quick_disk")
def test_a_crash_while_recovering_from_a_crash(tmp_path: Path) -> None:
    """The crash that leaves no folder of the name, then one at each step of the next attempt."""
    renames = 0
    for at in range(1, 60):
        root = tmp_path / str(at)
        publish_folder(root, NAME, OLD)
        os.rename(root / NAME, root / f".{NAME}.previous")
        assert contents(root / NAME) == joined(OLD)
        fault = Fault(at, Crash, after=True)
        done = publish_with(fault, root) is None
        renames = max(renames, fault.trace.count("rename"))
        assert contents(root / NAME) in (joined(OLD), joined(NEW))
        if done:
            break
    assert done
    assert renames == 4


PUBLISHER = """
import sys
from pathlib import Path
from mappers.folder import publish_folder
print("ready", flush=True)
for n in range(100_000):
    parts = [bytes([n % 256]) * 20_000]
    publish_folder(Path(sys.argv[1]), sys.argv[2], {"a": parts, "b": parts, "c": parts})
"""


def test_a_killed_publisher_leaves_a_whole_folder(tmp_path: Path) -> None:
    publish_folder(tmp_path, NAME, {name: [b"\0" * 20_000] for name in "abc"})
    for kill in range(6):
        command = [sys.executable, "-c", PUBLISHER, str(tmp_path), NAME]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(0.005 + 0.007 * kill)
            process.send_signal(signal.SIGKILL)
        found = contents(tmp_path / NAME)
        assert found.keys() == {"a", "b", "c"}
        assert len(set(found.values())) == 1


@pytest.mark.usefixtures("quick_disk")
def test_readers_see_old_or_new_while_it_is_replaced(tmp_path: Path) -> None:
    path = publish_folder(tmp_path, NAME, OLD)
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            publish_folder(tmp_path, NAME, NEW)
            publish_folder(tmp_path, NAME, OLD)

    publisher = threading.Thread(target=replace)
    publisher.start()
    try:
        found = [contents(path) for _ in range(200)]
        deadline = time.monotonic() + 20
        while len({whole["manifest.json"] for whole in found}) < 2 and time.monotonic() < deadline:
            found.append(contents(path))
    finally:
        stop.set()
        publisher.join()
    assert {whole["manifest.json"] for whole in found} == {b"old", b"new"}
    assert all(whole in (joined(OLD), joined(NEW)) for whole in found)


@pytest.mark.usefixtures("quick_disk")
def test_publishers_take_turns(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def publish(files: dict[str, list[bytes]]) -> None:
        try:
            for _ in range(10):
                publish_folder(tmp_path, NAME, files)
        except ArtifactError as error:
            failures.append(error)

    threads = [threading.Thread(target=publish, args=(files,)) for files in (OLD, NEW, OLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert os.listdir(tmp_path) == [NAME]


def test_what_was_read_stays_when_the_file_changes(tmp_path: Path) -> None:
    path = publish_folder(tmp_path, NAME, OLD)
    with open_folder(path) as folder:
        data = folder.read("weights", at_most=LIMIT)
        os.truncate(path / "weights", 0)
        assert bytes(data) == joined(OLD)["weights"]
        with pytest.raises(ArtifactError, match="does not have the digest"):
            folder.read("weights", at_most=LIMIT)


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = publish_folder(tmp_path, NAME, OLD)
    real = os.preadv

    def shrinking(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(path / "weights", 10)
        return real(descriptor, buffers, offset)

    with open_folder(path) as folder:
        monkeypatch.setattr(os, "preadv", shrinking)
        with pytest.raises(ArtifactError, match="became shorter"):
            folder.read("weights", at_most=LIMIT)


def flip(path: Path) -> None:
    raw = bytearray((path / "weights").read_bytes())
    raw[7] ^= 1
    (path / "weights").write_bytes(raw)


def to_link(path: Path) -> None:
    (path / "weights").rename(path.parent / "elsewhere")
    (path / "weights").symlink_to(path.parent / "elsewhere")


def to_folder(path: Path) -> None:
    (path / "weights").unlink()
    (path / "weights").mkdir()


def to_fifo(path: Path) -> None:
    (path / "weights").unlink()
    os.mkfifo(path / "weights")


def edit_sums(edit: Callable[[str], str]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / "SHA256SUMS").write_text(edit((path / "SHA256SUMS").read_text()))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (flip, "weights does not have the digest"),
    "a truncated file": (lambda p: os.truncate(p / "weights", 99), "does not have the digest"),
    "an appended byte": (
        lambda p: (p / "weights").write_bytes((p / "weights").read_bytes() + b"\0"),
        "does not have the digest",
    ),
    "a missing file": (lambda p: (p / "weights").unlink(), "not those that SHA256SUMS lists"),
    "a surplus file": (lambda p: (p / "x.bin").write_bytes(b"x"), "not those"),
    "a surplus dot file": (lambda p: (p / ".x").write_bytes(b"x"), "not those"),
    "no sums": (lambda p: (p / "SHA256SUMS").unlink(), "has no SHA256SUMS"),
    "a link": (to_link, "not a plain file"),
    "a folder": (to_folder, "weights is not a plain file"),
    "a FIFO": (to_fifo, "weights is not a plain file"),
    "sums without a line": (
        edit_sums(lambda text: text.splitlines(keepends=True)[0]),
        "not those",
    ),
    "sums with upper case": (edit_sums(str.upper), "form of sha256sum"),
    "sums without final newline": (edit_sums(str.rstrip), "form of sha256sum"),
    "sums with an empty line": (edit_sums(lambda text: text + "\n"), "form of sha256sum"),
    "sums with a line twice": (
        edit_sums(lambda text: text + text.splitlines(keepends=True)[0]),
        "form of sha256sum",
    ),
    "sums with a path": (
        edit_sums(lambda text: text.replace("  weights", "  ../weights")),
        "form of sha256sum",
    ),
    "sums with another digest": (
        edit_sums(lambda text: re.sub("[0-9a-f]{8}", "00000000", text)),
        "does not have the digest",
    ),
    "sums that are not text": (
        lambda p: (p / "SHA256SUMS").write_bytes(b"\xff\xfe"),
        "form of sha256sum",
    ),
    "sums that are huge": (
        lambda p: os.truncate(p / "SHA256SUMS", 1 << 30),
        "more than the 65536 expected",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_every_damage_is_refused(tmp_path: Path, name: str) -> None:
    path = publish_folder(tmp_path, NAME, OLD)
    damage, message = DAMAGES[name]
    assert contents(path) == joined(OLD)
    damage(path)
    with pytest.raises(ArtifactError, match=message) as error:
        contents(path)
    assert str(tmp_path) not in str(error.value)


def test_a_file_larger_than_expected_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = publish_folder(tmp_path, NAME, OLD)
    # A hole of 1 TiB: reading it would fail for want of memory.
    os.truncate(path / "weights", 1 << 40)
    with (
        open_folder(path) as folder,
        pytest.raises(
            ArtifactError, match="weights has 1099511627776 bytes, more than the 1048576"
        ),
    ):
        folder.read("weights", at_most=LIMIT)


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    publish_folder(tmp_path, NAME, OLD)
    (tmp_path / "link").symlink_to(NAME)
    with pytest.raises(ArtifactError, match="no such artifact"):
        contents(tmp_path / "link")
    assert find(tmp_path) == [tmp_path / NAME]


@pytest.mark.parametrize("target", ["missing", "file"])
def test_what_is_no_folder_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="no such artifact"):
        contents(tmp_path / target)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/a", ".hidden", "A", "a\0b", "a" * 201, "a b", "a\u2215b"],
)
def test_only_plain_names_are_published(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArtifactError, match="one plain path component"):
        publish_folder(tmp_path, name, OLD)
    assert not os.listdir(tmp_path)


def test_descriptors_are_closed(tmp_path: Path) -> None:
    path = publish_folder(tmp_path, NAME, OLD)
    before = len(os.listdir("/proc/self/fd"))
    contents(path)
    flip(path)
    for _ in range(5):
        with pytest.raises(ArtifactError):
            contents(path)
        with pytest.raises(ArtifactError):
            contents(tmp_path / "missing")
    assert len(os.listdir("/proc/self/fd")) == before
