"""The pairs of models that benchmarks measure: shapes of real families, without their weights.

Time depends on shapes, not on values, so random weights do. The numbers are those of the
published config.json files, as is ``rope_theta``.
"""

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from mappers.cache import KVCache
from mappers.geometry import Geometry
from mappers.identity import ModelIdentity
from mappers.mapper import AffineMap, Heads, LayerMap, Mapper
from mappers.prefixes import ExactPrefixes
from mappers.recipes import RECIPES


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Configs of a source and a target that share a tokenizer."""

    source: PretrainedConfig
    target: PretrainedConfig

    def identities(self) -> tuple[ModelIdentity, ModelIdentity]:
        """Source and target, with names that say that no trained model stands behind them."""
        return _identity(self.source, "random-source"), _identity(self.target, "random-target")


def _identity(config: PretrainedConfig, name: str) -> ModelIdentity:
    return ModelIdentity.from_config(
        config, model=name, version="random", dtype="float32", tokenizer_digest="none"
    )


def _demo(layers: int, rope_theta: float) -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=4_096,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8_192,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=True,
    )


def _smollm2_135m(layers: int) -> PretrainedConfig:
    return LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8_192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )


def _qwen3(
    hidden_size: int, intermediate_size: int, *, layers: int = 28, heads: int = 16
) -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=layers == 28,
    )


PAIRS = {
    "demo": Pair(source=_demo(4, 10_000.0), target=_demo(8, 500_000.0)),
    "smollm2-135m": Pair(source=_smollm2_135m(22), target=_smollm2_135m(30)),
    "qwen3-0.6b:qwen3-1.7b": Pair(source=_qwen3(1_024, 3_072), target=_qwen3(2_048, 6_144)),
    "qwen3-14b:qwen3-32b": Pair(
        source=_qwen3(5_120, 17_408, layers=40, heads=40),
        target=_qwen3(5_120, 25_600, layers=64, heads=64),
    ),
}


def random_mapper(pair: Pair, *, recipe: str, k: int, dtype: torch.dtype = torch.float32) -> Mapper:
    """A mapper of this shape whose every target layer reads the k source layers nearest to it;
    with ``top_heads`` all their heads, all target heads the same.

    Weights are ``dtype`` on the CPU, scaled so that outputs keep the size of the inputs.
    """
    source, target = pair.identities()
    geometry = Geometry.of(source, target)
    joint = RECIPES[recipe].structure == "joint"
    reads = k * geometry.source_heads if joint else k
    inputs, outputs = RECIPES[recipe].weight_shape(geometry, reads)

    def affine(sources: tuple[int, ...], kind: int) -> AffineMap:
        heads = _heads_of(sources, geometry, kind) if joint else None
        weight = torch.empty(inputs, outputs, dtype=dtype).normal_(std=inputs**-0.5)
        return AffineMap(weight, torch.zeros(outputs), heads)

    def layer(index: int) -> LayerMap:
        sources = _nearest(index, geometry, k)
        return LayerMap(sources, affine(sources, 0), affine(sources, 1))

    return Mapper(
        source=source,
        target=target,
        recipe=recipe,
        layers=tuple(layer(index) for index in range(geometry.target_layers)),
        prefixes=ExactPrefixes(),
        skipped_positions=0,
    )


def random_cache(pair: Pair, tokens: int, dtype: torch.dtype, device: str) -> KVCache:
    """A cache of the pair's source: ``[tokens, H_s, D_s]`` a layer, positions from 0."""
    source, _ = pair.identities()
    shape = (tokens, source.num_kv_heads, source.head_dim)
    tensors = [torch.randn(shape, device=device).to(dtype) for _ in range(2 * source.num_layers)]
    return KVCache(
        keys=tuple(tensors[::2]), values=tuple(tensors[1::2]), positions=torch.arange(tokens)
    )


def _heads_of(sources: tuple[int, ...], geometry: Geometry, kind: int) -> Heads:
    """All heads of these layers' keys (kind 0) or values (1), for all target heads."""
    first = [(kind * geometry.source_layers + source) * geometry.source_heads for source in sources]
    return (tuple(number + head for number in first for head in range(geometry.source_heads)),)


def _nearest(target_layer: int, geometry: Geometry, k: int) -> tuple[int, ...]:
    """k neighbours of the source layer at the same relative depth, ascending."""
    centre = target_layer * geometry.source_layers // geometry.target_layers
    first = min(max(0, centre - k // 2), geometry.source_layers - k)
    return tuple(range(first, first + k))
