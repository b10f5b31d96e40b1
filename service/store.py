"""The mappers of this process: loaded, checked by a trial run, found by pair."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

import mappers.demo
from mappers import artifact as artifacts
from mappers.artifact import Artifact
from mappers.cache import KVCache, consecutive
from mappers.errors import ArtifactError, IdentityMismatch, KVTranslatorError
from mappers.evidence import Evidence
from mappers.identity import IdentityClaim, ModelIdentity, check
from mappers.mapper import Mapper
from mappers.probe import PROBE_TOKENS, ProbeQueries
from mappers.servable import why_not_servable
from mappers.suffix import Kind as SuffixKind
from mappers.suffix import SuffixCheck, fit_suffix
from mappers.translate import Translator
from service.content import ContentGate
from service.errors import Problem
from service.estimate import RunningFit
from service.policy import Policies
from service.schemas import MapperInfo, SideInfo
from service.settings import Settings

TRIAL_TOKENS = (32, 128)
State = Literal["ready", "unloaded", "failed"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a loaded mapper occupies memory with.

    ``gain`` and ``offset`` bound its output: no absolute value of the answer exceeds
    ``gain * (largest of the source) + offset``. ``content`` is what it holds against caches.
    """

    mapper: Mapper
    translator: Translator
    content: ContentGate
    gain: float
    offset: float
    probe_queries: ProbeQueries | None
    suffix_checks: Mapping[SuffixKind, SuffixCheck]


@dataclass(slots=True)
class Entry:
    """One configured artifact. It is loaded by another thread than the one that serves, so a
    request takes a ``snapshot`` and keeps it: evidence, digest and weights are of one artifact."""

    path: Path
    id: str
    state: State = "unloaded"
    error: str | None = None
    digest: str | None = None
    recipe: str | None = None
    source: ModelIdentity | None = None
    target: ModelIdentity | None = None
    evidence: Evidence | None = None
    rows_an_input: float = math.inf
    why_not_servable: str | None = None
    timing: RunningFit = field(default_factory=RunningFit)
    _loaded: Loaded | None = None
    _swapping: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def snapshot(self) -> "Entry":
        """What it is now; time estimates are shared."""
        with self._swapping:
            return replace(self)

    @property
    def loaded(self) -> Loaded:
        """The weights; raises ``Problem`` 503 when they are not there."""
        if self._loaded is None:
            raise Problem("mapper_not_ready", "the mapper of this pair is not loaded")
        return self._loaded

    @property
    def resident_bytes(self) -> int:
        """Memory of weights and exact prefixes; 0 when not loaded."""
        if self._loaded is None:
            return 0
        mapper, profile = self._loaded.mapper, self._loaded.content.profile
        return mapper.nbytes + mapper.prefixes.nbytes + (profile.nbytes if profile else 0)

    def put(self, artifact: Artifact, loaded: Loaded) -> None:
        """Start serving this artifact."""
        mapper = artifact.mapper
        with self._swapping:
            self.id, self.digest = artifact.manifest.mapper_id, artifact.digest
            self.recipe, self.evidence = mapper.recipe, artifact.evidence
            self.source, self.target = mapper.source, mapper.target
            self.rows_an_input = artifact.rows_an_input
            self._loaded, self.state, self.error = loaded, "ready", None

    def unload(self) -> None:
        """Let go of the weights; requests that run keep theirs until they are done."""
        with self._swapping:
            self._loaded, self.state = None, "unloaded"

    def info(self) -> MapperInfo:
        """What ``/mappers`` says of it."""
        evidence = self.evidence
        lengths = {row.length for row in evidence.rows} if evidence else set()
        return MapperInfo(
            id=self.id,
            state=self.state,
            digest=self.digest,
            recipe=self.recipe,
            source=_side(self.source),
            target=_side(self.target),
            resident_bytes=self.resident_bytes,
            evidence_rows=len(evidence.rows) if evidence else 0,
            certified_tokens=sorted(lengths),
            probe_tokens=PROBE_TOKENS if self._loaded and self._loaded.probe_queries else 0,
            error=self.error,
            why_not_servable=self.why_not_servable,
        )


Prepare = Callable[[], Loaded]


