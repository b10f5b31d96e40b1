"""One candidate over all documents of a pair: what is kept of it is rows of evidence."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from mappers.cache import KVCache
from mappers.evidence_rows import Arm, EvidenceRow
from mappers.models import LoadedModel
from mappers.progress import steps
from recipe_bench.reading import TAILS, Document, Readings, load, tail_logits

BATCH = 4


class Reading(NamedTuple):
    """A tail over a translation whose first token is exact, or mapped like the rest."""

    tail: int
    known: bool


ALL = (*(Reading(tail, True) for tail in TAILS), Reading(1, False), Reading(32, False))
FEW = (Reading(1, True), Reading(32, True))

Translate = Callable[[Document], KVCache]


def measure(
    target: LoadedModel,
    readings: Readings,
    translate: Translate,
    wanted: Sequence[Reading],
    done: Sequence[EvidenceRow] = (),
    *,
    label: str = "",
) -> Iterator[list[EvidenceRow]]:
    """Rows of the documents that ``done`` lacks, batch by batch; ``translate`` maps all tokens."""
    files = readings.missing_in(done)
    batches = range(0, len(files), BATCH)
    for start in steps(batches, label, show=True):
        batch = [load(file) for file in files[start : start + BATCH]]
        mapped = [translate(document) for document in batch]
        exact = [with_first(c, document.first) for c, document in zip(mapped, batch, strict=True)]
        yield [
            row
            for one in wanted
            for row in _rows(target, batch, exact if one.known else mapped, one)
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
