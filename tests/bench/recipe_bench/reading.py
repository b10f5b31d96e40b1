"""What is read of a pair once and for all: both models over the evaluation documents.

Each document gives a prompt of 480 tokens and its own continuation of 32. Kept on disk, float32:
the source's cache of the prompt, the target's own cache of the first token, its logits at the 32
positions, and the rows of all arms that need no mapper.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mappers import demo, hf_compat
from mappers.arms import CONTINUATION_TOKENS, read_all, read_tail
from mappers.cache import KVCache, consecutive
from mappers.corpus import Corpus, evaluation, read
from mappers.corpus import Document as TextDocument
from mappers.evidence_rows import Arm, EvidenceRow
from mappers.metrics import Measures, Reference
from mappers.models import LoadedModel
from mappers.progress import steps

TEXT = Path(demo.__file__).parent / "text"
DOMAINS = {"in_domain": TEXT / "held_out.jsonl", "out_of_domain": TEXT / "out_of_domain.jsonl"}
PROMPT_TOKENS = 480
TAILS = (1, 32, 64, 128)


class Document(NamedTuple):
    """One document as read: token ids [512], caches, and logits [32, vocabulary]."""

    name: str
    domain: str
    ids: Tensor
    source: KVCache
    first: KVCache
    native_logits: Tensor

    def reference(self) -> Reference:
        return Reference(self.native_logits, self.ids[PROMPT_TOKENS:])

    def row(self, arm: Arm, measures: Measures, *, tail: int, known: bool = False) -> EvidenceRow:
        return EvidenceRow(
            document=self.name,
            domain=self.domain,
            length=PROMPT_TOKENS,
            native_tail=tail,
            prefix_known=known,
            arm=arm,
            **measures._asdict(),
        )


@dataclass(frozen=True)
class Readings:
    """All documents of a pair, one file each: domain and name, and the rows without a mapper."""

    files: tuple[Path, ...]
    documents: tuple[tuple[str, str], ...]
    rows: tuple[EvidenceRow, ...]


def read_pair(
    source: LoadedModel, target: LoadedModel, folder: Path, *, documents: int
) -> Readings:
    """Read ``documents`` of each domain, those that ``folder`` does not hold yet."""
    files: list[Path] = []
    names: list[tuple[str, str]] = []
    rows: list[EvidenceRow] = []
    for domain in DOMAINS:
        corpus = evaluation_windows(target, domain, documents)
        for index in steps(range(len(corpus.windows)), f"reading {domain}", show=True):
            digest = hashlib.sha256(corpus.windows[index].numpy().tobytes()).hexdigest()
            file = folder / domain / f"{digest[:16]}.safetensors"
            if not file.with_suffix(".json").exists():
                _read(source, target, corpus, domain, index, file)
            files.append(file)
            names.append((domain, corpus.names[index]))
            found = json.loads(file.with_suffix(".json").read_text())
            rows += [EvidenceRow.model_validate(row) for row in found]
    return Readings(tuple(files), tuple(names), tuple(rows))


def evaluation_windows(target: LoadedModel, domain: str, documents: int) -> Corpus:
    """One window of each document; the embedded text first, the standard library's for the rest."""
    whole = PROMPT_TOKENS + CONTINUATION_TOKENS
    window = {"sizes": (whole,)}
    first = evaluation(
        read([DOMAINS[domain]]), target.tokenizer, **window, documents_at_most=documents
    )
    missing = documents - len(first.windows)
    if not missing or domain != "out_of_domain":
        return first
    more = evaluation(
        _other_modules(first.names), target.tokenizer, **window, documents_at_most=missing
    )
    return Corpus(
        first.windows + more.windows,
        first.names + more.names,
        first.document_digests | more.document_digests,
    )


def _other_modules(names: Sequence[str]) -> Iterator[TextDocument]:
    """The standard library's modules, but those that are among ``names``."""
    taken = {name.partition("/")[2] for name in names}
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        if file.name not in taken:
            yield TextDocument(f"stdlib/{file.name}", file.read_text(encoding="utf-8"))


def load(file: Path) -> Document:
    """One document from its file."""
    with safe_open(file, framework="pt") as opened:
        facts = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    return Document(
        facts["name"],
        facts["domain"],
        tensors["ids"],
        KVCache(tuple(tensors["source.k"]), tuple(tensors["source.v"]), consecutive(PROMPT_TOKENS)),
        KVCache(tuple(tensors["first.k"]), tuple(tensors["first.v"]), consecutive(1)),
        tensors["native_logits"],
    )


def tail_logits(
    target: LoadedModel, caches: Sequence[KVCache], ids: Sequence[Tensor], *, tail: int
) -> Tensor:
    """Logits [B, 32, vocabulary]: B documents, the last ``tail`` tokens read over each one's cache.

    ``arms.read_tail`` for documents of the same length that are not the same.
    """
    begin, end = PROMPT_TOKENS - tail, PROMPT_TOKENS + CONTINUATION_TOKENS - 1
    cut = [cache.slice(0, begin) for cache in caches]
    model = target.model
    logits, _ = hf_compat.read(
        model,
        torch.stack([one[begin:end] for one in ids]),
        cache=hf_compat.stacked(cut, model.dtype, model.device),
        start_position=begin,
        logits_at=torch.arange(tail - 1, tail - 1 + CONTINUATION_TOKENS),
    )
    return logits


def _read(
    source: LoadedModel, target: LoadedModel, corpus: Corpus, domain: str, index: int, file: Path
) -> None:
    ids = corpus.windows[index]
    original, source_logits = read_all(source.model, ids, (PROMPT_TOKENS,))
    native, native_logits = read_all(target.model, ids, (PROMPT_TOKENS,))
    original, first = original.slice(0, PROMPT_TOKENS), native.slice(0, 1)
    document = Document(corpus.names[index], domain, ids, original, first, native_logits[0])
    tensors = {
        "ids": ids,
        "source.k": torch.stack(original.keys),
        "source.v": torch.stack(original.values),
        "first.k": torch.stack(first.keys),
        "first.v": torch.stack(first.values),
        "native_logits": native_logits[0],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, file, {"name": document.name, "domain": domain})
    rows = _rows(target, document, source_logits[0])
    dumped = [row.model_dump(mode="json") for row in rows]
    file.with_suffix(".json").write_text(json.dumps(dumped))


def _rows(target: LoadedModel, document: Document, source_logits: Tensor) -> list[EvidenceRow]:
    """The arms without a mapper: native, source alone, and the last tokens over nothing."""
    reference = document.reference()
    found = [
        document.row(Arm.NATIVE, reference.compare(document.native_logits), tail=PROMPT_TOKENS),
        document.row(Arm.SOURCE_ALONE, reference.compare(source_logits), tail=0),
    ]
    for tail in TAILS:
        logits = read_tail(target, [], document.ids, length=PROMPT_TOKENS, tail=tail)[0]
        arm = Arm.NO_CONTEXT if tail == 1 else Arm.LAST_TOKENS
        found.append(document.row(arm, reference.compare(logits), tail=tail))
    return found
