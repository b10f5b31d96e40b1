"""Where in the target an error costs KL: what a read of a source head is worth, layer by layer.

An error of the same size in the keys or values of one target layer may cost a hundred times the KL
that it costs in another, which no R2 shows. So each layer's keys, and each layer's values, are
translated alone, everything else being the target's own, and the KL that this gives is set against
the part of the variance that the translation does not explain: that is what explaining it is worth.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mappers.arms import CONTINUATION_TOKENS, read_all, read_tail
from mappers.cache import KVCache
from mappers.corpus import Corpus
from mappers.errors import NonFinite, TooFewData
from mappers.mapper import HeadReads, Mapper
from mappers.metrics import Reference
from mappers.models import LoadedModel
from mappers.moments import PairMoments
from mappers.plan import FitPlan
from mappers.progress import steps
from mappers.selection import Weigh
from mappers.solving import solved_mapper
from mappers.stored import rounded
from mappers.translate import Translator

WINDOWS, BATCH, TAIL = 8, 8, 1


def weigher(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    moments: PairMoments,
    *,
    progress: bool = True,
) -> Weigh:
    """How ``select`` finds out what reads are worth: it maps windows of the corpus with them."""

    def weigh(reads: Sequence[HeadReads], explained: Tensor) -> Tensor:
        mapper = solved_mapper(plan, source, target, corpus, moments, reads, progress=False)
        return worth_of_reads(mapper, explained, source, target, corpus.windows, progress=progress)

    return weigh


def worth_of_reads(
    mapper: Mapper,
    explained: Tensor,
    source: LoadedModel,
    target: LoadedModel,
    windows: Sequence[Tensor],
    *,
    progress: bool = True,
) -> Tensor:
    """KL per unexplained share of the variance, float64 ``[2 * L_t]``, nats per token: of the keys
    of target layer 0, of its values, of the keys of layer 1, ...

    ``explained``: R2 of the mapper's maps in the same order. ``windows``: token ids [T] each, of
    which the longest ``WINDOWS`` are read. Raises TooFewData for windows that are too short, and
    NonFinite.
    """
    translator = Translator(mapper, device=target.model.device)
    longest = sorted(windows, key=len, reverse=True)[:WINDOWS]
    longest = [ids for ids in longest if len(ids) > TAIL + CONTINUATION_TOKENS]
    if not longest:
        raise TooFewData(f"no window has {TAIL + CONTINUATION_TOKENS + 1} tokens to find a KL on")
    found = [
        _kl_of_each(translator, source, target, longest[index])
        for index in steps(range(len(longest)), "weighing layers", show=progress)
    ]
    kl = torch.stack(found).mean(0)
    if not bool(kl.isfinite().all()):
        raise NonFinite("the KL of a single translated layer is not finite")
    return kl / (1 - explained).clamp_min(1e-6)


def _kl_of_each(
    translator: Translator, source: LoadedModel, target: LoadedModel, ids: Tensor
) -> Tensor:
    """The KL with only the keys, or only the values, of one layer translated, ``[2 * L_t]``."""
    length = len(ids) - CONTINUATION_TOKENS
    native, logits = read_all(target.model, ids, (length,))
    read, _ = read_all(source.model, ids, (length,))
    original = rounded(read, source.identity.storage)
    mapped = translator.translate(original, prefix=native.slice(0, 1), dtype=target.model.dtype)
    reference = Reference(logits[0], ids[length:])
    mixed = [with_one(native, mapped, number) for number in range(2 * native.num_layers)]
    kls: list[float] = []
    for start in range(0, len(mixed), BATCH):
        batch = mixed[start : start + BATCH]
        answers = read_tail(target, batch, ids, length=length, tail=TAIL)
        kls += [reference.compare(answer).kl for answer in answers]
    return torch.tensor(kls, dtype=torch.float64)


def with_one(native: KVCache, mapped: KVCache, number: int) -> KVCache:
    """``native`` but for the keys (even ``number``) or values of one layer; all of it views."""
    layer, kind = divmod(number, 2)
    sides = [list(native.keys), list(native.values)]
    sides[kind][layer] = (mapped.keys, mapped.values)[kind][layer]
    return KVCache(tuple(sides[0]), tuple(sides[1]), native.positions)
