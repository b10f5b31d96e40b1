"""How much memory a benchmark takes, so that one that does not fit is refused before it begins."""

import math

import torch
from transformers import PretrainedConfig

from mappers.bench_hardware import check_room
from mappers.bench_pairs import Pair
from mappers.errors import TooLittleMemory
from mappers.geometry import Geometry
from mappers.recipes import RECIPES

ROOM_BYTES = 1 << 30
"""For all that is not a cache, weights or inputs of a product."""


def check_sizes(
    pair: Pair,
    recipe: str,
    k: int,
    weights: torch.dtype,
    tokens: int,
    *,
    device: str,
    dtype: torch.dtype,
    disk_bytes: int,
) -> None:
    """TooLittleMemory unless an artifact of this shape, what is made of it and the caches fit."""
    stored = artifact_bytes(pair, recipe, k, weights)
    if stored > disk_bytes:
        raise TooLittleMemory("the artifact's files", stored, disk_bytes)
    speed = speed_bytes(pair, k, tokens, dtype)
    there = artifact_bytes(pair, recipe, k, torch.float32 if device == "cpu" else torch.bfloat16)
    if device == "cpu":
        # Dense float32 weights are multiplied as they were read.
        as_read = weights == torch.float32 and RECIPES[recipe].structure != "per_head"
        copied = 0 if as_read else there
        check_room(stored + copied + speed, "cpu", "artifact, weights and caches")
    else:
        check_room(stored + ROOM_BYTES, "cpu", "the artifact's weights")
        check_room(there + speed, device, "weights and caches")


def artifact_bytes(pair: Pair, recipe: str, k: int, dtype: torch.dtype) -> int:
    """Weights of a random mapper of this shape in this dtype."""
    geometry = Geometry.of(*pair.identities())
    joint = RECIPES[recipe].structure == "joint"
    reads = k * geometry.source_heads if joint else k
    weight = RECIPES[recipe].weight_shape(geometry, reads)
    return 2 * geometry.target_layers * math.prod(weight) * dtype.itemsize


def speed_bytes(pair: Pair, k: int, tokens: int, dtype: torch.dtype) -> int:
    """Caches, content, and inputs of bare multiplies: what ``bench_speed.measure`` takes."""
    geometry = Geometry.of(*pair.identities())
    source = 2 * geometry.source_layers * geometry.source_width
    target = 2 * geometry.target_layers * geometry.target_width
    # In float32: content of the layers that are read, inputs and outputs of a product.
    work = 3 * k * geometry.source_width + 2 * geometry.target_width
    return tokens * ((source + target) * dtype.itemsize + 4 * work) + ROOM_BYTES


def model_bytes(config: PretrainedConfig, device: str) -> int:
    """Weights of a decoder of this shape, in the dtype in which its prefill is measured."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    layer = config.hidden_size * (heads * head_dim + 3 * config.intermediate_size)
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    numbers = config.num_hidden_layers * layer + embeddings
    return int(numbers) * (4 if device == "cpu" else 2) + ROOM_BYTES
