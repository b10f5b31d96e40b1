"""What a loaded mapper is: what the host keeps of it, its weights on the device, and its trial."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch

from mappers.artifact import Artifact
from mappers.cache import KVCache, consecutive
from mappers.errors import ArtifactError
from mappers.mapper import Mapper
from mappers.probe import ProbeQueries
from mappers.suffix import Kind as SuffixKind
from mappers.suffix import SuffixCheck, fit_suffix
from mappers.translate import Translator
from service.content import ContentGate
from service.device import Device, Pinned
from service.estimate import RunningFit

TRIAL_TOKENS = (32, 128)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What host memory holds of a loaded mapper.

    ``gain`` and ``offset`` bound its output: no absolute value of the answer exceeds
    ``gain * (largest of the source) + offset``. ``content`` is what it holds against caches.
    ``pinned`` makes copies to the device DMA. ``timing`` is of this version: another, perhaps of
    another recipe, learns its own.
    """

    mapper: Mapper
    content: ContentGate
    gain: float
    offset: float
    probe_queries: ProbeQueries | None
    suffix_checks: Mapping[SuffixKind, SuffixCheck]
    pinned: Pinned
    timing: RunningFit = field(default_factory=RunningFit, kw_only=True)


@dataclass(frozen=True, slots=True, eq=False)
class Loaded(Prepared):
    """The same with the weights on the device."""

    translator: Translator


def prepare(artifact: Artifact, device: Device) -> Prepared:
    """What the host keeps of a verified artifact, for this device. Raises OSError when its memory
    cannot be registered with that."""
    mapper = artifact.mapper
    maps = [affine for _, affine in mapper.affine_maps()]
    return Prepared(
        mapper,
        ContentGate.of(
            artifact.profile, artifact.evidence, mapper.source, mapper.skipped_positions
        ),
        gain=max(float(m.weight.float().abs().sum(0).max()) for m in maps),
        offset=max(float(m.bias.float().abs().max()) for m in maps),
        probe_queries=artifact.probe_queries,
        suffix_checks=fit_suffix(artifact.evidence.rows if artifact.evidence else ()),
        pinned=Pinned(mapper, device),
    )


def with_translator(prepared: Prepared, translator: Translator) -> Loaded:
    """The same, on the device."""
    parts = {part.name: getattr(prepared, part.name) for part in fields(Prepared)}
    return Loaded(**parts, translator=translator)


def host_bytes(prepared: Prepared) -> int:
    """Memory of weights, exact prefixes and profile."""
    mapper, profile = prepared.mapper, prepared.content.profile
    return mapper.nbytes + mapper.prefixes.nbytes + (profile.nbytes if profile else 0)


def try_out(loaded: Loaded) -> None:
    """Translate noise of two lengths: proves that the mapper runs, and starts the time estimate."""
    source = loaded.mapper.source
    generator = torch.Generator().manual_seed(0)
    for turn, tokens in enumerate((TRIAL_TOKENS[0], *TRIAL_TOKENS)):
        shape = (tokens, source.num_kv_heads, source.head_dim)
        layers = tuple(torch.randn(shape, generator=generator) for _ in range(source.num_layers))
        noise = KVCache(layers, layers, consecutive(tokens))
        started = time.perf_counter()
        answer = loaded.translator.translate(noise, dtype=torch.float32)
        if turn:  # the first pays for what the others find ready
            loaded.timing.add(tokens, time.perf_counter() - started)
        if not all(bool(torch.isfinite(t).all()) for t in (*answer.keys, *answer.values)):
            raise ArtifactError("the mapper gives values that are not finite")
