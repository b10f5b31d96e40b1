"""Mappers between a model and itself: what they give is known beforehand."""

from dataclasses import replace

import torch

from mappers.first_tokens import exact_prefixes
from mappers.mapper import AffineMap, LayerMap, Mapper
from mappers.models import LoadedModel


def identity_mapper(model: LoadedModel) -> Mapper:
    """Each layer reads itself, unchanged."""
    width = model.identity.num_kv_heads * model.identity.head_dim
    same = AffineMap(torch.eye(width), torch.zeros(width))
    return Mapper(
        source=model.identity,
        target=model.identity,
        recipe="full_head",
        layers=tuple(LayerMap((n,), same, same) for n in range(model.identity.num_layers)),
        prefixes=exact_prefixes(model, [(0,)]),
        skipped_positions=0,
    )


def broken_mapper(model: LoadedModel, layer: int = 1) -> Mapper:
    """The same, but for the values of one layer."""
    mapper = identity_mapper(model)
    weight = torch.eye(32)
    weight[:, :8] *= -1
    broken = replace(mapper.layers[layer], values=AffineMap(weight, torch.ones(32)))
    return replace(mapper, layers=(*mapper.layers[:layer], broken, *mapper.layers[layer + 1 :]))
