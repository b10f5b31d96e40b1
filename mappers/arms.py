"""What the target can read in place of its own cache, and what it then predicts.

With a prompt of T tokens and a native tail w, the target reads tokens [T - w, T) natively over
an arm's cache of tokens [0, T - w), then the next 31 tokens of the text. The next-token
distributions at the 32 positions T - 1 ... T + 30 are what is compared.

- native: its own cache; one pass over the text gives all lengths, since attention is causal
- translated: the mapper's cache, its first tokens exact (prefix known) or mapped like the rest
- translated, with a probe: the first 64 tokens are the target's own besides
- wrong document: the translated cache of another text of the same domain, first tokens exact
- raw source: the source's own cache as it is, target layer l reading source layer
  round(l (L_s - 1) / (L_t - 1)), the one at the same share of the depth; only where heads and
  head size are equal
- zero cache: keys and values of zeros, so attention is diluted and nothing is read
- last tokens: nothing before the tail, which keeps its true absolute positions
- no context: the last-tokens arm with a tail of 1, so token T - 1 sees only itself
- source alone: the source model's own prediction
- quantized: the target with weights rounded to 8 bits, which reads everything itself
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from mappers import hf_compat
from mappers.cache import KVCache, from_hf
from mappers.models import LoadedModel
from mappers.prefixes import ExactPrefixes
from mappers.scored import read_scored
from mappers.stored import rounded
from mappers.translate import Translator

CONTINUATION_TOKENS = 32


@dataclass(frozen=True)
class Reading:
    """One document as both models see it; ``*_logits`` are [lengths, 32, vocabulary].

    ``source_nll`` [T - 2], nats, is of all tokens but the first and the last, for the source.
    ``exact_tokens`` of ``prefix_known`` are the target's own.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    native: KVCache
    original: KVCache
    native_logits: Tensor
    source_logits: Tensor
    source_nll: Tensor
    prefix_known: KVCache
    prefix_unknown: KVCache
    exact_tokens: int

    def next_ids(self, length: int) -> Tensor:
        """The text's own continuation of a prompt of ``length`` tokens, int64 [32]."""
        return self.ids[length : length + CONTINUATION_TOKENS]

    def source_tail_nll(self, length: int, tail: int) -> float | None:
        """Mean over the prompt's last ``tail`` tokens but the first of them; None without any."""
        return float(self.source_nll[length - tail : length - 1].mean()) if tail > 1 else None


class TailReading(NamedTuple):
    """What the target made of a tail over B caches, with a batch of caches that goes on from there.

    ``logits`` [B, 32, vocabulary]; ``nll`` [B], the mean over the tail's own tokens but the first
    in nats, NaN for a tail of one token.
    """

    logits: Tensor
    nll: Tensor
    cache: Cache


def read_document(
    source: LoadedModel,
    target: LoadedModel,
    translator: Translator,
    prefixes: ExactPrefixes,
    ids: Tensor,
    lengths: Sequence[int],
) -> Reading:
    """Both models over ``ids`` [T], and the translation of all of it, once with each prefix.

    Source and translation are rounded as their engines store them, ``native`` is as computed.
    Only lengths that leave room for the continuation are kept.
    """
    fitting = tuple(n for n in lengths if n + CONTINUATION_TOKENS <= len(ids))
    ids = ids[: max(fitting) + CONTINUATION_TOKENS]
    native, native_logits = read_all(target.model, ids, fitting)
    read = read_scored(source.model, ids[None, :-1], logits_at=_after(fitting))
    original = rounded(from_hf(read.cache), source.identity.storage)
    exact, kept = exact_prefix(prefixes, ids, native), target.identity.storage
    known, unknown = (
        rounded(translator.translate(original, prefix=prefix, dtype=target.model.dtype), kept)
        for prefix in (exact, None)
    )
    return Reading(
        ids=ids,
        lengths=fitting,
        native=native,
        original=original,
        native_logits=native_logits,
        source_logits=read.logits[0].view(len(fitting), CONTINUATION_TOKENS, -1),
        source_nll=read.nll[0],
        prefix_known=known,
        prefix_unknown=unknown,
        exact_tokens=exact.tokens,
    )


def read_tail(
    target: LoadedModel, caches: Sequence[KVCache], ids: Tensor, *, length: int, tail: int
) -> Tensor:
    """Logits [B, 32, vocabulary] after the last ``tail`` prompt tokens are read over each cache.

    ``caches`` hold at least the first ``length - tail`` tokens; with none of them the tail is read
    over nothing (B is 1 then).
    """
    read, options = _tail_over(target, caches, ids, length, tail)
    return hf_compat.read(target.model, read, **options)[0]


