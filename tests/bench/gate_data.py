"""Prefixes of the embedded family's texts, measured: what the gate's benchmark is computed from."""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mappers import demo
from mappers.arms import CONTINUATION_TOKENS, read_document, read_tail
from mappers.artifact import Artifact
from mappers.cache import KVCache
from mappers.collect import cache_of_text
from mappers.corpus import calibration, read
from mappers.evidence import Arm, EvidenceRow
from mappers.metrics import Reference
from mappers.models import LoadedModel
from mappers.profile import Finding
from mappers.sample import largest
from mappers.translate import Translator

TEXTS = {
    "in_domain": Path(demo.__file__).parent / "text" / "held_out.jsonl",
    "out_of_domain": Path(demo.__file__).parent / "text" / "out_of_domain.jsonl",
}


@dataclass(frozen=True)
class Prefix:
    """A prompt of some document with the text's own continuation, token ids int64 ``[T + 32]``."""

    document: str
    domain: str
    ids: Tensor


@dataclass(frozen=True)
class Measured:
    """What the gate sees of a prefix, and the KL at each native tail, which it does not see."""

    prefix: Prefix
    finding: Finding | None
    rows: dict[int, EvidenceRow]


def prefixes(domain: str, model: LoadedModel, *, length: int) -> list[Prefix]:
    """All distinct windows of the domain's documents with ``length`` tokens and a continuation."""
    whole = length + CONTINUATION_TOKENS
    corpus = calibration(
        read([TEXTS[domain]]), model.tokenizer, window_tokens=whole, windows=1 << 16
    )
    pairs = zip(corpus.names, corpus.windows, strict=True)
    return [Prefix(name, domain, ids) for name, ids in pairs if len(ids) == whole]


def split(
    found: Sequence[Prefix], *, tested: int, measured: int
) -> tuple[list[Prefix], list[Prefix]]:
    """``measured`` prefixes, or all there are, for the rule and ``tested`` for the test.

    No document is in both.

    Documents are taken for the test in the order of their digests. Raises ValueError when the
    domain has too few.
    """
    names = sorted({p.document for p in found}, key=lambda n: hashlib.sha256(n.encode()).digest())
    test: set[str] = set()
    for name in names:
        if sum(p.document in test for p in found) >= tested:
            break
        test.add(name)
    chosen = [p for p in found if p.document in test][:tested]
    if len(chosen) < tested:
        raise ValueError(f"{len(found)} prefixes are too few for a test on {tested}")
    return [p for p in found if p.document not in test][:measured], chosen


def source_cache(source: LoadedModel, prefix: Prefix, length: int) -> KVCache:
    """The source's own cache of the prompt."""
    return cache_of_text(source, prefix.ids[:length])


def measure(
    artifact: Artifact,
    source: LoadedModel,
    target: LoadedModel,
    given: Sequence[Prefix],
    *,
    length: int,
    tails: Sequence[int],
) -> Iterator[Measured]:
    """Run both models and the mapper over each prefix; progress on stderr."""
    translator, prefixes = Translator(artifact.mapper), artifact.mapper.prefixes
    for number, prefix in enumerate(given):
        if number % 50 == 0:
            sys.stderr.write(f"{prefix.domain}: {number} of {len(given)}\n")
        reading = read_document(source, target, translator, prefixes, prefix.ids, (length,))
        finding = examine(artifact, reading.original.slice(0, length))
        reference = Reference(reading.native_logits[0], reading.next_ids(length))
        rows = {}
        for tail in tails:
            logits = read_tail(
                target, [reading.prefix_known], reading.ids, length=length, tail=tail
            )
            measures = reference.compare(logits[0])._asdict()
            rows[tail] = _row(prefix, length, tail, measures, finding)
        yield Measured(prefix, finding, rows)


def examine(artifact: Artifact, cache: KVCache) -> Finding | None:
    """What the artifact's profile says of a source cache."""
    if artifact.profile is None:
        return None
    mapper = artifact.mapper
    return artifact.profile.examine(
        cache, mapper.source, skip_positions=mapper.skipped_positions, peaks=largest(cache)
    )


def _row(
    prefix: Prefix, length: int, tail: int, measures: dict[str, float], finding: Finding | None
) -> EvidenceRow:
    return EvidenceRow(
        document=prefix.document,
        domain=prefix.domain,
        length=length,
        native_tail=tail,
        prefix_known=True,
        arm=Arm.TRANSLATED,
        score=None if finding is None else finding.score,
        **measures,
    )
