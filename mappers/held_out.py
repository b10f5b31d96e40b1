"""Calibration windows that a fit has not seen, and the KL that candidate mappers have on them.

Documents are held out whole, since two windows of one document are not two draws. The KL is that of
the evidence (``mappers.arms``): a window's last 32 tokens are the continuation, what is before them
the prompt, and its first token is exact.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mappers.arms import CONTINUATION_TOKENS, read_all, read_tail
from mappers.corpus import Corpus
from mappers.errors import NonFinite, TooFewData
from mappers.mapper import Mapper
from mappers.metrics import Reference
from mappers.models import LoadedModel
from mappers.progress import steps
from mappers.stored import rounded
from mappers.translate import Translator

TAILS = (1, 32)
SHARE, WINDOWS_AT_MOST = 8, 32
"""One window of so many is held out, of the latter at most; twice as many where documents are long,
since they are held out whole."""
TOKENS_AT_LEAST = max(TAILS) + 1 + CONTINUATION_TOKENS


def hold_out(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """The windows to fit on, and those of the last documents, held out.

    Where that would leave nothing to fit on, or all documents are too long, the last windows,
    whosever they are. Raises TooFewData where no window is left to fit on, or none that is held
    out is long enough to have a KL.
    """
    long = [len(ids) >= TOKENS_AT_LEAST for ids in corpus.windows]
    wanted = min(max(1, len(corpus.windows) // SHARE), WINDOWS_AT_MOST)
    of_document = Counter(corpus.names)
    usable = Counter(name for name, enough in zip(corpus.names, long, strict=True) if enough)
    names: set[str] = set()
    for name in reversed(dict.fromkeys(corpus.names)):
        missing = wanted - sum(usable[held] for held in names)
        if missing > 0 and of_document[name] <= missing + wanted:
            names.add(name)
    out = [name in names for name in corpus.names]
    if all(out) or not any(usable[name] for name in names):
        out = [index >= len(out) - wanted for index in range(len(out))]
    if all(out) or not any(held and enough for held, enough in zip(out, long, strict=True)):
        raise TooFewData(
            f"{len(out)} calibration windows, {sum(long)} of {TOKENS_AT_LEAST} tokens or more: to "
            "choose under a budget some are held out of the fit; give more text, or name a recipe"
        )
    return _part(corpus, [not held for held in out]), _part(corpus, out)


def held_out_kl(
    mappers: Sequence[Mapper],
    source: LoadedModel,
    target: LoadedModel,
    held_out: Corpus,
    *,
    progress: bool = True,
) -> Tensor:
    """Mean KL of each mapper at each of ``TAILS``, nats per token, float64 ``[mappers, tails]``.

    Raises NonFinite where one is not finite.
    """
    translators = [Translator(mapper, device=target.model.device) for mapper in mappers]
    windows = [ids for ids in held_out.windows if len(ids) >= TOKENS_AT_LEAST]
    found = [
        _kl_of_window(translators, source, target, windows[index])
        for index in steps(range(len(windows)), "judging", show=progress)
    ]
    kl = torch.stack(found).mean(0)
    if not bool(kl.isfinite().all()):
        raise NonFinite("a candidate's KL on held-out windows is not finite")
    return kl


def _kl_of_window(
    translators: Sequence[Translator], source: LoadedModel, target: LoadedModel, ids: Tensor
) -> Tensor:
    length = len(ids) - CONTINUATION_TOKENS
    native, logits = read_all(target.model, ids, (length,))
    read, _ = read_all(source.model, ids, (length,))
    original, kept = rounded(read, source.identity.storage), target.identity.storage
    reference, first = Reference(logits[0], ids[length:]), native.slice(0, 1)
    caches = [
        rounded(translator.translate(original, prefix=first, dtype=target.model.dtype), kept)
        for translator in translators
    ]
    answers = [read_tail(target, caches, ids, length=length, tail=tail) for tail in TAILS]
    kls = [[reference.compare(answer).kl for answer in tail] for tail in answers]
    return torch.tensor(kls, dtype=torch.float64).T


def _part(corpus: Corpus, wanted: Sequence[bool]) -> Corpus:
    kept = [index for index, take in enumerate(wanted) if take]
    return replace(
        corpus,
        windows=tuple(corpus.windows[index] for index in kept),
        names=tuple(corpus.names[index] for index in kept),
    )
