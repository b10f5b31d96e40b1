"""The queries that a model's attention asks, layer by layer, as it reads a text."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mappers import hf_compat
from mappers.cache import KVCache, from_hf
from mappers.errors import UnsupportedModel

_USED = "sdpa"


def read_queries(model: PreTrainedModel, ids: Tensor, rows: Tensor) -> tuple[list[Tensor], float]:
    """Queries per layer, each [n, H_q, D] at the token rows ``rows`` [n], and the scores' scale.

    Queries are as attention uses them, after any norm and the rotary embedding. Raises
    UnsupportedModel for a model that does not attend by transformers' ``sdpa``.
    """
    _, queries, scale = read_with_queries(model, ids, rows)
    return queries, scale


def read_with_queries(
    model: PreTrainedModel, ids: Tensor, rows: Tensor
) -> tuple[KVCache, list[Tensor], float]:
    """The model's cache of the ids [T] as well; the rest as for ``read_queries``."""
    if model.config._attn_implementation != _USED:
        raise UnsupportedModel("attention_hidden", f"queries are read from {_USED} attention only")
    with _recording(rows.to(model.device)) as (found, scales):
        _, cache = hf_compat.read(model, ids[None], logits_at=torch.tensor([len(ids) - 1]))
    if len(found) != model.config.get_text_config().num_hidden_layers or len(set(scales)) != 1:
        raise UnsupportedModel("attention_hidden", "this model's attention shows no queries")
    return from_hf(cache), found, scales[0]


@contextmanager
def _recording(rows: Tensor) -> Iterator[tuple[list[Tensor], list[float]]]:
    """While it lasts, sdpa attention notes the queries that it is given; then it is as before."""
    attend = ALL_ATTENTION_FUNCTIONS[_USED]
    found: list[Tensor] = []
    scales: list[float] = []

    def noting(module: Any, query: Tensor, *arguments: Any, **options: Any) -> Any:
        found.append(query[0, :, rows].transpose(0, 1).float())
        scales.append(options.get("scaling") or query.shape[-1] ** -0.5)
        return attend(module, query, *arguments, **options)

    ALL_ATTENTION_FUNCTIONS[_USED] = noting
    try:
        yield found, scales
    finally:
        ALL_ATTENTION_FUNCTIONS[_USED] = attend
