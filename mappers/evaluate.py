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
from mappers.metrics import compare
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
        label = _Label(corpus.names[number], domain, reading)
        for length in reading.lengths:
            rows.extend(_whole(label, length))
            for tail in sorted({*native_tails, *BARE_TAILS}):
                if tail < length:
                    over = _caches(reading, wrong, length) if tail in native_tails else {}
                    rows.extend(_tails(target, label, over, length, tail))
        wrong = reading
    return rows


class _Label:
    """What all rows of one document have in common, and how one of them is made."""

    def __init__(self, document: str, domain: str, reading: Reading) -> None:
        self.document, self.domain, self.reading = document, domain, reading

    def row(
        self, arm: Arm, length: int, logits: Tensor, *, tail: int, known: bool = False
    ) -> EvidenceRow:
        """One row from the arm's logits [32, vocabulary]."""
        native = self.reading.native_logits[self.reading.lengths.index(length)]
        measures = compare(native, logits, self.reading.next_ids(length))
        return EvidenceRow(
            document=self.document,
            domain=self.domain,
            length=length,
            native_tail=tail,
            prefix_known=known,
            arm=arm,
            **measures._asdict(),
        )


def _whole(label: _Label, length: int) -> Iterator[EvidenceRow]:
    """The arms without a tail: the target reads everything, or nothing at all."""
    at = label.reading.lengths.index(length)
    yield label.row(Arm.NATIVE, length, label.reading.native_logits[at], tail=length)
    yield label.row(Arm.SOURCE_ALONE, length, label.reading.source_logits[at], tail=0)


_Key = tuple[Arm, bool]


def _caches(reading: Reading, wrong: Reading | None, length: int) -> dict[_Key, KVCache]:
    caches = {
        (Arm.TRANSLATED, True): reading.prefix_known,
        (Arm.TRANSLATED, False): reading.prefix_unknown,
    }
    if wrong is not None and wrong.prefix_known.tokens >= length:
        caches[Arm.WRONG_DOCUMENT, True] = wrong.prefix_known
    return caches


def _tails(
    target: LoadedModel, label: _Label, over: dict[_Key, KVCache], length: int, tail: int
) -> Iterator[EvidenceRow]:
    """The arms with a tail, those over a cache in one batch."""
    ids = label.reading.ids
    bare = Arm.NO_CONTEXT if tail == 1 else Arm.LAST_TOKENS
    alone = read_tail(target, [], ids, length=length, tail=tail)[0]
    yield label.row(bare, length, alone, tail=tail)
    if over:
        batch = read_tail(target, list(over.values()), ids, length=length, tail=tail)
        for (arm, known), logits in zip(over, batch, strict=True):
            yield label.row(arm, length, logits, tail=tail, known=known)
