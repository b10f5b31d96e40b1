"""All that is measured of one document: every arm at every length, tail and hop count."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mappers.arms import (
    CONTINUATION_TOKENS,
    Reading,
    greedy,
    raw_source,
    read_all,
    read_and_continue,
    read_document,
    read_tail,
    zero_cache,
)
from mappers.cache import KVCache
from mappers.curve import layer_curve
from mappers.evidence_rows import Arm, CurveRow, DriftRow, EvidenceRow
from mappers.hf_compat import stacked
from mappers.hops import Pair, drift, handed_over
from mappers.layer_measures import Sums, layer_sums
from mappers.metrics import Reference
from mappers.models import LoadedModel
from mappers.prefixes import ExactPrefixes
from mappers.translate import Translator

BARE_TAILS = (1, 64, 128)
"""Tails that are read over nothing even where no translation is measured with them."""


@dataclass(frozen=True)
class Depth:
    """How much is measured beside the arms.

    Of each domain's first ``documents``: greedy continuations, layers, the layer curve and drift
    over at most ``turns`` turns. Of all documents: up to ``hops`` earlier translations. Hops and
    drift need the mapper of the reverse pair.
    """

    documents: int = 8
    hops: int = 2
    turns: int = 6


@dataclass(frozen=True)
class Bench:
    """The models, what translates between them, and what is to be measured.

    ``score`` tells how unfamiliar a source cache is, if anything can.
    """

    source: LoadedModel
    target: LoadedModel
    translator: Translator
    prefixes: ExactPrefixes
    rounded: PreTrainedModel
    pair: Pair | None
    score: Callable[[KVCache], float | None]
    lengths: tuple[int, ...]
    native_tails: tuple[int, ...]
    depth: Depth

    def read(self, ids: Tensor) -> Reading:
        """One document through both models and the translator."""
        models = (self.source, self.target, self.translator, self.prefixes)
        return read_document(*models, ids, self.lengths)


@dataclass(frozen=True)
class Found:
    """What one document gave; ``sums`` is empty where layers were not looked into."""

    rows: tuple[EvidenceRow, ...]
    curve: tuple[CurveRow, ...]
    drift: tuple[DriftRow, ...]
    sums: Sums


def measure_document(
    bench: Bench, reading: Reading, wrong: Reading | None, *, document: str, domain: str, deep: bool
) -> Found:
    """Every row of one document; ``wrong`` is another one's reading. ``deep``: curves as well."""
    _, rounded = read_all(bench.rounded, reading.ids, reading.lengths)
    rows: list[EvidenceRow] = []
    for at, length in enumerate(reading.lengths):
        prompt = _Prompt(bench, document, domain, reading, length)
        rows.append(prompt.row(Arm.QUANTIZED, rounded[at], tail=length))
        rows += _length(prompt, wrong, deep)
    if not deep:
        return Found(tuple(rows), (), (), {})
    names = {"document": document, "domain": domain}
    tail = min(bench.native_tails)
    turned: Iterator[DriftRow] = iter(())
    if bench.pair is not None:
        step = max(1, max(reading.lengths) // bench.depth.turns)
        turned = drift(bench.pair, reading.ids, **names, turn_tokens=step, turns=bench.depth.turns)
    curve = layer_curve(bench.target, reading, **names, tail=tail)
    return Found(tuple(rows), tuple(curve), tuple(turned), layer_sums(bench.target, reading))


class _Prompt:
    """The first ``length`` tokens of one document: what its rows have in common."""

    def __init__(
        self, bench: Bench, document: str, domain: str, reading: Reading, length: int
    ) -> None:
        self.bench, self.reading, self.length = bench, reading, length
        self.document, self.domain = document, domain
        at = reading.lengths.index(length)
        self.native_logits = reading.native_logits[at]
        self.source_logits = reading.source_logits[at]
        self.reference = Reference(self.native_logits, reading.next_ids(length))
        self.score = bench.score(reading.original.slice(0, length))

    def row(
        self,
        arm: Arm,
        logits: Tensor,
        *,
        tail: int,
        known: bool = False,
        hops: int = 0,
        agreement: int | None = None,
    ) -> EvidenceRow:
        """One row from the arm's logits [32, vocabulary]."""
        return EvidenceRow(
            document=self.document,
            domain=self.domain,
            length=self.length,
            native_tail=tail,
            prefix_known=known,
            hops=hops,
            arm=arm,
            agreement=agreement,
            score=self.score if arm is Arm.TRANSLATED and not hops else None,
            **self.reference.compare(logits)._asdict(),
        )

    def native_continuation(self) -> Tensor:
        """The target's own 32 greedy tokens after the prompt, int64 [32]."""
        model = self.bench.target.model
        cache = stacked([self.reading.native.slice(0, self.length)], model.dtype, model.device)
        return greedy(model, cache, self.native_logits[:1].argmax(-1), self.length)[0]


_Key = tuple[Arm, bool]


def _length(prompt: _Prompt, wrong: Reading | None, deep: bool) -> Iterator[EvidenceRow]:
    """All arms of one prompt but the quantized."""
    whole = CONTINUATION_TOKENS if deep else None
    yield prompt.row(Arm.NATIVE, prompt.native_logits, tail=prompt.length, agreement=whole)
    yield prompt.row(Arm.SOURCE_ALONE, prompt.source_logits, tail=0)
    own = prompt.native_continuation() if deep else None
    tails, bench = prompt.bench.native_tails, prompt.bench
    caches = _caches(prompt, wrong)
    for tail in sorted({*tails, *BARE_TAILS}):
        if tail < prompt.length:
            yield _bare(prompt, tail)
            if tail in tails:
                yield from _tails(prompt, caches, tail, own)
    if bench.pair is not None:
        for hops in range(1, bench.depth.hops + 1):
            yield from _hopped(prompt, bench.pair, hops)


def _caches(prompt: _Prompt, wrong: Reading | None) -> dict[_Key, KVCache]:
    """Whose caches a tail is read over, by arm and whether the first tokens are exact."""
    reading = prompt.reading
    caches = {
        (Arm.TRANSLATED, True): reading.prefix_known,
        (Arm.TRANSLATED, False): reading.prefix_unknown,
        (Arm.ZERO_CACHE, False): zero_cache(reading.native),
    }
    if wrong is not None and wrong.prefix_known.tokens >= prompt.length:
        caches[Arm.WRONG_DOCUMENT, True] = wrong.prefix_known
    raw = raw_source(reading.original, prompt.bench.target)
    if raw is not None:
        caches[Arm.RAW_SOURCE, False] = raw
    return caches


def _bare(prompt: _Prompt, tail: int) -> EvidenceRow:
    """The tail read over nothing."""
    arm = Arm.NO_CONTEXT if tail == 1 else Arm.LAST_TOKENS
    target, ids = prompt.bench.target, prompt.reading.ids
    return prompt.row(
        arm, read_tail(target, [], ids, length=prompt.length, tail=tail)[0], tail=tail
    )


def _tails(
    prompt: _Prompt, caches: Mapping[_Key, KVCache], tail: int, own: Tensor | None
) -> Iterator[EvidenceRow]:
    """The arms with a tail over a cache, in one batch; ``own``: the native greedy tokens [32]."""
    given = (prompt.bench.target, [*caches.values()], prompt.reading.ids)
    shared: Sequence[int | None] = [None] * len(caches)
    if own is None:
        batch = read_tail(*given, length=prompt.length, tail=tail)
    else:
        batch, chosen = read_and_continue(*given, length=prompt.length, tail=tail)
        shared = [agreement(own, tokens) for tokens in chosen]
    for (arm, known), logits, same in zip(caches, batch, shared, strict=True):
        yield prompt.row(arm, logits, tail=tail, known=known, agreement=same)


def _hopped(prompt: _Prompt, pair: Pair, hops: int) -> Iterator[EvidenceRow]:
    """The translated arm from a source cache that was translated ``hops`` times before."""
    ids = prompt.reading.ids
    cache = handed_over(pair, ids[: prompt.length], hops)
    caches = [pair[1].translated(cache, ids, known=known) for known in (True, False)]
    for tail in prompt.bench.native_tails:
        if tail < prompt.length:
            batch = read_tail(prompt.bench.target, caches, ids, length=prompt.length, tail=tail)
            for known, logits in zip((True, False), batch, strict=True):
                yield prompt.row(Arm.TRANSLATED, logits, tail=tail, known=known, hops=hops)


def agreement(own: Tensor, other: Tensor) -> int:
    """How many tokens of two continuations, int64 [N] each, agree before they first differ."""
    same = (own == other).to(torch.int64)
    return int(same.cumprod(0).sum())
