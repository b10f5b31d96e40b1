"""One configured artifact as this process knows it: what is loaded of it, and what others see."""

import math
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from mappers.artifact import Artifact
from mappers.evidence import Evidence
from mappers.identity import ModelIdentity
from mappers.manifest import Manifest
from mappers.probe import PROBE_TOKENS
from service.errors import Problem
from service.estimate import RunningFit
from service.loaded import Loaded, Prepared
from service.residency import Resident, Tier
from service.schemas import MapperInfo, SideInfo

State = Literal["ready", "unloaded", "failed"]


@dataclass(slots=True)
class Entry:
    """One configured artifact. Other threads than the one that serves load it and make it leave, so
    a request takes a ``snapshot`` and keeps it: evidence, digest and weights are of one artifact.

    ``wanted`` is False for what an operator has unloaded: only an operator brings it back.
    ``behind``: there is a newer version on disk that could not be loaded yet, but may be later.
    ``fetching``: a loader is to bring it to the device; ``asked``: a request has asked for that
    since the loader last began to.
    """

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
    wanted: bool = True
    behind: bool = False
    fetching: bool = False
    asked: bool = False
    load_seconds: float | None = None
    changing: threading.Lock = field(default_factory=threading.Lock, repr=False)
    resident: Resident | None = None
    prepared: Prepared | None = None
    _loaded: Loaded | None = None
    _swapping: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def snapshot(self) -> "Entry":
        """What it is now."""
        with self._swapping:
            return replace(self)

    @property
    def loaded(self) -> Loaded:
        """The weights; raises ``Problem`` 503 when they are not there."""
        if self._loaded is None:
            raise Problem(
                "mapper_not_ready",
                "the mapper of this pair is not loaded",
                retry_after_seconds=max(1, math.ceil(self.load_seconds or 1)),
            )
        return self._loaded

    @property
    def timing(self) -> RunningFit:
        """How long its translations take; raises ``Problem`` 503 as ``loaded`` does."""
        return self.loaded.timing

    @property
    def residency(self) -> Literal["disk", "host", "device"]:
        """Where its weights are; on the device they are in host memory too."""
        return "device" if self._loaded else "host" if self.prepared else "disk"

    def resident_bytes(self, tier: Tier) -> int:
        """Memory of weights, prefixes and profile in one tier."""
        return 0 if self.resident is None else self.resident.nbytes.get(tier, 0)

    def describe(self, manifest: Manifest) -> None:
        """Know the pair before anything of it is loaded."""
        self.id, self.recipe = manifest.mapper_id, manifest.recipe
        self.source, self.target = manifest.source, manifest.target

    def asked_for(self) -> bool:
        """A request would have it on the device: whether somebody has to begin to bring it."""
        with self._swapping:
            if not self._missing:
                return False
            begin = not self.fetching
            self.asked = self.fetching = True
            return begin

    def still_asked_for(self) -> bool:
        """Whether whoever fetches it has to bring it now; if not, it fetches it no longer."""
        with self._swapping:
            self.fetching = self.asked and self._missing
            self.asked = False
            return self.fetching

    @property
    def _missing(self) -> bool:
        return self.wanted and self.state == "unloaded"

    def put(
        self, artifact: Artifact, prepared: Prepared, loaded: Loaded, resident: Resident
    ) -> Resident | None:
        """Start serving this artifact; what held the one before. Raises Problem 503 when it was
        unloaded while it was loaded."""
        mapper = artifact.mapper
        with self._swapping:
            if not self.wanted:
                raise Problem("mapper_not_ready", "the mapper was unloaded meanwhile")
            self.id, self.digest = artifact.manifest.mapper_id, artifact.digest
            self.recipe, self.evidence = mapper.recipe, artifact.evidence
            self.source, self.target = mapper.source, mapper.target
            self.rows_an_input = artifact.rows_an_input
            self.prepared, self._loaded = prepared, loaded
            self.state, self.error, self.behind = "ready", None, False
            before, self.resident = self.resident, resident
            return before

    def raised(self, loaded: Loaded, resident: Resident) -> None:
        """Back on the device, unless it was unloaded meanwhile."""
        with self._swapping:
            if self.resident is resident:
                self._loaded, self.state, self.error = loaded, "ready", None

    def left(self, resident: Resident, tier: Tier) -> None:
        """Told by the residency; requests that run keep their weights until they are done."""
        with self._swapping:
            if self.resident is not resident:
                return
            self._loaded, self.state = None, "unloaded"
            if tier == "host":
                self.prepared = self.resident = None
                self.behind = False  # the next load reads what is there then

    def info(self) -> MapperInfo:
        """What ``/mappers`` says of it."""
        evidence = self.evidence
        lengths = {row.length for row in evidence.rows} if evidence else set()
        return MapperInfo(
            id=self.id,
            state=self.state,
            residency=self.residency,
            digest=self.digest,
            recipe=self.recipe,
            source=_side(self.source),
            target=_side(self.target),
            resident_bytes=self.resident_bytes("host"),
            device_bytes=self.resident_bytes("device"),
            load_seconds=self.load_seconds,
            evidence_rows=len(evidence.rows) if evidence else 0,
            certified_tokens=sorted(lengths),
            probe_tokens=PROBE_TOKENS if self._loaded and self._loaded.probe_queries else 0,
            error=self.error,
            why_not_servable=self.why_not_servable,
        )


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
