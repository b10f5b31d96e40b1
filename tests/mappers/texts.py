"""Caches as a model makes them, without a model: hidden states of texts, projected and rotated.

Legend: L layers, T tokens, H kv heads, D head dim, W width of the hidden state.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mappers.cache import KVCache, consecutive
from mappers.identity import ModelIdentity
from mappers.profile import CalibrationProfile
from mappers.profile_fit import ProfileBuilder
from mappers.rope import RotaryTable
from tests.mappers.pairs import identity

WIDTH, VOCABULARY, SKIPPED = 24, 300, 2


@dataclass(frozen=True)
class Author:
    """Keys and values with means of their own, from token embeddings and from what came before."""

    source: ModelIdentity = field(default_factory=lambda: identity(3, 2, 16))

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        s = self.source
        shape = (2, s.num_layers, WIDTH, s.num_kv_heads * s.head_dim)
        parts = {
            "embeddings": torch.randn(VOCABULARY, WIDTH, generator=generator),
            "maps": torch.randn(shape, generator=generator) / WIDTH**0.5,
            "means": 1.5 * torch.randn(2, s.num_layers, shape[-1], generator=generator),
        }
        for name, tensor in parts.items():
            object.__setattr__(self, f"_{name}", tensor)

    def ids(self, seed: int, tokens: int, *, words: int = VOCABULARY) -> Tensor:
        """Token ids of a text; with fewer ``words`` it keeps to the first of the vocabulary."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(words, (tokens,), generator=generator)

    def cache(self, ids: Tensor, *, start_position: int = 0) -> KVCache:
        """The cache of a text."""
        hidden = self._embeddings[ids]
        positions = consecutive(len(ids), start_position)
        table = RotaryTable.of(self.source.rope, positions)
        keys, values = [], []
        for layer in range(self.source.num_layers):
            content, value = (hidden @ self._maps[kind, layer] for kind in range(2))
            keys.append(table.apply(self._heads(content + self._means[0, layer])))
            # No mean in the first layer's values, which are the token's alone.
            values.append(self._heads(value + self._means[1, layer] * bool(layer)))
            before = hidden.cumsum(0) / torch.arange(1, len(ids) + 1)[:, None].sqrt()
            hidden = (0.8 * hidden + 0.6 * before.roll(1, 0)).tanh() * 1.5
        return KVCache(tuple(keys), tuple(values), positions)

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), self.source.num_kv_heads, self.source.head_dim)


AUTHOR = Author()


def builder(texts: int = 80, *, tokens: int = 160) -> ProfileBuilder:
    """One that has seen this many texts."""
    built = ProfileBuilder(AUTHOR.source, windows=texts, skip_positions=SKIPPED)
    for seed in range(texts):
        ids = AUTHOR.ids(seed, tokens)
        built.add(ids, AUTHOR.cache(ids))
    return built


def profile(texts: int = 80) -> CalibrationProfile:
    """The profile of this author."""
    made = builder(texts).profile()
    assert made is not None
    return made
