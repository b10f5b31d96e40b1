"""The maps of some target layers on disk, between the parts of a fit: whole or not at all."""

import json
from collections.abc import Sequence
from pathlib import Path

from mappers.checkpoint import read_checkpoint, write_checkpoint
from mappers.mapper import AffineMap, Heads, LayerMap

SCHEMA = "kvt-part-1"
KINDS = ("keys", "values")


def save_layers(path: Path, layers: Sequence[LayerMap]) -> None:
    """Replace ``path``; key norms are not kept."""
    tensors = {}
    for index, layer in enumerate(layers):
        for kind, affine in zip(KINDS, (layer.keys, layer.values), strict=True):
            tensors[f"{index}.{kind}.weight"] = affine.weight.contiguous()
            tensors[f"{index}.{kind}.bias"] = affine.bias
    reads = [[layer.sources, layer.keys.heads, layer.values.heads] for layer in layers]
    write_checkpoint(path, tensors, {"schema": SCHEMA, "reads": json.dumps(reads)})


def load_layers(path: Path) -> list[LayerMap]:
    """What ``save_layers`` wrote. Raises ArtifactError for a file of another schema."""
    tensors, facts = read_checkpoint(path, SCHEMA)
    layers = []
    for index, (sources, *chosen) in enumerate(json.loads(facts["reads"])):
        keys, values = (
            AffineMap(
                tensors[f"{index}.{kind}.weight"], tensors[f"{index}.{kind}.bias"], _heads(heads)
            )
            for kind, heads in zip(KINDS, chosen, strict=True)
        )
        layers.append(LayerMap(tuple(sources), keys, values))
    return layers


def _heads(heads: list[list[int]] | None) -> Heads | None:
    return None if heads is None else tuple(tuple(reads) for reads in heads)
