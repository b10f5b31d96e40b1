"""Measure a mapper on documents that it has not seen, document by document, and keep the rows."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from mappers.arms import CONTINUATION_TOKENS, Reading
from mappers.bench import Bench, Depth
from mappers.bounds import documents_needed
from mappers.corpus import Corpus, evaluation, read
from mappers.errors import TooFewData
from mappers.evidence import Evidence
from mappers.evidence_rows import CurveRow, DriftRow, EvidenceRow, LayerRow
from mappers.hops import sides
from mappers.int8 import int8_weights
from mappers.layer_measures import layer_rows
from mappers.mapper import Mapper
from mappers.measure import Found, measure_document
from mappers.models import LoadedModel
from mappers.partial import Partial
from mappers.probe import ProbeQueries
from mappers.profile import CalibrationProfile, scorer
from mappers.progress import steps
from mappers.translate import Translator

DomainRow = TypeVar("DomainRow", EvidenceRow, LayerRow, CurveRow, DriftRow)


def evaluate(
    mapper: Mapper,
    source: LoadedModel,
    target: LoadedModel,
    texts: Mapping[str, Corpus],
    *,
    lengths: Sequence[int],
    native_tails: Sequence[int],
    profile: CalibrationProfile | None = None,
    probe_queries: ProbeQueries | None = None,
    reverse: Mapper | None = None,
    depth: Depth | None = None,
    work: Path | None = None,
    progress: bool = True,
) -> Evidence:
    """Evidence over the texts of all domains, from ``evaluation_texts``.

    ``lengths`` are prompt tokens; a document is measured at those that it was chosen for
    (``Corpus.stands_for``), with the tails that are shorter than the prompt. ``profile`` and
    ``probe_queries`` are the artifact's: one gives rows their score, without the other none have a
    probe. ``reverse``, the mapper from the target to the source, is needed for
    hops and drift. What each document gave is kept in ``work``, so that a stopped evaluation goes
    on where it was, to the same evidence; without a folder it starts anew. It is the caller's to
    remove.
    """
    depth = depth or Depth()
    bench = Bench(
        source=source,
        target=target,
        translator=Translator(mapper, device=target.model.device),
        prefixes=mapper.prefixes,
        rounded=int8_weights(target.model),
        pair=None if reverse is None else sides(source, target, mapper, reverse),
        score=scorer(profile, mapper),
        probe_queries=probe_queries,
        lengths=tuple(lengths),
        native_tails=tuple(native_tails),
        depth=depth,
    )
    partial = None
    if work is not None:
        corpora = [
            (domain, corpus.digest, [sorted(sizes) for sizes in corpus.chosen])
            for domain, corpus in texts.items()
        ]
        options = [corpora, [*lengths], [*native_tails], asdict(depth)]
        beside = [{} if one is None else one.tensors() for one in (profile, probe_queries)]
        both = [mapper, *([reverse] if reverse else [])]
        partial = Partial(work, digest_of(both, options, *beside))
    measured = {
        domain: _domain(bench, corpus, domain, number, partial, progress)
        for number, (domain, corpus) in enumerate(texts.items())
    }
    found = [one for documents in measured.values() for one in documents]
    looked_into = {d: [one.sums for one in f if one.sums] for d, f in measured.items()}
    return Evidence(
        continuation_tokens=CONTINUATION_TOKENS,
        corpora={domain: corpus.digest for domain, corpus in texts.items()},
        rows=tuple(row for one in found for row in one.rows),
        layers=tuple(row for d, sums in looked_into.items() if sums for row in layer_rows(sums, d)),
        curve=tuple(row for one in found for row in one.curve),
        drift=tuple(row for one in found for row in one.drift),
    )


def merged(before: Evidence | None, after: Evidence) -> Evidence:
    """``after``, and of ``before`` the domains that were not measured again, and tasks likewise."""
    if before is None:
        return after

    def kept(rows: Iterable[DomainRow]) -> Iterator[DomainRow]:
        return (row for row in rows if row.domain not in after.corpora)

    again = {row.task for row in after.tasks}
    return Evidence(
        continuation_tokens=after.continuation_tokens,
        corpora={**before.corpora, **after.corpora},
        rows=(*kept(before.rows), *after.rows),
        layers=(*kept(before.layers), *after.layers),
        curve=(*kept(before.curve), *after.curve),
        drift=(*kept(before.drift), *after.drift),
        tasks=(*(row for row in before.tasks if row.task not in again), *after.tasks),
    )


def require_documents(
    texts: Mapping[str, Corpus], lengths: Iterable[int], *, alpha: float, delta: float
) -> None:
    """Raise TooFewData, before any model runs, where a domain could not be certified at any length.

    A certificate that P(KL > threshold) <= ``alpha`` with confidence 1 - ``delta`` needs at least
    ln(delta) / ln(1 - alpha) documents of a length and one more, however good they are.
    """
    # The document that sets the score's limit does not count (accept.py).
    needed = documents_needed(alpha, delta) + 1
    for domain, corpus in texts.items():
        windows = range(len(corpus.windows))
        counts = {n: sum(n in _prompts(corpus, w, lengths) for w in windows) for n in lengths}
        if max(counts.values()) < needed:
            raise TooFewData(
                f"{domain}: {max(counts.values())} documents of {min(counts)} tokens and their "
                f"continuation, but alpha {alpha:g} and delta {delta:g} need {needed}; give more "
                "text, or ask for less"
            )


def evaluation_texts(
    paths: Mapping[str, Sequence[Path]],
    source: LoadedModel,
    target: LoadedModel,
    *,
    lengths: Sequence[int],
    documents: int,
) -> dict[str, Corpus]:
    """``documents`` windows of each domain for each of the lengths that both models hold.

    Raises TooFewData when they hold none, CorpusError for unusable text.
    """
    limit = min(source.max_position_embeddings, target.max_position_embeddings)
    fitting = [n for n in lengths if n + CONTINUATION_TOKENS <= limit]
    if not fitting:
        raise TooFewData(f"no length of {list(lengths)} and its continuation fit {limit} positions")
    return {
        domain: evaluation(
            read(folders),
            target.tokenizer,
            sizes=[n + CONTINUATION_TOKENS for n in fitting],
            documents_at_most=documents,
        )
        for domain, folders in paths.items()
    }


def _domain(
    bench: Bench,
    corpus: Corpus,
    domain: str,
    number: int,
    partial: Partial | None,
    progress: bool,
) -> list[Found]:
    """All documents of one domain in the corpus's order (longest first).

    The wrong document is the one before; the first document's is the second.
    """

    @lru_cache(maxsize=2)
    def reading(document: int) -> Reading:
        return bench.read(corpus.windows[document], _prompts(corpus, document, bench.lengths))

    found: list[Found] = []
    windows = range(len(corpus.windows))
    for document in steps(windows, f"evaluating {domain}", show=progress):
        kept = partial.load(number, document) if partial else None
        if kept is None:
            wrong = document - 1 if document else 1
            kept = measure_document(
                bench,
                reading(document),
                reading(wrong) if wrong in windows else None,
                document=corpus.names[document],
                domain=domain,
                deep=document < bench.depth.documents,
            )
            if partial:
                partial.save(number, document, kept)
        found.append(kept)
    return found


def _prompts(corpus: Corpus, window: int, lengths: Iterable[int]) -> tuple[int, ...]:
    """Those of the prompt lengths that this document stands for, with their continuation."""
    return tuple(n for n in lengths if corpus.stands_for(window, n + CONTINUATION_TOKENS))


def digest_of(mappers: Iterable[Mapper], options: object, *beside: Mapping[str, Tensor]) -> str:
    """sha256 of all that mappers are, of the options, and of the tensors ``beside`` them."""
    running = hashlib.sha256(json.dumps(options).encode())
    for mapper in mappers:
        sides_of = [side.model_dump(mode="json") for side in (mapper.source, mapper.target)]
        reads = [(layer.sources, layer.heads) for layer in mapper.layers]
        facts = [*sides_of, mapper.recipe, mapper.skipped_positions, reads]
        running.update(json.dumps(facts, sort_keys=True).encode())
        for name, affine in mapper.affine_maps():
            _take_in(running, {f"{name}.W": affine.weight, f"{name}.b": affine.bias})
        norms = ((f"{n}.norm", layer.key_norm) for n, layer in enumerate(mapper.layers))
        _take_in(running, {name: norm for name, norm in norms if norm is not None})
        _take_in(running, mapper.prefixes.tensors())
    for tensors in beside:
        _take_in(running, tensors)
    return running.hexdigest()


def _take_in(running: "hashlib._Hash", tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        running.update(f"{name} {list(tensor.shape)}".encode())
        running.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
