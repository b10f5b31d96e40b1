"""Prefixes of the embedded family's held-out texts, measured: what the gate is tested on.

Rows are those that ``kvt evaluate`` writes, but prefixes of one length are read in batches.
"""

import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from mappers import artifact as artifacts
from mappers import demo, hf_compat
from mappers.arms import CONTINUATION_TOKENS, exact_prefix, probed
from mappers.artifact import Artifact
from mappers.cache import KVCache, consecutive
from mappers.corpus import calibration, read
from mappers.evidence import Arm, EvidenceRow
from mappers.metrics import Reference
from mappers.models import LoadedModel, ModelSpec, load_model
from mappers.probe import PROBE_TOKENS, translation_error
from mappers.profile import scorer
from mappers.scored import read_scored
from mappers.translate import Translator

DEMO = Path(demo.__file__).parent
TEXTS = {
    "in_domain": DEMO / "text" / "held_out.jsonl",
    "out_of_domain": DEMO / "text" / "out_of_domain.jsonl",
}
TAILS = (1, 32, 64)
BATCH = 16


@dataclass(frozen=True)
class Family:
    """Two models and the mapper between them."""

    source: LoadedModel
    target: LoadedModel
    artifact: Artifact
    folder: Path

    @classmethod
    def load(cls, source: Path, target: Path, root: Path) -> "Family":
        """With the artifact under ``root`` that is from this source. Raises ValueError."""
        small, large = (load_model(ModelSpec(path=str(path))) for path in (source, target))
        for path in artifacts.find(root):
            found = artifacts.load(path)
            if found.mapper.source == small.identity:
                return cls(small, large, found, path)
        raise ValueError("no artifact is from this source model")


@dataclass(frozen=True)
class Prefix:
    """A prompt of some document with the text's own continuation, token ids int64 ``[T + 32]``."""

    document: str
    domain: str
    ids: Tensor

    @property
    def length(self) -> int:
        """T."""
        return len(self.ids) - CONTINUATION_TOKENS


@dataclass(frozen=True)
class Measured:
    """What the service gets of a prefix, the source's cache; and what it does not see, its rows."""

    prefix: Prefix
    cache: KVCache
    rows: tuple[EvidenceRow, ...]

    def row(self, *, tail: int, probe_tokens: int = 0) -> EvidenceRow:
        """What is measured where the answer is used with this native tail, and this probe."""
        return next(
            row
            for row in self.rows
            if row.arm is Arm.TRANSLATED
            and (row.native_tail, row.probe_tokens) == (tail, probe_tokens)
        )


def prefixes(domain: str, model: LoadedModel, *, length: int) -> list[Prefix]:
    """All distinct windows of a domain with ``length`` tokens and a continuation.

    One of each document comes before a second of any; which ones follows from digests.
    """
    whole = length + CONTINUATION_TOKENS
    corpus = calibration(
        read([TEXTS[domain]]), model.tokenizer, window_tokens=whole, windows=1 << 16
    )
    by_document: dict[str, list[Prefix]] = defaultdict(list)
    for name, ids in zip(corpus.names, corpus.windows, strict=True):
        if len(ids) == whole:
            by_document[name].append(Prefix(name, domain, ids))
    turns = [
        (turn, _digest(name), prefix)
        for name, found in by_document.items()
        for turn, prefix in enumerate(sorted(found, key=lambda p: _digest(str(p.ids.tolist()))))
    ]
    return [prefix for *_, prefix in sorted(turns, key=lambda entry: entry[:2])]


def measure(family: Family, given: Sequence[Prefix], *, probe: bool = True) -> Iterator[Measured]:
    """Both models and the mapper over prefixes of one length; progress on stderr."""
    reader = _Reader(family, probe)
    for start in range(0, len(given), BATCH):
        sys.stderr.write(f"{given[start].domain}: {start} of {len(given)}\n")
        yield from reader.batch(given[start : start + BATCH])


