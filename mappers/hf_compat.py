"""The two spellings of one argument: transformers 5.24 renamed ``past_key_values`` to ``cache``.

Every forward pass of this project goes through here, so that no other file knows of it. Where the
rename has not happened yet (transformers 5.0 to 5.23) the old word is used; where it has, the new
one, because the old one warns until 5.40 and is gone then.
"""

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from mappers.cache import KVCache


def cache_keyword(model: torch.nn.Module) -> str:
    """``cache`` or ``past_key_values``: what this model's ``forward`` calls its KV cache."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def cache_arguments(model: torch.nn.Module, cache: Cache | None) -> dict[str, Any]:
    """The keyword argument that hands ``cache`` to this model's ``forward`` or ``generate``."""
    return {cache_keyword(model): cache}


def cache_of(outputs: object) -> Cache:
    """The KV cache in a model's outputs, under either name.

    Raises ValueError when there is none (``use_cache=False``).
    """
    for name in ("cache", "past_key_values"):
        found = getattr(outputs, name, None)
        if found is not None:
            return cast(Cache, found)
    raise ValueError("the model's outputs hold no KV cache; was use_cache off?")


@torch.inference_mode()
def read(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    cache: Cache | None = None,
    start_position: int | Tensor = 0,
    logits_at: Tensor | None = None,
) -> tuple[Tensor, Cache]:
    """One forward pass over ``ids`` [B, T] behind ``cache``, at ``start_position`` and on.

    ``start_position`` may be an int64 tensor [B, 1].

    Returns logits [B, N, vocabulary] in the model's dtype, at the rows ``logits_at`` [N] of ``ids``
    (default: all), and the cache. The positions are absolute and need not start where the cache
    ends.
    """
    positions = (torch.arange(ids.shape[1]) + start_position).to(model.device)
    extra: dict[str, Any] = {}
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    if logits_at is not None and keeps:
        extra["logits_to_keep"] = logits_at.to(model.device)
    outputs = model(
        input_ids=ids.to(model.device),
        position_ids=positions.expand(ids.shape[0], -1),
        use_cache=True,
        **cache_arguments(model, cache),
        **extra,
    )
    logits = cast(Tensor, outputs.logits)
    if logits_at is not None and not keeps:
        logits = logits[:, logits_at.to(logits.device)]
    return logits, cache_of(outputs)


def stacked(caches: Sequence[KVCache], dtype: torch.dtype, device: torch.device) -> DynamicCache:
    """A DynamicCache of batch B from B caches of equal geometry; the tensors are copied."""
    batch = DynamicCache()
    for layer in range(caches[0].num_layers):
        keys = torch.stack([c.keys[layer].transpose(0, 1) for c in caches])
        values = torch.stack([c.values[layer].transpose(0, 1) for c in caches])
        batch.update(keys.to(device, dtype), values.to(device, dtype), layer)
    return batch
