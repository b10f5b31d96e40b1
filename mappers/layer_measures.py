"""How well each layer and head was translated: R2, attention-output cosine, error concentration.

All are over tokens that were mapped, on held-out text; exact first tokens are left out of them,
but attention reads them. e_t is a token's error, q a query of the target's own, a the attention
weight that its own cache gives it. For one kv head, averaged over the n queries and over the query
heads that share it:

- r2: 1 - sum_t |e_t|^2 / sum_t |y_t - mean y|^2, pooled over documents; of keys in content space
  (``r2_keys``) and as cached (``r2_keys_cached``: equal errors, for rotations keep lengths, but
  another spread)
- attention_cosine: cosine of the attention's output over the translated and the native cache
- key_concentration: d tr(M S) / (tr M tr S) with M = E[q q'], S = E[e e'], both as cached: the
  share of the error that queries see, over what they would see of one without direction
- value_concentration: [sum a_t^2 |e_t|^2 / sum a_t^2] / mean |e_t|^2

Above 1 the error lies where attention reads. arXiv 2608.03893, appendix on error concentration;
its weights are normalised here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from mappers.arms import Reading
from mappers.evidence_rows import LayerMeasure, LayerRow
from mappers.models import LoadedModel
from mappers.queries import read_queries
from mappers.rope import RotaryTable

QUERIES = 32
RESAMPLES = 500
MEASURES: tuple[LayerMeasure, ...] = get_args(LayerMeasure)
Sums = dict[str, Tensor]


def layer_sums(target: LoadedModel, reading: Reading) -> Sums:
    """One document's sums, float64 [L, H, ...], from which ``layer_rows`` makes the measures."""
    tokens, first = reading.native.tokens, reading.exact_tokens
    rows = torch.linspace(tokens // 2, tokens - 1, min(QUERIES, tokens // 2)).round().long()
    queries, scale = read_queries(target.model, reading.ids[:-1], rows)
    rope = target.identity.rope
    table = RotaryTable.of(rope, reading.native.positions, length=tokens)
    layers = [
        _Layer(reading, layer, queries[layer], rows, scale, first).sums(table)
        for layer in range(reading.native.num_layers)
    ]
    return {name: torch.stack([sums[name] for sums in layers]) for name in layers[0]}


def layer_rows(documents: Sequence[Mapping[str, Tensor]], domain: str) -> list[LayerRow]:
    """One row a layer, head and measure over all documents, with intervals over documents."""
    count = len(documents)
    stacked = {name: torch.stack([sums[name] for sums in documents]) for name in documents[0]}
    draws = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    weights = torch.nn.functional.one_hot(draws, count).sum(1).double()
    rows = []
    for layer in range(stacked["tokens"].shape[1]):
        of_layer = {name: sums[:, layer] for name, sums in stacked.items()}
        whole = _measures(of_layer, torch.ones(1, count, dtype=torch.float64))
        drawn = _measures(of_layer, weights)
        for name in MEASURES:
            ends = torch.nanquantile(drawn[name], torch.tensor([0.025, 0.975]).double(), dim=0)
            for head, value in enumerate(whole[name][0].tolist()):
                low, high = (_short(end) for end in ends[:, head].tolist())
                common: dict[str, Any] = dict(domain=domain, layer=layer, head=head, measure=name)
                rows.append(
                    LayerRow(**common, value=_short(value), low=low, high=high, documents=count)
                )
    return rows


@dataclass(frozen=True)
class _Layer:
    """One target layer of one document; ``queries`` [n, H_q, D] are of the token rows ``rows``."""

    reading: Reading
    layer: int
    queries: Tensor
    rows: Tensor
    scale: float
    first: int

    def sums(self, table: RotaryTable) -> Sums:
        """Sums over mapped tokens, each [H] or, where the name says so, [H, D]."""
        native, mapped = self.reading.native, self.reading.prefix_known
        keys, values = native.keys[self.layer].float(), native.values[self.layer].float()
        mapped_keys = mapped.keys[self.layer][: len(keys)].float()
        mapped_values = mapped.values[self.layer][: len(keys)].float()
        known = slice(self.first, None)
        key_error, value_error = (mapped_keys - keys)[known], (mapped_values - values)[known]
        attention = self._attention(keys)
        outputs = _output(attention, values), _output(self._attention(mapped_keys), mapped_values)
        cosine = torch.cosine_similarity(*outputs, dim=-1).mean(0)
        found = {
            "tokens": torch.full((keys.shape[1],), float(len(key_error))),
            "cosine": self._by_kv_head(cosine[None])[0].mean(-1),
            "key_concentration": self._key_concentration(key_error),
            "value_concentration": self._value_concentration(value_error, attention),
        }
        content = table.strip(keys)[known]
        for name, y, e in (
            ("keys", content, key_error),
            ("cached", keys[known], key_error),
            ("values", values[known], value_error),
        ):
            y = y.double()
            found |= {
                f"{name}_error": e.double().square().sum((0, 2)),
                f"{name}_square": y.square().sum((0, 2)),
                f"{name}_sum": y.sum(0),
            }
        return {name: value.double().cpu() for name, value in found.items()}

    def _attention(self, keys: Tensor) -> Tensor:
        """Weights [n, H_q, T] of the queries over cached ``keys`` [T, H, D]."""
        spread = keys.repeat_interleave(self.queries.shape[1] // keys.shape[1], dim=1)
        scores = torch.einsum("nhd,thd->nht", self.queries, spread) * self.scale
        unseen = torch.arange(len(keys), device=keys.device) > self.rows.to(keys.device)[:, None]
        return scores.masked_fill(unseen[:, None], float("-inf")).softmax(-1)

    def _by_kv_head(self, per_query_head: Tensor) -> Tensor:
        """[n, H_q, ...] as [n, H, H_q / H, ...]."""
        heads = self.reading.native.num_kv_heads
        shape = per_query_head.shape
        return per_query_head.reshape(shape[0], heads, shape[1] // heads, *shape[2:])

    def _key_concentration(self, error: Tensor) -> Tensor:
        e, q = error.double(), self._by_kv_head(self.queries.double())
        seen = torch.einsum("nhgd,thd->hgnt", q, e).square().mean((2, 3))
        plain = q.square().sum(-1).mean(0) * e.square().sum(-1).mean(0)[:, None]
        return (q.shape[-1] * seen / plain).mean(-1)

    def _value_concentration(self, error: Tensor, attention: Tensor) -> Tensor:
        size = error.double().square().sum(-1)
        weight = self._by_kv_head(attention.double().square())[..., self.first :].mean(0)
        weighted = torch.einsum("hgt,th->hg", weight, size) / weight.sum(-1)
        return (weighted / size.mean(0)[:, None]).mean(-1)


def _output(attention: Tensor, values: Tensor) -> Tensor:
    """What attention hands on, [n, H_q, D], from weights [n, H_q, T] and values [T, H, D]."""
    spread = values.repeat_interleave(attention.shape[1] // values.shape[1], dim=1)
    return torch.einsum("nht,thd->nhd", attention, spread)


def _measures(sums: Mapping[str, Tensor], weights: Tensor) -> dict[LayerMeasure, Tensor]:
    """Every measure [draws, H] of documents weighted by ``weights`` [draws, documents]."""

    def total(name: str) -> Tensor:
        return torch.einsum("bn,n...->b...", weights, sums[name])

    def r2(name: str) -> Tensor:
        mean = total(f"{name}_sum").square().sum(-1) / total("tokens")
        return 1 - total(f"{name}_error") / (total(f"{name}_square") - mean)

    def average(name: str) -> Tensor:
        return total(name) / weights.sum(1)[:, None]

    return {
        "r2_keys": r2("keys"),
        "r2_keys_cached": r2("cached"),
        "r2_values": r2("values"),
        "attention_cosine": average("cosine"),
        "key_concentration": average("key_concentration"),
        "value_concentration": average("value_concentration"),
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")