class _Reader:
    """Reads batches of prefixes; ``probe``: also as answers to requests that carry one."""

    def __init__(self, family: Family, probe: bool) -> None:
        self._family = family
        self._mapper = family.artifact.mapper
        self._translator = Translator(self._mapper)
        self._score = scorer(family.artifact.profile, self._mapper)
        self._queries = family.artifact.probe_queries if probe else None

    def batch(self, given: Sequence[Prefix]) -> Iterator[Measured]:
        """Rows of each: the translation, the same behind a probe, and tails over nothing."""
        length = given[0].length
        ids = torch.stack([prefix.ids for prefix in given])[:, :-1]
        after = torch.arange(length - 1, length - 1 + CONTINUATION_TOKENS)
        read = read_scored(self._family.source.model, ids, logits_at=after)
        logits, native = hf_compat.read(self._family.target.model, ids, logits_at=after)
        originals, natives = _unstacked(read.cache, length), _unstacked(native, length)
        translated = [
            self._translate(*each) for each in zip(originals, natives, given, strict=True)
        ]
        rows = [
            _Rows(prefix, self._score(cache), Reference(own, prefix.ids[length:]), nll)
            for prefix, cache, own, nll in zip(given, originals, logits, read.nll, strict=True)
        ]
        self._tails(rows, ids, None, Arm.LAST_TOKENS)
        self._tails(rows, ids, translated, Arm.TRANSLATED)
        if self._queries is not None:
            for own, *caches in zip(rows, originals, natives, strict=True):
                own.probe_error = self._probe_error(*caches)
            caches = [probed(*pair, PROBE_TOKENS) for pair in zip(natives, translated, strict=True)]
            self._tails(rows, ids, caches, Arm.TRANSLATED, probe_tokens=PROBE_TOKENS)
        for own, cache in zip(rows, originals, strict=True):
            yield Measured(own.prefix, cache, tuple(own.made))

    def _translate(self, original: KVCache, native: KVCache, prefix: Prefix) -> KVCache:
        exact = exact_prefix(self._mapper.prefixes, prefix.ids, native)
        return self._translator.translate(original, prefix=exact, dtype=native.dtype)

    def _probe_error(self, original: KVCache, native: KVCache) -> float | None:
        if self._queries is None:
            return None
        probe = native.slice(0, PROBE_TOKENS)
        return translation_error(self._queries, self._translator, original, probe)

    def _tails(
        self,
        rows: Sequence["_Rows"],
        ids: Tensor,
        caches: Sequence[KVCache] | None,
        arm: Arm,
        probe_tokens: int = 0,
    ) -> None:
        """The target reads each tail over these caches; over nothing where there are none."""
        model, length = self._family.target.model, rows[0].prefix.length
        for tail in (w for w in TAILS if w + probe_tokens < length):
            begin = length - tail
            cut = None if caches is None else [cache.slice(0, begin) for cache in caches]
            read = read_scored(
                model,
                ids[:, begin:],
                cache=None if cut is None else hf_compat.stacked(cut, model.dtype, model.device),
                start_position=begin,
                logits_at=torch.arange(tail - 1, tail - 1 + CONTINUATION_TOKENS),
            )
            for own, logits, nll in zip(rows, read.logits, read.nll, strict=True):
                own.add(arm, tail, probe_tokens, logits, nll)


class _Rows:
    """The rows of one prefix; ``source_nll`` [T + 30] of all its tokens but the first."""

    def __init__(
        self, prefix: Prefix, score: float | None, reference: Reference, source_nll: Tensor
    ) -> None:
        self.prefix, self.score = prefix, score
        self.probe_error: float | None = None
        self.made: list[EvidenceRow] = []
        self._reference, self._source_nll = reference, source_nll

    def add(self, arm: Arm, tail: int, probe_tokens: int, logits: Tensor, nll: Tensor) -> None:
        """From the target's logits [32, vocabulary] and its NLL of what follows in the tail."""
        prefix = self.prefix
        own = arm is Arm.TRANSLATED
        source_nll = self._source_nll[prefix.length - tail :]
        row = EvidenceRow(
            document=prefix.document,
            domain=prefix.domain,
            length=prefix.length,
            native_tail=tail,
            prefix_known=own,
            probe_tokens=probe_tokens,
            arm=arm,
            score=self.score if own else None,
            probe_error=self.probe_error if probe_tokens else None,
            tail_nll=float(nll[: tail - 1].mean()) if own and tail > 1 else None,
            source_tail_nll=float(source_nll[: tail - 1].mean()) if own and tail > 1 else None,
            **self._reference.compare(logits)._asdict(),
        )
        self.made.append(row)


def _unstacked(cache: Cache, length: int) -> list[KVCache]:
    """The first ``length`` tokens of each text of a batch."""
    layers: Any = cache.layers
    keys = [layer.keys[:, :, :length].transpose(1, 2).unbind() for layer in layers]
    values = [layer.values[:, :, :length].transpose(1, 2).unbind() for layer in layers]
    return [
        KVCache(k, v, consecutive(length))
        for k, v in zip(zip(*keys, strict=True), zip(*values, strict=True), strict=True)
    ]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
