"""Caches that were translated before: A -> B -> A -> B, with text appended at every turn.

The model that holds the conversation reads the next tokens natively over what was translated into
it, then the whole is translated into the other. So errors can pile up; how fast is measured here,
as in the multi-turn study of arXiv 2608.03893.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mappers import hf_compat
from mappers.arms import CONTINUATION_TOKENS, exact_prefix, read_all, read_tail
from mappers.cache import KVCache, from_hf
from mappers.collect import cache_of_text
from mappers.evidence_rows import DriftRow
from mappers.mapper import Mapper
from mappers.metrics import Reference
from mappers.models import LoadedModel
from mappers.prefixes import ExactPrefixes
from mappers.stored import rounded
from mappers.translate import Translator


@dataclass(frozen=True)
class Side:
    """One model of a pair with the translator into it and its own exact prefixes."""

    name: Literal["source", "target"]
    loaded: LoadedModel
    into: Translator
    prefixes: ExactPrefixes

    def translated(self, cache: KVCache, ids: Tensor, *, known: bool = True) -> KVCache:
        """The other model's cache as this one's; its first tokens exact where ``known``."""
        prefix = None
        if known:
            prefix = exact_prefix(self.prefixes, ids, cache_of_text(self.loaded, ids[:1]))
        found = self.into.translate(cache, prefix=prefix, dtype=self.loaded.model.dtype)
        return self.kept(found)

    def kept(self, cache: KVCache) -> KVCache:
        """A cache as this model's engine stores it."""
        return rounded(cache, self.loaded.identity.storage)

    def appended(self, cache: KVCache, ids: Tensor) -> KVCache:
        """The cache after this model has read the rest of ``ids`` [T] over it."""
        model, begin = self.loaded.model, cache.tokens
        before = hf_compat.stacked([cache], model.dtype, model.device)
        last = torch.tensor([len(ids) - begin - 1])
        _, after = hf_compat.read(
            model, ids[None, begin:], cache=before, start_position=begin, logits_at=last
        )
        return self.kept(from_hf(after))


Pair = tuple[Side, Side]
"""Source, target."""


def sides(source: LoadedModel, target: LoadedModel, forward: Mapper, reverse: Mapper) -> Pair:
    """Both sides of a pair that is translated in both directions."""
    return (
        Side("source", source, Translator(reverse, device=source.model.device), reverse.prefixes),
        Side("target", target, Translator(forward, device=target.model.device), forward.prefixes),
    )


def handed_over(pair: Pair, ids: Tensor, hops: int) -> KVCache:
    """The source's cache of all ``ids`` [T] that has been through ``hops`` translations.

    The text is cut into hops + 1 turns of equal length. Whichever model it takes for the source to
    be last reads the first turn. Raises ValueError for fewer tokens than turns.
    """
    if len(ids) <= hops:
        raise ValueError(f"{len(ids)} tokens cannot be cut into {hops + 1} turns")
    ends = [len(ids) * (turn + 1) // (hops + 1) for turn in range(hops + 1)]
    holder = hops % 2
    cache = pair[holder].kept(cache_of_text(pair[holder].loaded, ids[: ends[0]]))
    for end in ends[1:]:
        holder = 1 - holder
        moved = pair[holder].translated(cache, ids)
        cache = pair[holder].appended(moved, ids[:end])
    return cache


def drift(
    pair: Pair, ids: Tensor, *, document: str, domain: str, turn_tokens: int, turns: int
) -> Iterator[DriftRow]:
    """A conversation that begins with the source and is translated after every turn.

    As many of ``turns`` turns of ``turn_tokens`` tokens as ``ids`` [T] and its 32 tokens of
    continuation have room for.
    """
    room = len(ids) - CONTINUATION_TOKENS
    lengths = [turn_tokens * turn for turn in range(1, turns + 1) if turn_tokens * turn <= room]
    if not lengths:
        return
    natives = [read_all(side.loaded.model, ids, lengths) for side in pair]
    whole = [side.kept(native) for side, (native, _) in zip(pair, natives, strict=True)]
    holder, cache = 0, whole[0].slice(0, turn_tokens)
    for at, length in enumerate(lengths):
        fresh = whole[holder].slice(0, length)
        holder = 1 - holder
        side = pair[holder]
        moved = side.translated(cache, ids)
        both = [moved, side.translated(fresh, ids)]
        logits = read_tail(side.loaded, both, ids, length=length, tail=1)
        reference = Reference(natives[holder][1][at], ids[length : length + logits.shape[1]])
        found, anew = reference.compare(logits[0]), reference.compare(logits[1])
        yield DriftRow(
            document=document,
            domain=domain,
            turn=at + 1,
            hops=at,
            length=length,
            side=side.name,
            kl=found.kl,
            top1=found.top1,
            nll=found.nll,
            kl_fresh=anew.kl,
        )
        if at + 1 < len(lengths):
            cache = side.appended(moved, ids[: length + turn_tokens])
