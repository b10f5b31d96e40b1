"""The mappers of this process: loaded within budgets, checked by a trial run, found by pair."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import structlog
import torch

import mappers.demo
from mappers import artifact as artifacts
from mappers.artifact import Artifact
from mappers.errors import ArtifactError, IdentityMismatch, KVTranslatorError
from mappers.identity import IdentityClaim, check
from mappers.manifest import Manifest
from mappers.servable import why_not_servable
from service.device import Device, bytes_beside, bytes_there, declared_bytes, device_of
from service.entry import Entry
from service.errors import Problem
from service.loaded import Loaded, Prepared, host_bytes, prepare, try_out, with_translator
from service.logs import described
from service.policy import Policies
from service.residency import NeverFits, NoRoom, Residency, Resident
from service.self_test import self_test
from service.settings import Settings

log = structlog.get_logger("service.store")

LOADERS = 2
FETCHERS = 32
"""As many pairs as these come at once when requests ask for them; one that is large or whose disk
is slow delays none of the others."""


TryOut = Callable[[], None]


class Store:
    """All entries, in the order of the settings. Loading happens off the event loop, on threads of
    its own: a load delays neither a translation nor another load."""

    def __init__(
        self,
        settings: Settings,
        on_device: Callable[[TryOut], None],
        device: Device | None = None,
    ) -> None:
        self._settings, self._on_device = settings, on_device
        self._device = device or device_of(settings.device)
        self._loaders = ThreadPoolExecutor(LOADERS, "kvt-loader")
        self._fetchers = ThreadPoolExecutor(FETCHERS, "kvt-fetcher")
        self.residency = Residency(
            {"host": settings.host_memory, "device": settings.device_memory},
            free_bytes=self._device.free_bytes,
            reclaim=self._device.reclaim,
            min_free_bytes=settings.min_free,
        )
        self._proving, self._proven = threading.Lock(), False
        self.entries = [Entry(path, path.name) for path in self.folders()]

    def folders(self) -> list[Path]:
        """The configured artifacts that there are now."""
        return artifact_folders(self._settings.artifacts)

    def load_all(self) -> None:
        """Load what is to be there from the start: the preload list, or else all that fits.

        One that fails is marked and keeps the others from nothing.
        """
        firsts = [(entry, self._loaders.submit(self._first_load, entry)) for entry in self.entries]
        for entry, first in firsts:
            self._note(entry, first)

    def load(self, entry: Entry) -> None:
        """Load or reload one, as an operator asks; on failure what was there keeps serving.

        Raises Problem (busy, or no room), ArtifactError, or another error of the library.
        """
        entry.wanted = True
        self._change(entry)

    def _change(self, entry: Entry, *, evict: bool = True) -> None:
        if not entry.changing.acquire(blocking=False):
            raise Problem("busy", "this mapper is being loaded; try again")
        try:
            self._load_anew(entry, evict)
        finally:
            entry.changing.release()

    def _load_anew(self, entry: Entry, evict: bool) -> None:
        started = time.perf_counter()
        try:
            self._load(entry, evict)
            entry.load_seconds = time.perf_counter() - started
        except (KVTranslatorError, NoRoom) as error:
            entry.error = str(error)
            may_fit_later = isinstance(error, NoRoom) and not isinstance(error, NeverFits)
            if entry.prepared is None and not may_fit_later:
                entry.state = "failed"
            raise

    def unload(self, entry: Entry) -> None:
        """Let go of the weights; requests that use them finish first."""
        entry.wanted, resident = False, entry.resident
        if resident is not None:
            entry.left(resident, "host")
            self.residency.replace(resident)

    def using(self, entry: Entry) -> contextlib.AbstractContextManager[None]:
        """Keep a snapshot's weights where they are. Raises ``Problem`` 503 if they have left."""
        if entry.resident is None:
            raise Problem("mapper_not_ready", "the mapper of this pair is not loaded")
        return self.residency.lease(entry.resident)

    def take_up(self, path: Path) -> bool:
        """An artifact is new or has changed: a loaded one is swapped, one that was not loaded is
        taken as at the start, one that an operator has unloaded stays so; on a loader's thread.
        False: it is being loaded; ask again."""
        found = self._at(path)
        entry = found or Entry(path, path.name)
        if entry.changing.locked():
            return False
        if found is None:
            self.entries.append(entry)
        if entry.state == "failed":
            entry.state, entry.error = "unloaded", None
        entry.behind = False
        work = self._first_load if entry.prepared is None else self._swap
        self._submit(self._loaders, work, entry)
        return True

    def behind(self, path: Path) -> bool:
        """Whether what was taken up could not be loaded for now."""
        entry = self._at(path)
        return entry is not None and entry.behind

    def _at(self, path: Path) -> Entry | None:
        return next((entry for entry in self.entries if entry.path == path), None)

    def close(self) -> None:
        """Wait for loads that have begun."""
        for threads in (self._loaders, self._fetchers):
            threads.shutdown(wait=True, cancel_futures=True)

    def _submit(
        self, threads: ThreadPoolExecutor, work: Callable[[Entry], None], entry: Entry
    ) -> None:
        threads.submit(work, entry).add_done_callback(partial(self._note, entry))

    def _note(self, entry: Entry, work: Future[None]) -> None:
        """What nobody has thought of stops no other mapper; waits for ``work``."""
        try:
            error = work.exception()
        except CancelledError:  # shutting down
            return
        if error is None:
            return
        log.error("mapper not loaded", id=entry.id, **described(error))
        if entry.prepared is None:
            entry.state, entry.error = "failed", "loading it has failed; the fault has been logged"

    def _first_load(self, entry: Entry) -> None:
        preload = self._settings.preload
        try:
            if entry.wanted and (not preload or entry.id in preload):
                self._change(entry, evict=False)
            else:
                entry.describe(artifacts.load_manifest(entry.path))
        except NoRoom:
            self._describe(entry)
        except Problem as error:  # an operator is loading it, perhaps as it was before
            entry.behind = True
            log.warning("mapper not loaded", id=entry.id, why=str(error))
        except KVTranslatorError as error:
            entry.state, entry.error = "failed", str(error)

    def _swap(self, entry: Entry) -> None:
        try:
            self._change(entry)
        except (KVTranslatorError, Problem) as error:
            entry.behind = isinstance(error, Problem) and not isinstance(error, NeverFits)
            log.warning("mapper not swapped", id=entry.id, why=str(error))

    def _describe(self, entry: Entry) -> None:
        with contextlib.suppress(ArtifactError):  # it was read a moment ago
            entry.describe(artifacts.load_manifest(entry.path))

    def _load(self, entry: Entry, evict: bool) -> None:
        resident = Resident(entry.id, entry.left, pinned=entry.id in self._settings.preload)
        with contextlib.ExitStack() as held:
            # The version that serves now does not make room for one that may prove bad.
            with contextlib.suppress(Problem):
                held.enter_context(self.using(entry))

            def admit(manifest: Manifest, nbytes: int) -> None:
                most = declared_bytes(manifest, self._device)
                self.residency.check("device", most, evict=evict)
                room = self.residency.room(resident, "host", nbytes, evict=evict)
                held.enter_context(room)

            artifact = artifacts.load(entry.path, admit=admit)
            if artifact.evidence is None and not self._settings.allow_unproven:
                raise ArtifactError("the mapper has no evidence of its quality")
            prepared = self._prepared(artifact)
            self.residency.settle(resident, "host", host_bytes(prepared))
            loaded = held.enter_context(self._placed(entry, resident, prepared, evict=evict))
            before = entry.put(artifact, prepared, loaded, resident)
        if before is not None:
            self.residency.replace(before)
        entry.why_not_servable = self._why_not_servable(artifact)

    def _prepared(self, artifact: Artifact) -> Prepared:
        try:
            return prepare(artifact, self._device)
        except OSError as error:
            raise NoRoom("host", artifact.mapper.nbytes, "it cannot be pinned now") from error

    @contextlib.contextmanager
    def _placed(
        self, entry: Entry, resident: Resident, prepared: Prepared, *, evict: bool
    ) -> Iterator[Loaded]:
        """The mapper's weights on the device, tried out there; they stay until the block ends."""
        self._prove()
        mapper = prepared.mapper
        most = bytes_there(mapper, self._device)
        with self.residency.room(resident, "device", most, evict=evict):
            try:
                translator = self._device.translator(mapper)
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise NoRoom("device", most, "it cannot be allocated now") from error
            loaded = with_translator(prepared, translator)
            self._on_device(lambda: try_out(loaded))
            self.residency.settle(resident, "device", bytes_beside(translator, mapper))
            yield loaded

    def _prove(self) -> None:
        """Once: nothing is placed on a device that does not give the golden answer."""
        with self._proving:
            if not self._proven:
                self._on_device(lambda: self_test(self._device))
                self._proven = True

    def _fetch(self, entry: Entry) -> None:
        """Have it brought to the device; whoever asks meanwhile re-prefills."""
        if entry.asked_for():
            self._submit(self._fetchers, self._bring, entry)

    def _bring(self, entry: Entry) -> None:
        """Once more for those who have asked while it could not be brought: it may fit by now."""
        while entry.still_asked_for():
            try:
                self._bring_once(entry)
            except (KVTranslatorError, Problem) as error:
                log.warning("mapper not loaded", id=entry.id, why=str(error))
            except BaseException:
                entry.fetching = False
                raise

    def _bring_once(self, entry: Entry) -> None:
        """From host memory or from disk, unless whoever was loading it has done so."""
        with entry.changing:
            prepared, resident = entry.prepared, entry.resident
            if entry.state != "unloaded":
                return
            if prepared is None or resident is None:
                self._load_anew(entry, evict=True)
                return
            with self._placed(entry, resident, prepared, evict=True) as loaded:
                entry.raised(loaded, resident)

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
        """A snapshot of the first entry for this pair; one that has left the device is fetched.

        Raises ``Problem`` 404 or 503, or ``IdentityMismatch``.
        """
        mismatch: IdentityMismatch | None = None
        for entry in self.entries:
            snapshot = entry.snapshot()
            if snapshot.source is None or snapshot.target is None:
                continue
            if (snapshot.source.model, snapshot.target.model) != (source.model, target.model):
                continue
            try:
                check(snapshot.source, source, "source")
                check(snapshot.target, target, "target")
            except IdentityMismatch as error:
                mismatch = mismatch or error
                continue
            self._fetch(entry)
            return snapshot
        raise mismatch or Problem("pair_not_found", "GET /mappers lists the pairs that there are")

    @property
    def ready(self) -> bool:
        """Whether all of the preload list can be used, or at least one mapper without a list."""
        ready = {entry.id for entry in self.entries if entry.state == "ready"}
        return ready.issuperset(self._settings.preload) and bool(ready)


def artifact_folders(given: Iterable[Path]) -> list[Path]:
    """The artifact folders that paths stand for: themselves, or the folders directly in them."""
    roots = list(given) or [Path(mappers.demo.__file__).parent / "artifacts"]
    folders: list[Path] = []
    for root in roots:
        one = (root / artifacts.MANIFEST).exists() or not root.is_dir()
        folders += [root] if one else artifacts.find(root)
    return folders
