"""The queries that a model's attention asks, layer by layer, as it reads a text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mappers import hf_compat
from mappers.cache import KVCache, from_hf
from mappers.errors import UnsupportedModel
from mappers.models import LoadedModel
from mappers.probe import QUERIES_PER_HEAD, ProbeQueries
from mappers.rope import RotaryTable

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


def collect_probe_queries(target: LoadedModel, windows: Sequence[Tensor]) -> ProbeQueries | None:
    """A few queries of every head of the target, as it reads token-id windows, each int64 [T].

    One query from each of some windows spread over all of them, each from another place in the
    window's second half, where there is something to look back on. None for a model whose attention
    shows no queries.
    """
    chosen = torch.linspace(0, len(windows) - 1, min(QUERIES_PER_HEAD, len(windows))).long()
    asked: list[Tensor] = []
    for number, index in enumerate(chosen.tolist()):
        ids = windows[index]
        row = torch.tensor([len(ids) - 1 - number * len(ids) // (2 * QUERIES_PER_HEAD)])
        try:
            found, scale = read_queries(target.model, ids, row)
        except UnsupportedModel:
            return None
        table = RotaryTable.of(target.identity.rope, row, length=len(ids))
        asked.append(torch.stack([table.strip(query.cpu())[0] for query in found]))
    return ProbeQueries(torch.stack(asked, dim=2).bfloat16(), scale, target.identity.rope)


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