class Store:
    """All entries, in the order of the settings. Loading happens off the event loop."""

    def __init__(self, settings: Settings, on_device: Callable[[Prepare], Loaded]) -> None:
        self._settings, self._on_device = settings, on_device
        self._changing = threading.Lock()
        self.entries = [Entry(path, path.name) for path in artifact_folders(settings.artifacts)]

    def load_all(self) -> None:
        """Load every entry; one that fails is marked and keeps the others from nothing."""
        for entry in self.entries:
            try:
                self.load(entry)
            except KVTranslatorError:
                continue

    def load(self, entry: Entry) -> None:
        """Load or reload one; on failure what was loaded before keeps serving."""
        if not self._changing.acquire(blocking=False):
            raise Problem("busy", "another mapper is being loaded; try again")
        try:
            artifact = artifacts.load(entry.path)
            if artifact.evidence is None and not self._settings.allow_unproven:
                raise ArtifactError("the mapper has no evidence of its quality")
            device, timing = self._settings.device, entry.timing
            entry.put(artifact, self._on_device(lambda: _prepare(artifact, device, timing)))
            entry.why_not_servable = self._why_not_servable(artifact)
        except KVTranslatorError as error:
            entry.error = str(error)
            entry.state = "ready" if entry.state == "ready" else "failed"
            raise
        finally:
            self._changing.release()

    def _why_not_servable(self, artifact: Artifact) -> str | None:
        # Asked once: it weighs every domain and length.
        settings = self._settings
        policy = Policies(settings, settings.pairs).of(artifact.manifest.mapper_id)
        if artifact.evidence is None and settings.allow_unproven:
            return None
        return why_not_servable(
            artifact.evidence,
            policy.rule(policy.max_kl),
            rows_an_input=artifact.rows_an_input,
            min_rows_an_input=policy.min_rows_an_input,
        )

    def by_id(self, mapper_id: str) -> Entry:
        """Raises ``Problem`` 404."""
        for entry in self.entries:
            if entry.id == mapper_id:
                return entry
        raise Problem("mapper_not_found", "GET /mappers lists those that there are")

    def find(self, source: IdentityClaim, target: IdentityClaim) -> Entry:
        """A snapshot of the first entry for this pair.

        Raises ``Problem`` 404 or 503, or ``IdentityMismatch``.
        """
        mismatch: IdentityMismatch | None = None
        for entry in (one.snapshot() for one in self.entries):
            if entry.source is None or entry.target is None:
                continue
            if (entry.source.model, entry.target.model) != (source.model, target.model):
                continue
            try:
                check(entry.source, source, "source")
                check(entry.target, target, "target")
            except IdentityMismatch as error:
                mismatch = mismatch or error
                continue
            return entry
        raise mismatch or Problem("pair_not_found", "GET /mappers lists the pairs that there are")

    @property
    def ready(self) -> bool:
        """Whether at least one mapper can be used."""
        return any(entry.state == "ready" for entry in self.entries)


def artifact_folders(given: Iterable[Path]) -> list[Path]:
    """The artifact folders that paths stand for: themselves, or the folders directly in them."""
    roots = list(given) or [Path(mappers.demo.__file__).parent / "artifacts"]
    folders: list[Path] = []
    for root in roots:
        one = (root / artifacts.MANIFEST).exists() or not root.is_dir()
        folders += [root] if one else artifacts.find(root)
    return folders


def _prepare(artifact: Artifact, device: str, timing: RunningFit) -> Loaded:
    mapper = artifact.mapper
    translator = Translator(mapper, device=torch.device(device))
    maps = [affine for _, affine in mapper.affine_maps()]
    loaded = Loaded(
        mapper,
        translator,
        ContentGate.of(
            artifact.profile, artifact.evidence, mapper.source, mapper.skipped_positions
        ),
        gain=max(float(m.weight.float().abs().sum(0).max()) for m in maps),
        offset=max(float(m.bias.float().abs().max()) for m in maps),
        probe_queries=artifact.probe_queries,
        suffix_checks=fit_suffix(artifact.evidence.rows if artifact.evidence else ()),
    )
    _try_out(loaded, timing)
    return loaded


def _try_out(loaded: Loaded, timing: RunningFit) -> None:
    """Translate noise of two lengths: proves that the mapper runs, and starts the time estimate."""
    source = loaded.mapper.source
    generator = torch.Generator().manual_seed(0)
    for tokens in TRIAL_TOKENS:
        shape = (tokens, source.num_kv_heads, source.head_dim)
        layers = tuple(torch.randn(shape, generator=generator) for _ in range(source.num_layers))
        noise = KVCache(layers, layers, consecutive(tokens))
        started = time.perf_counter()
        answer = loaded.translator.translate(noise, dtype=torch.float32)
        timing.add(tokens, time.perf_counter() - started)
        if not all(bool(torch.isfinite(t).all()) for t in (*answer.keys, *answer.values)):
            raise ArtifactError("the mapper gives values that are not finite")


def _side(identity: ModelIdentity | None) -> SideInfo | None:
    if identity is None:
        return None
    return SideInfo(
        model=identity.model,
        version=identity.version,
        rope_theta=identity.rope.theta,
        rope_type=identity.rope.type,
        dtype=identity.dtype,
        kv_dtype=identity.kv_dtype,
        kv_scales=identity.kv_scales,
        kv_zero_points=identity.kv_zero_points,
        num_layers=identity.num_layers,
        num_kv_heads=identity.num_kv_heads,
        head_dim=identity.head_dim,
    )
