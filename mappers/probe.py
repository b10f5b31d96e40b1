"""Prefix probe: how far a translation is from the target's own KV of the prompt's first tokens.

Attention is causal, so the target's KV of the first p tokens costs p tokens of prefill and is what
a whole prefill would give. What matters of a difference is what attention makes of it; so a few
queries that the target asked on calibration text are asked again, at the position right after the
probe, over its own KV and over the translated.

Legend: L target layers, H kv heads, H_q query heads (H divides it; consecutive ones share a kv
head), Q queries a head, D head dim, p probe tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.cache import KVCache, Readable
from mappers.errors import LayoutError
from mappers.identity import ModelIdentity
from mappers.rope import Rope, RotaryTable
from mappers.translate import Translator

PROBE_TOKENS = 64
"""The size that is measured when a mapper is fitted, and so the only one that is certified."""

QUERIES_PER_HEAD = 4
"""With bfloat16 that is 4 MiB for a model of 64 layers of 64 query heads x 128."""

_SHARING_AT_MOST = 128
"""Query heads to a kv head."""


@dataclass(frozen=True, slots=True, eq=False)
class ProbeQueries:
    """Queries of the target in content space (no rotary embedding), bfloat16 ``[L, H_q, Q, D]``.

    ``scale`` multiplies scores before the softmax; ``rope`` is the target's.
    """

    content: Tensor
    scale: float
    rope: Rope

    def at(self, position: int, *, length: int | None = None) -> Tensor:
        """As the target would ask them at a position: float32 ``[L, H_q, Q, D]``.

        ``length``: tokens of the whole prompt, as in ``RotaryTable.of``.
        """
        device = self.content.device
        where = torch.tensor([position], device=device)
        table = RotaryTable.of(self.rope, where, length=length)
        # One position for all of them: to the table they are the heads of a single token.
        return table.apply(self.content.flatten(0, 2)[None]).view(self.content.shape)

    def tensors(self) -> dict[str, Tensor]:
        """For safetensors."""
        return {"queries": self.content, "scale": torch.tensor([self.scale])}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], target: ModelIdentity) -> "ProbeQueries":
        """The inverse of ``tensors``. Raises LayoutError for what no such target can have asked."""
        if tensors.keys() != {"queries", "scale"}:
            raise LayoutError("probe: expected queries and their scale")
        content, scale = tensors["queries"], tensors["scale"]
        _check_queries(content, target)
        if scale.dtype != torch.float32 or tuple(scale.shape) != (1,):
            raise LayoutError("probe: scale must be one float32")
        if not 0 < float(scale) < math.inf:
            raise LayoutError("probe: scale must be positive")
        return cls(content, float(scale), target.rope)


def bytes_at_most(target: ModelIdentity) -> int:
    """No queries of this target have more bytes of tensors."""
    heads = target.num_layers * target.num_kv_heads * _SHARING_AT_MOST
    return 2 * heads * QUERIES_PER_HEAD * target.head_dim + 4


def translation_error(
    queries: ProbeQueries, translator: Translator, source: Readable, native: KVCache
) -> float:
    """``probe_error`` of the translation of a prompt whose first p tokens the target read itself.

    ``source`` is the source's cache of the whole prompt, ``native`` the probe, both from position
    0. The first token is an attention sink that no map gets right, and is known; it is taken from
    the probe, so that the rest counts. Raises NonFinite as ``Translator.stream`` does.
    """
    mapped = translator.translate(
        source, dtype=torch.float32, prefix=native.slice(0, 1), tokens=native.tokens
    )
    return probe_error(queries, native, mapped, length=source.tokens)


def probe_error(
    queries: ProbeQueries, native: KVCache, mapped: KVCache, *, length: int | None = None
) -> float:
    """Mean over layers and query heads of |o_mapped - o_native| / |o_native|.

    o is what attention hands on for a head's queries, which see all p tokens of ``native``, or of
    ``mapped``: caches of one geometry, keys as cached. NaN
    when either holds a NaN, or a head of the native one hands on nothing. ``length`` as in ``at``.
    Raises LayoutError when the caches differ in form or are not of the queries' model.
    """
    _check_caches(queries, native, mapped)
    asked = queries.at(int(native.positions[-1]) + 1, length=length)
    errors = []
    for layer, of_layer in enumerate(asked):
        own, other = (_attend(of_layer, cache, layer, queries.scale) for cache in (native, mapped))
        apart = torch.linalg.vector_norm(other - own, dim=(1, 2))
        errors.append(apart / torch.linalg.vector_norm(own, dim=(1, 2)))
    return float(torch.stack(errors).mean())


def _attend(queries: Tensor, cache: KVCache, layer: int, scale: float) -> Tensor:
    """What attention over one layer of ``cache`` hands on to queries [H_q, Q, D], same shape."""
    keys, values = (
        side[layer].to(queries.device, torch.float32).transpose(0, 1)
        for side in (cache.keys, cache.values)
    )
    grouped = queries.reshape(keys.shape[0], -1, keys.shape[2])
    weights = (grouped @ keys.transpose(1, 2) * scale).softmax(-1)
    return (weights @ values).view(queries.shape)


def _check_queries(content: Tensor, target: ModelIdentity) -> None:
    if content.dtype != torch.bfloat16 or content.ndim != 4:
        raise LayoutError("probe: queries must be bfloat16 [layers, heads, queries, dim]")
    layers, heads, queries, dim = content.shape
    sharing, rest = divmod(heads, target.num_kv_heads)
    if (layers, dim) != (target.num_layers, target.head_dim) or rest:
        raise LayoutError(f"probe: queries {list(content.shape)} are not of the target's geometry")
    if not (1 <= sharing <= _SHARING_AT_MOST and 1 <= queries <= QUERIES_PER_HEAD):
        raise LayoutError(f"probe: queries {list(content.shape)} are too many or none")
    if not bool(content.isfinite().all()):
        raise LayoutError("probe: queries are not finite")


def _check_caches(queries: ProbeQueries, native: KVCache, mapped: KVCache) -> None:
    if native.keys[0].shape != mapped.keys[0].shape or native.num_layers != mapped.num_layers:
        raise LayoutError("probe: the native and the mapped cache differ in layers or shape")
    layers, heads, _, dim = queries.content.shape
    if native.tokens < 1 or native.num_layers != layers:
        raise LayoutError(f"probe: expected {layers} layers of at least one token")
    if native.head_dim != dim or heads % native.num_kv_heads:
        raise LayoutError(f"probe: {heads} query heads x {dim} cannot read these caches")
