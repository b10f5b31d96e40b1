"""One pass over text that scores every token on the way, in bounded memory.

A model's logits at all positions of a long text are larger than its cache. So they are made for a
stretch of it at a time; kept are those that are wanted, and one likelihood a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Cache, PreTrainedModel

from mappers import hf_compat

LOGITS_AT_MOST = 1 << 26
"""Logits at a time; in float32 these are 256 MiB."""


class Scored(NamedTuple):
    """What a pass over ids [B, T] gave.

    ``logits`` [B, N, vocabulary] at the wanted rows, in the model's dtype; ``nll`` float32
    [B, T - 1], nats, of each token but the first, given those before; and the cache of all.
    """

    logits: Tensor
    nll: Tensor
    cache: Cache


@torch.inference_mode()
def read_scored(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    logits_at: Tensor,
    cache: Cache | None = None,
    start_position: int = 0,
) -> Scored:
    """``hf_compat.read`` over ids [B, T] in stretches; ``logits_at`` [N] in any order."""
    vocabulary = model.config.get_text_config().vocab_size
    stretch = max(1, LOGITS_AT_MOST // (len(ids) * vocabulary))
    wanted = torch.unique(logits_at)
    kept, nll = [], []
    for begin in range(0, ids.shape[1], stretch):
        end = begin + stretch
        logits, cache = hf_compat.read(
            model, ids[:, begin:end], cache=cache, start_position=start_position + begin
        )
        kept.append(logits[:, wanted[(wanted >= begin) & (wanted < end)] - begin])
        following = ids[:, begin + 1 : end + 1].to(logits.device)
        scores = logits[:, : following.shape[1]].flatten(0, 1).float()
        found = cross_entropy(scores, following.flatten(), reduction="none")
        nll.append(found.view(following.shape))
    if cache is None:
        raise ValueError("a text of no tokens cannot be read")
    at = torch.searchsorted(wanted, logits_at)
    return Scored(torch.cat(kept, dim=1)[:, at], torch.cat(nll, dim=1), cache)
