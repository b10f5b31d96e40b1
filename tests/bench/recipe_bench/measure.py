"""One candidate over all documents of a pair: what is kept of it is rows of evidence."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from mappers.cache import KVCache
from mappers.evidence_rows import Arm, EvidenceRow
from mappers.models import LoadedModel
from mappers.progress import steps
from tests.bench.recipe_bench.fitted import Translate
from tests.bench.recipe_bench.reading import Document, Readings, load, tail_logits

BATCH = 4


class Reading(NamedTuple):
    """A tail over a translation whose first token is exact, or mapped like the rest."""

    tail: int
    known: bool


OURS = tuple(Reading(tail, True) for tail in (1, 32, 64, 128))
PUBLISHED = (Reading(1, False), Reading(32, False), Reading(1, True), Reading(32, True))
"""As published, with the first token mapped; and at equal native tokens, with it exact."""
FEW = (Reading(1, True), Reading(32, True))


class Batch(NamedTuple):
    """Documents and the readings that all of them lack."""

    files: tuple[int, ...]
    readings: tuple[Reading, ...]


def measure(
    target: LoadedModel,
    readings: Readings,
    translate: Translate,
    wanted: Sequence[Reading],
    done: Sequence[EvidenceRow] = (),
    *,
    label: str = "",
) -> Iterator[list[EvidenceRow]]:
    """The rows that ``done`` lacks, batch by batch; ``translate`` maps all tokens."""
    batches = missing(readings, wanted, done)
    for number in steps(range(len(batches)), label, show=bool(label)):
        batch = [load(readings.files[index]) for index in batches[number].files]
        mapped = [translate(document) for document in batch]
        exact = [with_first(c, document.first) for c, document in zip(mapped, batch, strict=True)]
        yield [
            row
            for one in batches[number].readings
            for row in _rows(target, batch, exact if one.known else mapped, one)
        ]


def missing(
    readings: Readings, wanted: Sequence[Reading], done: Sequence[EvidenceRow]
) -> list[Batch]:
    """What is still to be read: documents that lack the same readings go together."""
    seen = {(row.domain, row.document, row.native_tail, row.prefix_known) for row in done}
    lacking: dict[tuple[Reading, ...], list[int]] = {}
    for index, document in enumerate(readings.documents):
        own = tuple(one for one in wanted if (*document, *one) not in seen)
        if own:
            lacking.setdefault(own, []).append(index)
    return [
        Batch(tuple(files[start : start + BATCH]), own)
        for own, files in lacking.items()
        for start in range(0, len(files), BATCH)
    ]


def with_first(cache: KVCache, first: KVCache) -> KVCache:
    """The cache with the target's own keys and values of its first token."""
    keys, values = (
        tuple(_replaced(old, new) for old, new in zip(*sides, strict=True))
        for sides in ((cache.keys, first.keys), (cache.values, first.values))
    )
    return KVCache(keys, values, cache.positions)


def _replaced(layer: Tensor, first: Tensor) -> Tensor:
    layer = layer.clone()
    layer[: len(first)] = first
    return layer


def _rows(
    target: LoadedModel, batch: Sequence[Document], caches: Sequence[KVCache], reading: Reading
) -> Iterator[EvidenceRow]:
    ids = [document.ids for document in batch]
    logits = tail_logits(target, caches, ids, tail=reading.tail)
    for document, own in zip(batch, logits, strict=True):
        measures = document.reference().compare(own)
        yield document.row(Arm.TRANSLATED, measures, tail=reading.tail, known=reading.known)
