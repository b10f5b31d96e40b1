"""Measure a mapper on documents that it has not seen: every arm, length and native tail."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from mappers.arms import CONTINUATION_TOKENS, Reading, read_document, read_tail
from mappers.cache import KVCache
from mappers.corpus import Corpus, evaluation, read
from mappers.errors import TooFewData
from mappers.evidence import Arm, Evidence, EvidenceRow
from mappers.mapper import Mapper
from mappers.metrics import Reference
from mappers.models import LoadedModel
from mappers.prefixes import ExactPrefixes
from mappers.progress import steps
from mappers.translate import Translator

BARE_TAILS = (1, 64, 128)
"""Tails that are read over nothing even where no translation is measured with them."""


def evaluate(
    mapper: Mapper,
    source: LoadedModel,
    target: LoadedModel,
    texts: Mapping[str, Corpus],
    *,
    lengths: Sequence[int],
    native_tails: Sequence[int],
    progress: bool = True,
) -> Evidence:
    """Evidence over the texts of all domains, from ``evaluation_texts``."""
    rows: list[EvidenceRow] = []
    translator = Translator(mapper, device=target.model.device)
    for domain, corpus in texts.items():
        rows += measure_domain(
            translator,
            mapper.prefixes,
            source,
            target,
            corpus,
            domain=domain,
            lengths=lengths,
            native_tails=native_tails,
            progress=progress,
        )
    return Evidence(
        continuation_tokens=CONTINUATION_TOKENS,
        corpora={domain: corpus.digest for domain, corpus in texts.items()},
        rows=tuple(rows),
    )


def evaluation_texts(
    paths: Mapping[str, Sequence[Path]],
    source: LoadedModel,
    target: LoadedModel,
    *,
    lengths: Sequence[int],
    documents: int,
) -> dict[str, Corpus]:
    """The evaluation windows of each domain, cut to the longest length that fits both models."""
    limit = min(source.max_position_embeddings, target.max_position_embeddings)
    fitting = [n for n in lengths if n + CONTINUATION_TOKENS <= limit]
    if not fitting:
        raise TooFewData(f"no length of {list(lengths)} and its continuation fit {limit} positions")
    return {
        domain: evaluation(
            read(folders),
            target.tokenizer,
            minimum_tokens=min(fitting) + CONTINUATION_TOKENS,
            window_tokens=max(fitting) + CONTINUATION_TOKENS,
            documents_at_most=documents,
        )
        for domain, folders in paths.items()
    }


def measure_domain(
    translator: Translator,
    prefixes: ExactPrefixes,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    *,
    domain: str,
    lengths: Sequence[int],
    native_tails: Sequence[int],
    progress: bool = True,
) -> list[EvidenceRow]:
    """Raw rows of one domain, document by document in the corpus's order (longest first).

    ``lengths`` are prompt tokens; a document is measured at those that leave 32 tokens for the
    continuation, with the tails that are shorter than the prompt. The wrong document is the one
    before; the first document's is the second.
    """
    rows: list[EvidenceRow] = []
    windows = corpus.windows
    pair = (source, target, translator, prefixes)
    wrong = read_document(*pair, windows[1], lengths) if len(windows) > 1 else None
    for number in steps(range(len(windows)), f"evaluating {domain}", show=progress):
        reading = read_document(*pair, windows[number], lengths)
        for length in reading.lengths:
            prompt = _Prompt(corpus.names[number], domain, reading, length)
            rows.extend(_whole(prompt))
            for tail in sorted({*native_tails, *BARE_TAILS}):
                if tail < length:
                    over = _caches(reading, wrong, length) if tail in native_tails else {}
                    rows.extend(_tails(target, prompt, over, tail))
        wrong = reading
    return rows


class _Prompt:
    """The first ``length`` tokens of one document: what its rows have in common."""

    def __init__(self, document: str, domain: str, reading: Reading, length: int) -> None:
        self.document, self.domain, self.length = document, domain, length
        self.ids, at = reading.ids, reading.lengths.index(length)
        self.native_logits = reading.native_logits[at]
        self.source_logits = reading.source_logits[at]
        self.reference = Reference(self.native_logits, reading.next_ids(length))

    def row(self, arm: Arm, logits: Tensor, *, tail: int, known: bool = False) -> EvidenceRow:
        """One row from the arm's logits [32, vocabulary]."""
        return EvidenceRow(
            document=self.document,
            domain=self.domain,
            length=self.length,
            native_tail=tail,
            prefix_known=known,
            arm=arm,
            **self.reference.compare(logits)._asdict(),
        )


def _whole(prompt: _Prompt) -> Iterator[EvidenceRow]:
    """The arms without a tail: the target reads everything, or nothing at all."""
    yield prompt.row(Arm.NATIVE, prompt.native_logits, tail=prompt.length)
    yield prompt.row(Arm.SOURCE_ALONE, prompt.source_logits, tail=0)


_Key = tuple[Arm, bool]


def _caches(reading: Reading, wrong: Reading | None, length: int) -> dict[_Key, KVCache]:
    """Whose caches a tail is read over, by arm and whether the first tokens are exact."""
    caches = {
        (Arm.TRANSLATED, True): reading.prefix_known,
        (Arm.TRANSLATED, False): reading.prefix_unknown,
    }
    if wrong is not None and wrong.prefix_known.tokens >= length:
        caches[Arm.WRONG_DOCUMENT, True] = wrong.prefix_known
    return caches


def _tails(
    target: LoadedModel, prompt: _Prompt, over: dict[_Key, KVCache], tail: int
) -> Iterator[EvidenceRow]:
    """The arms with a tail, those over a cache in one batch."""
    bare = Arm.NO_CONTEXT if tail == 1 else Arm.LAST_TOKENS
    alone = read_tail(target, [], prompt.ids, length=prompt.length, tail=tail)[0]
    yield prompt.row(bare, alone, tail=tail)
    if over:
        caches = list(over.values())
        batch = read_tail(target, caches, prompt.ids, length=prompt.length, tail=tail)
        for (arm, known), logits in zip(over, batch, strict=True):
            yield prompt.row(arm, logits, tail=tail, known=known)
