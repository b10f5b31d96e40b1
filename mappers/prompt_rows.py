"""All evidence rows of one prompt: every arm with every native tail, over caches of every kind."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mappers import hf_compat
from mappers.arms import (
    CONTINUATION_TOKENS,
    Reading,
    continued,
    greedy,
    probed,
    raw_source,
    score_tail,
    zero_cache,
)
from mappers.bench import Bench
from mappers.cache import KVCache
from mappers.evidence_rows import Arm, EvidenceRow
from mappers.hops import handed_over
from mappers.metrics import Reference
from mappers.probe import PROBE_TOKENS, translation_error

BARE_TAILS = (1, 64, 128)
"""Tails that are read over nothing even where no translation is measured with them."""

LONGEST_CONTROL_TAIL = 128
"""With more tokens read natively, a control or an earlier hop tells little and costs much."""


class Over(NamedTuple):
    """What a row's tail is read over; the fields are columns of ``EvidenceRow``."""

    arm: Arm
    prefix_known: bool = False
    hops: int = 0
    probe_tokens: int = 0
    probe_error: float | None = None

    def allows(self, tail: int, length: int) -> bool:
        """Whether it is measured with this tail: it must be worth it, and something translated."""
        plain = self.arm is Arm.TRANSLATED and not self.hops
        return self.probe_tokens + tail < length and (plain or tail <= LONGEST_CONTROL_TAIL)


Caches = Mapping[Over, KVCache]


class Prompt:
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
        over: Over,
        logits: Tensor,
        *,
        tail: int,
        agreement: int | None = None,
        tail_nll: float | None = None,
    ) -> EvidenceRow:
        """One row from the arm's logits [32, vocabulary]; with ``tail_nll`` also the source's."""
        scored = over.arm is Arm.TRANSLATED and not over.hops
        source = None if tail_nll is None else self.reading.source_tail_nll(self.length, tail)
        return EvidenceRow(
            document=self.document,
            domain=self.domain,
            length=self.length,
            native_tail=tail,
            agreement=agreement,
            score=self.score if scored else None,
            tail_nll=tail_nll,
            source_tail_nll=source,
            **over._asdict(),
            **self.reference.compare(logits)._asdict(),
        )

    def native_continuation(self) -> Tensor:
        """The target's own 32 greedy tokens after the prompt, int64 [32]."""
        model = self.bench.target.model
        cache = hf_compat.stacked(
            [self.reading.native.slice(0, self.length)], model.dtype, model.device
        )
        return greedy(model, cache, self.native_logits[:1].argmax(-1), self.length)[0]


def prompt_rows(prompt: Prompt, wrong: Reading | None, deep: bool) -> Iterator[EvidenceRow]:
    """All arms of one prompt but quantized and bare; ``deep``: with greedy continuations."""
    whole = CONTINUATION_TOKENS if deep else None
    yield prompt.row(Over(Arm.NATIVE), prompt.native_logits, tail=prompt.length, agreement=whole)
    yield prompt.row(Over(Arm.SOURCE_ALONE), prompt.source_logits, tail=0)
    own = prompt.native_continuation() if deep else None
    caches = {**_translated(prompt), **_hopped(prompt), **_controls(prompt, wrong)}
    for tail in prompt.bench.native_tails:
        if tail < prompt.length:
            yield from _tail(prompt, caches, tail, own)


def bare_rows(prompts: Sequence[Prompt], tail: int) -> Iterator[EvidenceRow]:
    """The last ``tail`` tokens of prompts of one document, read over nothing, in one batch."""
    longer = [prompt for prompt in prompts if prompt.length > tail]
    if not longer:
        return
    begins = torch.tensor([prompt.length - tail for prompt in longer])[:, None]
    rows = begins + torch.arange(tail + CONTINUATION_TOKENS - 1)
    logits, _ = hf_compat.read(
        longer[0].bench.target.model,
        longer[0].reading.ids[rows],
        start_position=begins,
        logits_at=torch.arange(tail - 1, tail - 1 + CONTINUATION_TOKENS),
    )
    over = Over(Arm.NO_CONTEXT if tail == 1 else Arm.LAST_TOKENS)
    for prompt, found in zip(longer, logits, strict=True):
        yield prompt.row(over, found, tail=tail)


def _translated(prompt: Prompt) -> Caches:
    """The translation with its first tokens exact, all mapped, and behind a probe."""
    reading, queries = prompt.reading, prompt.bench.probe_queries
    caches = {
        Over(Arm.TRANSLATED, True): reading.prefix_known,
        Over(Arm.TRANSLATED, False): reading.prefix_unknown,
    }
    if queries is not None and prompt.length > PROBE_TOKENS:
        source, probe = (
            reading.original.slice(0, prompt.length),
            reading.native.slice(0, PROBE_TOKENS),
        )
        error = translation_error(queries, prompt.bench.translator, source, probe)
        over = Over(Arm.TRANSLATED, True, probe_tokens=PROBE_TOKENS, probe_error=error)
        native, mapped = (c.slice(0, prompt.length) for c in (reading.native, reading.prefix_known))
        caches[over] = probed(native, mapped, PROBE_TOKENS)
    return caches


def _hopped(prompt: Prompt) -> Caches:
    """Translations of a source cache that was translated before."""
    pair, ids = prompt.bench.pair, prompt.reading.ids
    if pair is None:
        return {}
    handed = {
        hops: handed_over(pair, ids[: prompt.length], hops)
        for hops in range(1, prompt.bench.depth.hops + 1)
    }
    return {
        Over(Arm.TRANSLATED, known, hops): pair[1].translated(cache, ids, known=known)
        for hops, cache in handed.items()
        for known in (True, False)
    }


def _controls(prompt: Prompt, wrong: Reading | None) -> Caches:
    """What must do worse: another document's translation, no keys and values, the source's own."""
    reading = prompt.reading
    caches = {Over(Arm.ZERO_CACHE): zero_cache(reading.native)}
    if wrong is not None and wrong.prefix_known.tokens >= prompt.length:
        caches[Over(Arm.WRONG_DOCUMENT, True)] = wrong.prefix_known
    raw = raw_source(reading.original, prompt.bench.target)
    if raw is not None:
        caches[Over(Arm.RAW_SOURCE)] = raw
    return caches


def _tail(prompt: Prompt, caches: Caches, tail: int, own: Tensor | None) -> Iterator[EvidenceRow]:
    """The arms with a tail over a cache, in one batch; ``own``: the native greedy tokens [32]."""
    read = {over: cache for over, cache in caches.items() if over.allows(tail, prompt.length)}
    target, ids, length = prompt.bench.target, prompt.reading.ids, prompt.length
    found = score_tail(target, [*read.values()], ids, length=length, tail=tail)
    chosen = [None] * len(read) if own is None else continued(target, found, length)
    for over, logits, nll, tokens in zip(read, found.logits, found.nll, chosen, strict=True):
        likely = tail > 1 and over.arm in (Arm.TRANSLATED, Arm.WRONG_DOCUMENT)
        yield prompt.row(
            over,
            logits,
            tail=tail,
            agreement=None if own is None or tokens is None else agreement(own, tokens),
            tail_nll=float(f"{nll.item():.6g}") if likely else None,
        )


def agreement(own: Tensor, other: Tensor) -> int:
    """How many tokens of two continuations, int64 [N] each, agree before they first differ."""
    same = (own == other).to(torch.int64)
    return int(same.cumprod(0).sum())
