"""A tiny pair, its mapper with evidence on disk, and good requests for it: the real product, small.

Legend: L layers, T tokens, H kv heads, D head dim; ``_s`` source, ``_t`` target.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mappers import artifact
from mappers.cache import DTYPES, KVCache, consecutive
from mappers.evidence import Arm, Evidence, EvidenceRow
from mappers.identity import ModelIdentity
from mappers.layouts import Layout, write
from mappers.manifest import ManifestFacts
from mappers.mapper import AffineMap, LayerMap, Mapper
from mappers.prefixes import ExactPrefixes
from mappers.rope import Rope
from service.wire import write_header

PREFIX_IDS = (7, 9)
LENGTHS = (16, 64)
TAILS = (1, 8, 32)
ROWS = 60
# Certified KL by (prefix known, tail): so a test can ask for a tail by its max_kl.
KLS = {(True, 1): 0.02, (True, 8): 0.01, (True, 32): 0.004, (False, 8): 0.03, (False, 32): 0.01}
WIRE_DTYPE = "float32"


def identity(
    name: str, *, layers: int, theta: float, heads: int = 2, dim: int = 8
) -> ModelIdentity:
    """A model of H kv heads x D."""
    return ModelIdentity(
        model=name,
        version=f"{name}-r1",
        dtype=WIRE_DTYPE,
        kv_dtype=WIRE_DTYPE,
        architecture="qwen3",
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        rope=Rope(type="default", theta=theta, head_dim=dim, max_position_embeddings=512),
        k_norm=True,
        tokenizer_digest="sha256:00",
        attention=("full",) * layers,
    )


SOURCE = identity("small", layers=3, theta=10_000.0)
TARGET = identity("large", layers=4, theta=500_000.0)


def mapper(source: ModelIdentity = SOURCE, target: ModelIdentity = TARGET) -> Mapper:
    """Random maps of recipe full_head, each target layer reading two source layers."""
    generator = torch.Generator().manual_seed(3)
    width = target.num_kv_heads * target.head_dim

    def affine(inputs: int) -> AffineMap:
        weight = torch.randn(inputs, width, generator=generator) / inputs**0.5
        return AffineMap(weight, torch.randn(width, generator=generator))

    layers = []
    for index in range(target.num_layers):
        sources = tuple(sorted({index % source.num_layers, (index + 1) % source.num_layers}))
        inputs = len(sources) * source.num_kv_heads * source.head_dim
        layers.append(LayerMap(sources, affine(inputs), affine(inputs)))
    return Mapper(source, target, "full_head", tuple(layers), prefixes(target), 2)


def prefixes(target: ModelIdentity = TARGET) -> ExactPrefixes:
    """One known sequence, recognisable by its constant values."""
    shape = (len(PREFIX_IDS), target.num_kv_heads, target.head_dim)
    layers = [torch.full(shape, 100.0 + layer) for layer in range(target.num_layers)]
    return ExactPrefixes.of({PREFIX_IDS: KVCache(tuple(layers), tuple(layers), consecutive(2))})


def evidence() -> Evidence:
    """Enough rows for alpha 0.1 and delta 0.05, each KL constant in its cell."""
    rows = [
        EvidenceRow(
            document=f"d{number}",
            domain="chat",
            length=length,
            native_tail=tail,
            prefix_known=known,
            arm=Arm.TRANSLATED,
            kl=kl,
            kl_max=kl,
            top1=0.9,
            nll=2.0,
        )
        for (known, tail), kl in KLS.items()
        for length in LENGTHS
        for number in range(ROWS)
    ]
    return Evidence(continuation_tokens=32, corpora={"chat": "sha256:11"}, rows=tuple(rows))


def publish(root: Path, given: Mapper | None = None, *, proven: bool = True) -> Path:
    """The artifact's folder."""
    facts = ManifestFacts(ridge=0.01)
    return artifact.publish(root, given or mapper(), facts, evidence() if proven else None)


def cache(
    tokens: int, *, seed: int = 0, start_position: int = 0, dtype: str = WIRE_DTYPE
) -> KVCache:
    """A source cache of noise."""
    return cache_of(SOURCE, tokens, seed=seed, start_position=start_position, dtype=dtype)


def cache_of(
    model: ModelIdentity,
    tokens: int,
    *,
    seed: int = 0,
    start_position: int = 0,
    dtype: str = WIRE_DTYPE,
) -> KVCache:
    """The same of any model."""
    generator = torch.Generator().manual_seed(seed)
    shape = (model.num_layers, 2, tokens, model.num_kv_heads, model.head_dim)
    noise = torch.randn(shape, generator=generator).to(DTYPES[dtype])
    return KVCache(tuple(noise[:, 0]), tuple(noise[:, 1]), consecutive(tokens, start_position))


def claim(of: ModelIdentity, **changes: Any) -> dict[str, Any]:
    """What a request says of one side."""
    said = {
        "model": of.model,
        "version": of.version,
        "rope_theta": of.rope.theta,
        "dtype": of.dtype,
    }
    return {name: value for name, value in (said | changes).items() if value is not ...}


def document(tokens: int, **changes: Any) -> dict[str, Any]:
    """A good request document; a change of ``...`` leaves the field out."""
    good = {
        "source": claim(SOURCE),
        "target": claim(TARGET),
        "tokens": tokens,
        "layout": "NHD",
        "prefix_token_ids": list(PREFIX_IDS),
    }
    return {name: value for name, value in (good | changes).items() if value is not ...}


def raw(tensor: Tensor) -> bytes:
    """The tensor's memory, row-major."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@dataclass
class Request:
    """A body in parts, so that a test can spoil each of them."""

    document: dict[str, Any] = field(default_factory=lambda: document(32))
    tensors: dict[str, Tensor] = field(default_factory=lambda: write(Layout.NHD, cache(32)))
    kvt: str | None = None

    @property
    def header(self) -> bytes:
        """Length and JSON, as a good client writes them."""
        specs = [
            (name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
            for name, t in self.tensors.items()
        ]
        return write_header(specs, {"kvt": self.kvt or json.dumps(self.document)})[0]

    @property
    def data(self) -> bytes:
        """All tensors, end to end."""
        return b"".join(raw(tensor) for tensor in self.tensors.values())

    @property
    def body(self) -> bytes:
        """All of it."""
        return self.header + self.data


def good(
    tokens: int = 32, *, layout: Layout = Layout.NHD, seed: int = 0, **changes: Any
) -> Request:
    """A request that is translated."""
    said = document(tokens, layout=layout.value, **changes)
    start = said.get("start_position", 0)
    tensors = write(
        layout,
        cache(tokens, seed=seed, start_position=start, dtype=said["source"]["dtype"]),
        block_tokens=said.get("block_tokens"),
    )
    return Request(said, tensors)
