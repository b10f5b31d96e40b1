"""All calibration rows of a pair in memory, for ideas that cannot be fitted from sums alone."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.cache import KVCache
from mappers.collect import aligned, content, lagged
from mappers.corpus import Corpus
from mappers.key_norm import norm_weights, restore
from mappers.progress import steps
from mappers.rope import RotaryTable
from tests.bench.recipe_bench.fitted import Models, Translate
from tests.bench.recipe_bench.reading import PROMPT_TOKENS, Document
from tests.bench.recipe_bench.sums import SKIPPED

Map = Callable[[Tensor], Tensor]
"""Inputs ``[n, (lags + 1) * 2 * L_s * H_s * D_s]`` to the target's ``[n, 2 * L_t * H_t * D_t]``."""


@dataclass(frozen=True)
class Rows:
    """Contents, float32: of the source lag after lag, all keys before all values each time."""

    inputs: Tensor
    outputs: Tensor


def rows_of(models: Models, corpus: Corpus, *, lags: int, stride: int = 1) -> Rows:
    """The rows from position 4 on, every ``stride``-th."""
    inputs, outputs = [], []
    for number in steps(range(len(corpus.windows)), "reading rows", show=True):
        ids = corpus.windows[number]
        rows = torch.arange(SKIPPED, len(ids), stride)
        source, target = aligned(models.source, models.target, ids)
        inputs.append(_inputs(models, source, rows, lags))
        native = content(target.take(rows), models.target.identity.rope, length=len(ids))
        outputs.append(_flat(native))
    return Rows(torch.cat(inputs), torch.cat(outputs))


def translation(models: Models, apply: Map, *, lags: int, norms: list[Tensor | None]) -> Translate:
    """A map of contents as a translation: key norms restored, keys rotated."""
    g, rope = models.geometry, models.target.identity.rope

    def translate(document: Document) -> KVCache:
        every = torch.arange(PROMPT_TOKENS)
        mapped = apply(_inputs(models, document.source, every, lags))
        layers = mapped.view(-1, 2, g.target_layers, g.target_heads, g.target_dim).unbind(2)
        table = RotaryTable.of(rope, document.source.positions, length=PROMPT_TOKENS)
        keys = [
            layer[:, 0].contiguous() if norm is None else restore(layer[:, 0].contiguous(), norm)
            for layer, norm in zip(layers, norms, strict=True)
        ]
        values = (layer[:, 1].contiguous() for layer in layers)
        return KVCache(tuple(map(table.apply, keys)), tuple(values), document.source.positions)

    return translate


def key_norms(models: Models, rows: Rows) -> list[Tensor | None]:
    """The target's, layer by layer, as far as its keys show one."""
    g = models.geometry
    keys = rows.outputs[:1024, : rows.outputs.shape[1] // 2]
    shaped = keys.view(len(keys), g.target_layers, g.target_heads, g.target_dim)
    return [norm_weights(layer) for layer in shaped.unbind(1)]


def _inputs(models: Models, source: KVCache, rows: Tensor, lags: int) -> Tensor:
    rope, tokens = models.source.identity.rope, source.tokens
    return torch.cat(
        [_flat(content(one, rope, length=tokens)) for one in lagged(source, rows, lags)], dim=1
    )


def _flat(cache: KVCache) -> Tensor:
    return torch.cat([layer.flatten(1) for layer in (*cache.keys, *cache.values)], dim=1)