def score_tail(
    target: LoadedModel, caches: Sequence[KVCache], ids: Tensor, *, length: int, tail: int
) -> TailReading:
    """``read_tail`` that scores the tail's own tokens too."""
    read, options = _tail_over(target, caches, ids, length, tail)
    logits, nll, cache = read_scored(target.model, read, **options)
    return TailReading(logits, nll[:, : tail - 1].mean(dim=1), cache)


def continued(target: LoadedModel, reading: TailReading, length: int) -> Tensor:
    """32 greedy tokens after a prompt of ``length`` tokens, int64 [B, 32].

    The prompt is not read twice: they go on from what the tail's reading left.
    """
    prompt = DynamicCache()
    whole: Any  # plain layers all, for ``stacked`` made them
    for layer, whole in enumerate(reading.cache.layers):
        prompt.update(whole.keys[:, :, :length], whole.values[:, :, :length], layer)
    return greedy(target.model, prompt, reading.logits[:, 0].argmax(-1), length)


def greedy(model: PreTrainedModel, cache: Cache, first: Tensor, position: int) -> Tensor:
    """The 32 most likely tokens one after the other, from ``first`` [B] on; int64 [B, 32].

    ``first`` is at ``position``, right after what ``cache`` holds; the cache grows.
    """
    chosen = [first]
    for step in range(CONTINUATION_TOKENS - 1):
        logits, cache = hf_compat.read(
            model, chosen[-1][:, None], cache=cache, start_position=position + step
        )
        chosen.append(logits[:, -1].argmax(-1))
    return torch.stack(chosen, dim=1).cpu()


def read_all(model: PreTrainedModel, ids: Tensor, lengths: Sequence[int]) -> tuple[KVCache, Tensor]:
    """A model's cache of all ``ids`` [T] but the last, and its logits after each prompt length."""
    logits, cache = hf_compat.read(model, ids[None, :-1], logits_at=_after(lengths))
    return from_hf(cache), logits[0].view(len(lengths), CONTINUATION_TOKENS, -1)


def raw_source(original: KVCache, target: LoadedModel) -> KVCache | None:
    """The source's cache in the target's place; None where the shapes do not allow it."""
    identity = target.identity
    wanted = (identity.num_kv_heads, identity.head_dim)
    if (original.num_kv_heads, original.head_dim) != wanted:
        return None
    deepest = max(1, identity.num_layers - 1)
    step = (original.num_layers - 1) / deepest
    read = [round(layer * step) for layer in range(identity.num_layers)]
    keys, values = ([side[j] for j in read] for side in (original.keys, original.values))
    return KVCache(tuple(keys), tuple(values), original.positions)


def probed(native: KVCache, mapped: KVCache, tokens: int) -> KVCache:
    """``mapped`` with its first ``tokens`` tokens replaced by the target's own; copied."""

    def splice(own: Tensor, other: Tensor) -> Tensor:
        return torch.cat([own[:tokens], other[tokens:]])

    return KVCache(
        tuple(map(splice, native.keys, mapped.keys)),
        tuple(map(splice, native.values, mapped.values)),
        mapped.positions,
    )


def zero_cache(native: KVCache) -> KVCache:
    """Zeros where the native cache has keys and values."""
    zeros = (torch.zeros_like(native.keys[0]),) * native.num_layers
    return KVCache(zeros, zeros, native.positions)


def exact_prefix(prefixes: ExactPrefixes, ids: Tensor, native: KVCache) -> KVCache:
    """The table's prefix; where it has none, what it would hold for the first token."""
    match = prefixes.longest_match(tuple(ids.tolist()))
    return native.slice(0, 1) if match is None else match[1]


def _after(lengths: Sequence[int]) -> Tensor:
    """The 32 positions whose predictions count after each prompt, end to end."""
    return torch.cat([torch.arange(n - 1, n - 1 + CONTINUATION_TOKENS) for n in lengths])


def _tail_over(
    target: LoadedModel, caches: Sequence[KVCache], ids: Tensor, length: int, tail: int
) -> tuple[Tensor, dict[str, Any]]:
    """What is read, ids [B, tail + 31], and the options of reading it over the caches."""
    begin, end = length - tail, length + CONTINUATION_TOKENS - 1
    cut = [cache.slice(0, begin) for cache in caches]
    model = target.model
    options = {
        "cache": hf_compat.stacked(cut, model.dtype, model.device) if cut else None,
        "start_position": begin,
        "logits_at": torch.arange(tail - 1, tail - 1 + CONTINUATION_TOKENS),
    }
    return ids[begin:end].expand(max(1, len(caches)), -1), options
