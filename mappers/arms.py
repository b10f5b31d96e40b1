"""What the target can read in place of its own cache, and what it then predicts.

With a prompt of T tokens and a native tail w, the target reads tokens [T - w, T) natively over
an arm's cache of tokens [0, T - w), then the next 31 tokens of the text. The next-token
distributions at the 32 positions T - 1 ... T + 30 are what is compared.

- native: its own cache; one pass over the text gives all lengths, since attention is causal
- translated: the mapper's cache, its first tokens exact (prefix known) or mapped like the rest
- wrong document: the translated cache of another text of the same domain, first tokens exact
- last tokens: nothing before the tail, which keeps its true absolute positions
- no context: the last-tokens arm with a tail of 1, so token T - 1 sees only itself
- source alone: the source model's own prediction
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers import hf_compat
from mappers.cache import KVCache, from_hf
from mappers.models import LoadedModel
from mappers.prefixes import ExactPrefixes
from mappers.translate import Translator

CONTINUATION_TOKENS = 32


@dataclass(frozen=True)
class Reading:
    """One document as both models see it; ``*_logits`` are [lengths, 32, vocabulary]."""

    ids: Tensor
    lengths: tuple[int, ...]
    native: KVCache
    native_logits: Tensor
    source_logits: Tensor
    prefix_known: KVCache
    prefix_unknown: KVCache

    def next_ids(self, length: int) -> Tensor:
        """The text's own continuation of a prompt of ``length`` tokens, int64 [32]."""
        return self.ids[length : length + CONTINUATION_TOKENS]


def read_document(
    source: LoadedModel,
    target: LoadedModel,
    translator: Translator,
    prefixes: ExactPrefixes,
    ids: Tensor,
    lengths: Sequence[int],
) -> Reading:
    """Both models over ``ids`` [T], and the translation of all of it, once with each prefix.

    Only lengths that leave room for the continuation are kept.
    """
    fitting = tuple(n for n in lengths if n + CONTINUATION_TOKENS <= len(ids))
    ids = ids[: max(fitting) + CONTINUATION_TOKENS]
    native, native_logits = _read_all(target, ids, fitting)
    original, source_logits = _read_all(source, ids, fitting)
    exact, dtype = _exact_prefix(prefixes, ids, native), target.model.dtype
    return Reading(
        ids=ids,
        lengths=fitting,
        native=native,
        native_logits=native_logits,
        source_logits=source_logits,
        prefix_known=translator.translate(original, prefix=exact, dtype=dtype),
        prefix_unknown=translator.translate(original, prefix=None, dtype=dtype),
    )


def read_tail(
    target: LoadedModel, caches: Sequence[KVCache], ids: Tensor, *, length: int, tail: int
) -> Tensor:
    """Logits [B, 32, vocabulary] after the last ``tail`` prompt tokens are read over each cache.

    ``caches`` hold at least the first ``length - tail`` tokens; with none of them the tail is read
    over nothing (B is 1 then).
    """
    begin, end = length - tail, length + CONTINUATION_TOKENS - 1
    cut = [cache.slice(0, begin) for cache in caches]
    model = target.model
    cache = hf_compat.stacked(cut, model.dtype, model.device) if cut else None
    batch = ids[begin:end].expand(max(1, len(caches)), -1)
    at = torch.arange(tail - 1, tail - 1 + CONTINUATION_TOKENS)
    return hf_compat.read(model, batch, cache=cache, start_position=begin, logits_at=at)[0]


def _read_all(model: LoadedModel, ids: Tensor, lengths: Sequence[int]) -> tuple[KVCache, Tensor]:
    at = torch.cat([torch.arange(n - 1, n - 1 + CONTINUATION_TOKENS) for n in lengths])
    logits, cache = hf_compat.read(model.model, ids[None, :-1], logits_at=at)
    return from_hf(cache), logits[0].view(len(lengths), CONTINUATION_TOKENS, -1)


def _exact_prefix(prefixes: ExactPrefixes, ids: Tensor, native: KVCache) -> KVCache:
    """The table's prefix; where it has none, what it would hold for the first token."""
    match = prefixes.longest_match(tuple(ids.tolist()))
    return native.slice(0, 1) if match is None else match[1]
