"""Text to token windows, the same for both models of a pair.

A window is a run of one document's tokens with what the tokenizer puts in front of a text (BOS) in
front of it; it never crosses documents and is never padded. Which documents are taken depends on
their contents alone: those with the smallest digests, so that no order of files or folders biases
the sample and reruns agree.
"""

import hashlib
import heapq
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mappers.errors import CorpusError

TEXT_SUFFIXES = (".jsonl", ".md", ".rst", ".txt")
MINIMUM_WINDOW_TOKENS = 64


class Document(NamedTuple):
    """One text; pieces of one longer text share its ``name``, by which they are told."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """sha256 of the text, blind to white space."""
        return hashlib.sha256(" ".join(self.text.split()).encode()).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """Windows of token ids, each int64 [T] on the CPU, and the documents that they came from.

    ``document_digests`` are short: the first 16 hex digits. ``chosen`` says for each window of an
    evaluation which of the wanted sizes it was chosen for; empty: for all that it has.
    """

    windows: tuple[Tensor, ...]
    names: tuple[str, ...]
    document_digests: frozenset[str]
    chosen: tuple[frozenset[int], ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(window) for window in self.windows)

    @property
    def digest(self) -> str:
        """sha256 over the very token ids, window by window."""
        running = hashlib.sha256()
        for window in self.windows:
            running.update(len(window).to_bytes(8, "little"))
            running.update(window.numpy().astype("<i8").tobytes())
        return f"sha256:{running.hexdigest()}"

    def stands_for(self, window: int, size: int) -> bool:
        """Whether the first ``size`` tokens of a window are one of the samples of that size."""
        if self.chosen:
            return size in self.chosen[window]
        return len(self.windows[window]) >= size


def read(paths: Sequence[Path]) -> Iterator[Document]:
    """Documents of files and folders: one a text file, one a line of ``.jsonl`` (field ``text``).

    Lines with the same ``name`` (and ``source``, if they have one) are pieces of one document. A
    line without a name is a document of its own, whatever its ``source``. Raises CorpusError for a
    path that does not exist or a line without a text.
    """
    for path in paths:
        if not path.exists():
            raise CorpusError(f"no such text file or folder: {path.name}")
        files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES)
        for file in [path] if path.is_file() else files:
            yield from _lines(file) if file.suffix == ".jsonl" else _whole(file)


def calibration(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    window_tokens: int,
    windows: int,
) -> Corpus:
    """At most ``windows`` windows of at most ``window_tokens`` tokens, spread over the documents.

    Every document gives its first window before any gives its second. What is left of a document
    after its last full window is a window too, unless it is shorter than 64 tokens. At most
    ``windows`` documents are held in memory. Raises CorpusError when there is no window.
    """
    chosen = _sample(documents, windows)
    cut = {
        digest: _windows(document, tokenizer, window_tokens)[:windows]
        for digest, document in chosen.items()
    }
    rounds = zip_longest(*([(d, w) for w in cut[d]] for d in cut))
    taken = [entry for group in rounds for entry in group if entry is not None][:windows]
    if not taken:
        raise CorpusError(
            f"the calibration text holds no document of {MINIMUM_WINDOW_TOKENS} tokens or more"
        )
    return Corpus(
        windows=tuple(ids for _, ids in taken),
        names=tuple(chosen[digest].name for digest, _ in taken),
        document_digests=frozenset(_short(digest) for digest, _ in taken),
    )


def evaluation(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    sizes: Sequence[int],
    documents_at_most: int,
) -> Corpus:
    """For each size in tokens, the beginnings of at most so many documents that have as much.

    Of the documents that are long enough for a size those with the smallest digests stand for it:
    none is preferred for being longer. Of several pieces with one name only one is taken, the rows
    of the evidence must be independent draws. A window is as long as the largest size that it was
    chosen for; the longest come first. Raises CorpusError when no document is long enough.
    """
    found = _long_enough(documents, tokenizer, sizes)
    chosen: dict[str, set[int]] = {}
    for size in sizes:
        fitting = [digest for digest, (_, ids) in found.items() if len(ids) >= size]
        for digest in fitting[:documents_at_most]:
            chosen.setdefault(digest, set()).add(size)
    ordered = sorted(chosen, key=lambda digest: (-max(chosen[digest]), digest))
    if not ordered:
        raise CorpusError(f"the evaluation text holds no document of {min(sizes)} tokens")
    return Corpus(
        windows=tuple(found[digest][1][: max(chosen[digest])] for digest in ordered),
        names=tuple(found[digest][0] for digest in ordered),
        document_digests=frozenset(map(_short, ordered)),
        chosen=tuple(frozenset(chosen[digest]) for digest in ordered),
    )


def refuse_overlap(calibrated: Collection[str], evaluated: Corpus) -> None:
    """Raise CorpusError for documents to be evaluated on whose (short) digest is ``calibrated``."""
    shared = evaluated.document_digests.intersection(calibrated)
    if shared:
        raise CorpusError(
            f"{len(shared)} evaluation documents are in the calibration text too; they must differ"
        )


def leading_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What the tokenizer puts in front of every text: the BOS, or nothing."""
    bare = _encode(tokenizer, "a", special=False)
    full = _encode(tokenizer, "a", special=True)
    places = range(len(full) - len(bare) + 1)
    start = next((p for p in places if full[p : p + len(bare)] == bare), 0)
    return tuple(full[:start])


def _sample(documents: Iterable[Document], at_most: int | None) -> dict[str, Document]:
    """The documents with the smallest digests, in the order of their digests; none twice."""
    keyed = ((document.digest, document) for document in documents)
    if at_most is None:
        return dict(sorted(dict(keyed).items()))
    smallest: dict[str, Document] = {}
    heap: list[int] = []
    for digest, document in keyed:
        if digest in smallest:
            continue
        smallest[digest] = document
        heapq.heappush(heap, -int(digest, 16))
        if len(heap) > at_most:
            del smallest[f"{-heapq.heappop(heap):064x}"]
    return dict(sorted(smallest.items()))


def _long_enough(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, sizes: Sequence[int]
) -> dict[str, tuple[str, Tensor]]:
    """Name and beginning by digest, in the order of the digests; of one name the one that serves
    the largest size, and of those the first."""
    best: dict[str, tuple[int, str, Tensor]] = {}
    for digest, document in _sample(documents, None).items():
        for ids in _windows(document, tokenizer, max(sizes))[:1]:
            size = max((n for n in sizes if n <= len(ids)), default=0)
            if size > best.get(document.name, (0,))[0]:
                best[document.name] = (size, digest, ids)
    found = {digest: (name, ids) for name, (_, digest, ids) in best.items()}
    return dict(sorted(found.items()))


def _short(digest: str) -> str:
    """Enough of a SHA-256 to tell documents apart: 64 bits."""
    return digest[:16]


def _windows(document: Document, tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[Tensor]:
    leading = list(leading_tokens(tokenizer))
    ids = _encode(tokenizer, document.text, special=False)
    step = tokens - len(leading)
    if step < 1:
        raise CorpusError(f"a window of {tokens} tokens has no room for text")
    cut = [leading + ids[start : start + step] for start in range(0, len(ids), step)]
    minimum = min(tokens, MINIMUM_WINDOW_TOKENS)
    return [torch.tensor(c, dtype=torch.int64) for c in cut if len(c) >= minimum]


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    encoded = tokenizer(text, add_special_tokens=special, verbose=False)
    return list(encoded["input_ids"])


def _whole(file: Path) -> Iterator[Document]:
    text = file.read_text(encoding="utf-8", errors="replace")
    if text.strip():
        yield Document(file.name, text)


def _lines(file: Path) -> Iterator[Document]:
    with file.open(encoding="utf-8") as handle:
        for number, line in enumerate(handle, start=1):
            if line.strip():
                yield _parse(file, number, line)


def _parse(file: Path, number: int, line: str) -> Document:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise CorpusError(f"{file.name}, line {number}: not JSON") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise CorpusError(f"{file.name}, line {number}: no field 'text' with a string")
    # A source alone names no document: whole collections have one.
    given = [str(row[key]) for key in ("source", "name") if key in row and "name" in row]
    return Document("/".join(given) or f"{file.name}:{number}", row["text"])
