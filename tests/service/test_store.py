"""Mappers between disk, host memory and a device: real artifacts, a device that counts, threads."""

import gc
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mappers.artifact import OpenFolder, load_manifest
from mappers.identity import IdentityClaim, ModelIdentity
from mappers.mapper import AffineMap, Mapper
from mappers.translate import Translator
from service.device import bytes_there, declared_bytes
from service.entry import Entry
from service.errors import Problem
from service.residency import NoRoom
from service.settings import Settings
from service.store import LOADERS, Store
from service.watch import Watch
from tests.service.pair import TARGET, cache, claim, identity, mapper, publish
from tests.service.reporting import served

NAMES = ("a", "b", "c")
SIDES = {name: identity(name, layers=3, theta=10_000.0) for name in NAMES}


class Counting:
    """A device with copies of the weights; it can be held up, and others may use its memory."""

    weight_bytes = 4

    def __init__(self) -> None:
        self.placed: list[str] = []
        self.free: int | None = None
        self.held_up: dict[str, threading.Event] = {}
        self.pinned: dict[int, int] = {}

    def translator(self, mapper: Mapper) -> Translator:
        name = mapper.source.model
        self.placed.append(name)
        if name in self.held_up:
            assert self.held_up[name].wait(60)
        layers = [
            replace(layer, keys=copied(layer.keys), values=copied(layer.values))
            for layer in mapper.layers
        ]
        return Translator(replace(mapper, layers=tuple(layers)))

    def free_bytes(self) -> int | None:
        return self.free

    def reclaim(self) -> None:
        if self.free is not None:
            self.free += one_mapper()

    def pin(self, address: int, nbytes: int) -> None:
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]


class Failing(Counting):
    """One that has no memory for mapper ``a`` the first times, once it is let go on."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.goes_on = times, threading.Semaphore(0)

    def translator(self, mapper: Mapper) -> Translator:
        made = super().translator(mapper)
        if mapper.source.model == "a" and self.placed.count("a") <= self.times:
            assert self.goes_on.acquire(timeout=60)
            raise MemoryError
        return made


def copied(affine: AffineMap) -> AffineMap:
    return AffineMap(affine.weight.clone(), affine.bias.clone(), affine.heads)


def of(name: str, *, scale: float = 1.0) -> Mapper:
    made = mapper(SIDES[name], TARGET)
    layers = [
        replace(layer, keys=replace(layer.keys, weight=layer.keys.weight * scale))
        for layer in made.layers
    ]
    return replace(made, layers=tuple(layers))


def one_mapper() -> int:
    return of("a").nbytes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in NAMES:
        publish(tmp_path, of(name))
    return tmp_path


def store_of(root: Path, device: Counting | None = None, **settings: object) -> Store:
    given = Settings(artifacts=(root,), **settings)  # type: ignore[arg-type]
    return Store(given, lambda work: work(), device or Counting())


def entry_of(store: Store, name: str) -> Entry:
    [entry] = [e for e in store.entries if e.source == SIDES[name]]
    return entry


def ask(store: Store, name: str) -> Entry:
    def said(side: ModelIdentity) -> IdentityClaim:
        return IdentityClaim(**claim(side))

    return store.find(said(SIDES[name]), said(TARGET))


def where(store: Store) -> str:
    return " ".join(entry_of(store, name).residency for name in NAMES)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def translated(entry: Entry) -> Tensor:
    answer = entry.loaded.translator.translate(cache(32), dtype=torch.float32)
    return torch.stack(answer.keys)


class TestResidency:
    def test_without_budgets_all_are_on_the_device(self, root: Path) -> None:
        store = store_of(root)
        store.load_all()
        assert where(store) == "device device device"
        assert store.ready
        entry = entry_of(store, "a")
        assert entry.resident_bytes("device") == one_mapper()
        assert entry.resident_bytes("host") > one_mapper()
        assert entry.load_seconds is not None
        store.close()

    def test_what_has_no_room_stays_on_disk_and_comes_when_asked_for(self, root: Path) -> None:
        store = store_of(root, device_memory=2 * one_mapper())
        store.load_all()
        [missing] = [e.source.model for e in store.entries if e.source and e.state == "unloaded"]
        assert where(store).count("device") == 2
        snapshot = ask(store, missing)
        with pytest.raises(Problem, match="is not loaded") as caught:
            _ = snapshot.loaded
        assert (caught.value.code, caught.value.retry_after_seconds) == ("mapper_not_ready", 1)
        until(lambda: entry_of(store, missing).state == "ready")
        assert where(store).count("device") == 2
        assert store.residency.used_bytes("device") == 2 * one_mapper()
        assert sum(store.residency.evictions.values()) == 1
        store.close()

    def test_from_host_memory_it_comes_back_without_the_disk(self, root: Path) -> None:
        store = store_of(root, device_memory=one_mapper(), preload=("none-of-them",))
        store.load_all()
        assert where(store) == "disk disk disk"
        assert not store.ready
        store.load(entry_of(store, "a"))
        weights = weakref.ref(entry_of(store, "a").loaded.translator)
        store.load(entry_of(store, "b"))
        assert where(store) == "host device disk"
        gc.collect()
        assert weights() is None, "what left the device is freed"
        before = translated(entry_of(store, "b"))
        for folder in list(root.iterdir()):
            folder.rename(root / f".{folder.name}.away")
        ask(store, "a")
        until(lambda: entry_of(store, "a").state == "ready")
        assert where(store) == "device host disk"
        ask(store, "b")
        until(lambda: entry_of(store, "b").state == "ready")
        assert torch.equal(translated(entry_of(store, "b")), before)
        store.close()

    def test_a_full_host_sends_the_least_recently_used_back_to_disk(self, root: Path) -> None:
        sizes = store_of(root)
        sizes.load_all()
        host = max(e.resident_bytes("host") for e in sizes.entries)
        sizes.close()
        store = store_of(root, host_memory=int(2.5 * host), preload=("none-of-them",))
        store.load_all()
        for name in NAMES[:2]:
            store.load(entry_of(store, name))
        with store.using(ask(store, "a")):
            pass
        store.load(entry_of(store, "c"))
        assert where(store) == "device disk device"
        store.close()

    def test_what_is_in_use_never_leaves(self, root: Path) -> None:
        store = store_of(root, device_memory=one_mapper(), preload=("none-of-them",))
        store.load_all()
        store.load(entry_of(store, "a"))
        with store.using(ask(store, "a")):
            with pytest.raises(NoRoom, match=f"{one_mapper()} of {one_mapper()} are in use"):
                store.load(entry_of(store, "b"))
            assert entry_of(store, "b").state == "unloaded"
            assert "device memory" in str(entry_of(store, "b").error)
        store.load(entry_of(store, "b"))
        assert where(store) == "host device disk"
        store.close()

    def test_a_snapshot_that_has_left_is_refused(self, root: Path) -> None:
        store = store_of(root)
        store.load_all()
        snapshot = ask(store, "a")
        store.unload(entry_of(store, "a"))
        with pytest.raises(Problem) as caught, store.using(snapshot):
            pass
        assert caught.value.code == "mapper_not_ready"
        store.close()

    def test_what_an_operator_unloaded_is_not_fetched(self, root: Path) -> None:
        device = Counting()
        store = store_of(root, device)
        store.load_all()
        store.unload(entry_of(store, "a"))
        with pytest.raises(Problem):
            _ = ask(store, "a").loaded
        store.close()
        assert device.placed.count("a") == 1
        assert entry_of(store, "a").residency == "disk"

    def test_many_who_ask_at_once_cost_one_fetch(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        brought: list[str] = []
        original = Store._bring

        def counted(self: Store, entry: Entry) -> None:
            brought.append(entry.id)
            original(self, entry)

        monkeypatch.setattr(Store, "_bring", counted)
        monkeypatch.setattr("service.store.FETCHERS", 2)
        device = Counting()
        store = store_of(root, device, preload=("none-of-them",))
        store.load_all()
        for name in ("b", "c"):  # both threads have something to do
            device.held_up[name] = threading.Event()
            ask(store, name)
        until(lambda: {"b", "c"} <= set(device.placed))
        for _ in range(100):
            ask(store, "a")
        for event in device.held_up.values():
            event.set()
        until(lambda: where(store) == "device device device")
        assert len(brought) == 3
        store.unload(entry_of(store, "a"))
        entry_of(store, "a").wanted = True
        ask(store, "a")
        until(lambda: entry_of(store, "a").residency == "device")
        store.close()

    def test_who_asks_while_it_fails_has_it_tried_again(self, root: Path) -> None:
        device = Failing(times=2)
        store = store_of(root, device, preload=("none-of-them",))
        store.load_all()
        ask(store, "a")
        for tries in (1, 2):
            until(lambda tries=tries: device.placed.count("a") == tries)  # type: ignore[misc]
            ask(store, "a")
            device.goes_on.release()
        until(lambda: entry_of(store, "a").state == "ready")
        assert device.placed.count("a") == 3
        assert not entry_of(store, "a").fetching
        store.close()

    def test_nobody_who_asks_has_it_tried_no_more(self, root: Path) -> None:
        device = Failing(times=1)
        device.goes_on.release()
        store = store_of(root, device, preload=("none-of-them",))
        store.load_all()
        ask(store, "a")
        until(lambda: not entry_of(store, "a").fetching)
        assert (device.placed.count("a"), entry_of(store, "a").state) == (1, "unloaded")
        ask(store, "a")
        until(lambda: entry_of(store, "a").state == "ready")
        store.close()

    def test_who_asks_while_an_operators_load_fails_has_it_tried_again(self, root: Path) -> None:
        device = Failing(times=1)
        store = store_of(root, device, preload=("none-of-them",))
        store.load_all()
        with ThreadPoolExecutor(1) as operator:
            loading = operator.submit(store.load, entry_of(store, "a"))
            until(lambda: "a" in device.placed)
            ask(store, "a")
            device.goes_on.release()
            assert isinstance(loading.exception(), NoRoom)
        until(lambda: entry_of(store, "a").state == "ready")
        store.close()

    def test_the_preload_list_is_loaded_and_kept(self, root: Path) -> None:
        [kept] = [folder.name for folder in root.iterdir() if folder.name.startswith("b-")]
        store = store_of(root, device_memory=2 * one_mapper(), preload=(kept,))
        store.load_all()
        assert where(store) == "disk device disk"
        assert store.ready
        store.load(entry_of(store, "a"))
        store.load(entry_of(store, "c"))
        assert where(store) == "host device device"
        store.close()

    def test_memory_of_other_processes_is_left_alone(self, root: Path) -> None:
        device = Counting()
        device.free = 2 * one_mapper()
        store = store_of(root, device, min_free=one_mapper(), preload=("none-of-them",))
        store.load_all()
        store.load(entry_of(store, "a"))
        device.free = one_mapper()
        store.load(entry_of(store, "b"))
        assert where(store) == "host device disk"
        device.free = 0
        with store.using(ask(store, "b")), pytest.raises(NoRoom, match="are to stay free"):
            store.load(entry_of(store, "c"))
        store.close()


class TestPinned:
    """What is in host memory is registered with the device, so that it comes back by DMA."""

    @pytest.fixture(autouse=True)
    def _none_is_too_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.device.LARGE_BYTES", 1)

    def test_for_as_long_as_it_is_there(self, root: Path) -> None:
        device = Counting()
        store = store_of(root, device, device_memory=one_mapper(), preload=("none-of-them",))
        store.load_all()
        for name in NAMES[:2]:
            store.load(entry_of(store, name))
        assert where(store) == "host device disk"
        assert len(device.pinned) == 2
        # In one piece, with what the file pads.
        assert all(one_mapper() <= n < one_mapper() + 4096 for n in device.pinned.values())
        store.unload(entry_of(store, "a"))
        gc.collect()
        assert len(device.pinned) == 1
        store.unload(entry_of(store, "b"))
        gc.collect()
        assert device.pinned == {}
        store.close()

    def test_what_cannot_be_pinned_has_no_room(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError("CUDA error 2")

        device = Counting()
        monkeypatch.setattr(device, "pin", full)
        store = store_of(root, device, preload=("none-of-them",))
        store.load_all()
        with pytest.raises(NoRoom, match="cannot be pinned now"):
            store.load(entry_of(store, "a"))
        assert store.residency.used_bytes("host") == 0
        store.close()


class TestWatch:
    def test_new_and_changed_artifacts_are_taken_up_after_two_equal_looks(self, root: Path) -> None:
        [moved] = [folder for folder in root.iterdir() if folder.name.startswith("c-")]
        away = root / f".{moved.name}.new"
        moved.rename(away)
        store = store_of(root)
        store.load_all()
        watch = Watch(store)
        watch.look()
        assert len(store.entries) == 2
        away.rename(moved)
        before = ask(store, "a").digest
        publish(root, of("a", scale=2.0))
        watch.look()
        assert len(store.entries) == 2
        watch.look()
        until(lambda: [e.state for e in store.entries] == ["ready"] * 3)
        until(lambda: ask(store, "a").digest != before)
        swapped = ask(store, "a").digest
        for _ in range(2):
            watch.look()
        store.close()
        assert ask(store, "a").digest == swapped, "what has not changed is not loaded again"
        assert store.residency.used_bytes("device") == 3 * one_mapper()

    def test_a_bad_copy_is_marked_and_tried_again_when_it_changes(self, root: Path) -> None:
        store = store_of(root)
        store.load_all()
        watch, folder = Watch(store), root / "d-copied"
        shutil.copytree(entry_of(store, "a").path, folder)
        for _ in range(2):
            watch.look()
        until(lambda: [e.state for e in store.entries].count("failed") == 1)
        assert "not named as its mapper" in str(store.entries[3].error)
        right = publish(root / "elsewhere", mapper(identity("d", layers=3, theta=10_000.0), TARGET))
        shutil.rmtree(folder)
        right.rename(root / right.name)
        for _ in range(2):
            watch.look()
        until(lambda: [e.state for e in store.entries].count("ready") == 4)
        store.close()

    def test_a_disk_that_was_away_is_looked_at_again(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original, failed = Store.folders, threading.Event()

        def away(self: Store) -> list[Path]:
            failed.set()
            raise PermissionError(13, "Permission denied")

        with served(Settings(artifacts=(root,), watch_seconds=0.02)) as client:
            monkeypatch.setattr(Store, "folders", away)
            assert failed.wait(60)
            monkeypatch.setattr(Store, "folders", original)
            publish(root, mapper(identity("d", layers=3, theta=10_000.0), TARGET))
            until(lambda: len(client.get("/mappers").json()["mappers"]) == 4)

    def test_a_running_service_looks_by_itself(self, root: Path) -> None:
        with served(Settings(artifacts=(root,), watch_seconds=0.02)) as client:
            publish(root, mapper(identity("d", layers=3, theta=10_000.0), TARGET))

            def states() -> list[str]:
                return [m["state"] for m in client.get("/mappers").json()["mappers"]]

            until(lambda: states() == ["ready"] * 4)


class TestWatchAndOperators:
    def changed(self, watch: Watch, root: Path, scale: float) -> None:
        publish(root, of("a", scale=scale))
        for _ in range(2):
            watch.look()

    def test_a_swap_without_room_is_tried_again(self, root: Path) -> None:
        store = store_of(root, device_memory=one_mapper(), preload=("none-of-them",))
        store.load_all()
        store.load(entry_of(store, "a"))
        watch, old = Watch(store), ask(store, "a").digest
        self.changed(watch, root, 2.0)
        until(lambda: entry_of(store, "a").behind)
        assert ask(store, "a").digest == old
        store.residency.limits = {"host": None, "device": 2 * one_mapper()}
        watch.look()
        until(lambda: ask(store, "a").digest != old)
        assert not entry_of(store, "a").behind
        store.close()

    def test_a_swap_that_an_operators_load_was_in_the_way_of_is_tried_again(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = store_of(root)
        store.load_all()
        watch, old, original = Watch(store), ask(store, "a").digest, Store._swap
        operator = threading.Event()

        def late(self: Store, entry: Entry) -> None:
            with entry.changing:  # between the look and the loader's turn
                original(self, entry)
            operator.set()

        monkeypatch.setattr(Store, "_swap", late)
        self.changed(watch, root, 2.0)
        assert operator.wait(60)
        assert entry_of(store, "a").behind
        monkeypatch.setattr(Store, "_swap", original)
        watch.look()
        until(lambda: ask(store, "a").digest != old)
        store.close()

    def test_what_an_operator_unloaded_stays_so_when_it_changes(self, root: Path) -> None:
        device = Counting()
        store = store_of(root, device)
        store.load_all()
        watch, old = Watch(store), ask(store, "a").digest
        store.unload(entry_of(store, "a"))
        self.changed(watch, root, 2.0)
        store.close()
        assert device.placed.count("a") == 1
        assert where(store) == "disk device device"
        store.load(entry_of(store, "a"))
        assert ask(store, "a").digest != old

    def test_what_is_unloaded_while_it_is_loaded_does_not_come(self, root: Path) -> None:
        device = Counting()
        device.held_up["a"] = threading.Event()
        store = store_of(root, device, preload=("none-of-them",))
        store.load_all()
        ask(store, "a")
        until(lambda: "a" in device.placed)
        store.unload(entry_of(store, "a"))
        device.held_up["a"].set()
        store.close()
        assert where(store) == "disk disk disk"
        assert store.residency.used_bytes("host") == store.residency.used_bytes("device") == 0


class Wrong(Counting):
    """A device whose keys come out slightly too large."""

    def translator(self, mapper: Mapper) -> Translator:
        keys = [
            replace(layer, keys=replace(layer.keys, weight=layer.keys.weight * 1.001))
            for layer in mapper.layers
        ]
        return super().translator(replace(mapper, layers=tuple(keys)))


def test_a_device_that_computes_wrongly_serves_nothing(root: Path) -> None:
    store = store_of(root, Wrong())
    store.load_all()
    assert [entry.state for entry in store.entries] == ["failed"] * 3
    assert all("keys of a known translation are off" in str(e.error) for e in store.entries)
    assert not store.ready
    assert store.residency.used_bytes("host") == 0
    store.close()


class Exhausted(Counting):
    """A device that fails, in a way that nobody has thought of, for one mapper."""

    def translator(self, mapper: Mapper) -> Translator:
        if mapper.source.model == "a":
            raise RuntimeError("/secret/place")
        return super().translator(mapper)


def test_one_that_fails_unforeseen_keeps_the_others_from_nothing(root: Path) -> None:
    store = store_of(root, Exhausted())
    store.load_all()
    assert [entry.state for entry in store.entries] == ["failed", "ready", "ready"]
    assert "secret" not in str(store.entries[0].error)
    assert store.residency.used_bytes("device") == 2 * one_mapper()
    store.close()


def test_one_that_an_operator_loads_meanwhile_does_not_stop_the_start(root: Path) -> None:
    store = store_of(root)
    with store.entries[0].changing:
        store.load_all()
    assert [entry.state for entry in store.entries] == ["unloaded", "ready", "ready"]
    store.close()


def test_the_golden_answer_is_asked_for_once(root: Path) -> None:
    device = Counting()
    store = store_of(root, device)
    store.load_all()
    store.close()
    assert sorted(device.placed) == ["a", "b", "c", "self-test"]


class TestDeclaredSizes:
    @pytest.fixture
    def read(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The files of artifacts that were read."""
        read: list[str] = []
        original = OpenFolder.read

        def watched(self: OpenFolder, name: str, *, at_most: int) -> bytearray:
            read.append(name)
            return original(self, name, at_most=at_most)

        monkeypatch.setattr(OpenFolder, "read", watched)
        return read

    def test_what_a_device_never_holds_is_not_read_nor_asked_for_again(
        self, root: Path, read: list[str]
    ) -> None:
        store = store_of(root, device_memory=one_mapper() - 1)
        store.load_all()
        assert set(read) == {"manifest.json"}
        assert [entry.state for entry in store.entries] == ["failed"] * 3
        assert "device memory: the budget is" in str(store.entries[0].error)
        read.clear()
        with pytest.raises(Problem) as caught:
            _ = ask(store, "a").loaded
        assert caught.value.code == "mapper_not_ready"
        store.close()
        assert read == []

    def test_what_a_device_does_not_hold_now_is_not_read_now(
        self, root: Path, read: list[str]
    ) -> None:
        store = store_of(root, device_memory=one_mapper(), preload=("none-of-them",))
        store.load_all()
        store.load(entry_of(store, "a"))
        read.clear()
        with store.using(ask(store, "a")):
            ask(store, "b")
            until(lambda: entry_of(store, "b").error is not None)
            assert set(read) == {"manifest.json"}
            assert entry_of(store, "b").state == "unloaded"
        assert where(store) == "device disk disk"
        # Who asks before the first fetch is quite over is not heard, and asks again.
        until(lambda: ask(store, "b").state == "ready")
        assert where(store) == "host device disk"
        store.close()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_manifest_says_what_the_device_will_need(
        self, tmp_path: Path, dtype: torch.dtype
    ) -> None:
        made = of("a")
        layers = [
            replace(
                layer,
                keys=replace(layer.keys, weight=layer.keys.weight.to(dtype)),
                values=replace(layer.values, weight=layer.values.weight.to(dtype)),
            )
            for layer in made.layers
        ]
        made = replace(made, layers=tuple(layers))
        manifest = load_manifest(publish(tmp_path, made))
        assert declared_bytes(manifest, Counting()) == bytes_there(made, Counting()) == one_mapper()

    def test_more_than_the_budget_is_refused_before_any_tensor_is_read(
        self, root: Path, read: list[str]
    ) -> None:
        store = store_of(root, host_memory=one_mapper() // 2)
        store.load_all()
        assert where(store) == "disk disk disk"
        assert set(read) == {"manifest.json"}
        with pytest.raises(NoRoom, match=f"the budget is {one_mapper() // 2}") as caught:
            store.load(entry_of(store, "a"))
        assert caught.value.kind.status == 507
        assert store.residency.used_bytes("host") == 0
        store.close()

    def test_a_load_that_fails_gives_its_memory_back(self, root: Path) -> None:
        store = store_of(root)
        store.load_all()
        used = store.residency.used_bytes("host")
        weights = entry_of(store, "a").path / "weights.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
        with pytest.raises(Exception, match="digest"):
            store.load(entry_of(store, "a"))
        assert store.residency.used_bytes("host") == used
        assert entry_of(store, "a").state == "ready"
        store.close()


class TestSideBySide:
    def test_a_slow_load_delays_no_other_and_no_translation(self, root: Path) -> None:
        device = Counting()
        device.held_up["a"] = threading.Event()
        store = store_of(root, device, preload=("none-of-them",))
        store.load_all()
        with ThreadPoolExecutor(1) as threads:
            slow = threads.submit(store.load, entry_of(store, "a"))
            until(lambda: "a" in device.placed)
            store.load(entry_of(store, "b"))
            assert torch.isfinite(translated(ask(store, "b"))).all()
            with pytest.raises(Problem, match="being loaded"):
                store.load(entry_of(store, "a"))
            assert not slow.done()
            device.held_up["a"].set()
            slow.result()
        assert where(store) == "device device disk"
        store.close()

    def test_however_many_are_slow(self, root: Path) -> None:
        device = Counting()
        store = store_of(root, device, preload=("none-of-them",))
        store.load_all()
        for name in NAMES[:LOADERS]:
            device.held_up[name] = threading.Event()
            ask(store, name)
        until(lambda: set(device.held_up) <= set(device.placed))
        ask(store, NAMES[LOADERS])
        until(lambda: entry_of(store, NAMES[LOADERS]).state == "ready")
        assert where(store) == "disk disk device"
        for event in device.held_up.values():
            event.set()
        store.close()
        assert where(store) == "device device device"

    def test_a_hot_swap_leaves_requests_on_the_old_version_or_the_new(self, root: Path) -> None:
        store = store_of(root)
        store.load_all()
        old = ask(store, "a")
        expected = translated(old)
        with store.using(old):
            publish(root, of("a", scale=2.0))
            store.load(entry_of(store, "a"))
            new = ask(store, "a")
            assert new.digest != old.digest
            assert new.timing is not old.timing
            assert new.timing.seconds(128) is not None
            assert store.residency.used_bytes("device") == 4 * one_mapper()
            assert torch.equal(translated(old), expected)
            assert not torch.equal(translated(new), expected)
        assert store.residency.used_bytes("device") == 3 * one_mapper()
        with pytest.raises(Problem), store.using(old):
            pass
        assert store.residency.evictions == {}
        store.close()

    def test_a_swap_without_room_leaves_the_old_version_serving(self, root: Path) -> None:
        store = store_of(root, device_memory=one_mapper(), preload=("none-of-them",))
        store.load_all()
        store.load(entry_of(store, "a"))
        old = ask(store, "a")
        publish(root, of("a", scale=2.0))
        with pytest.raises(NoRoom):
            store.load(entry_of(store, "a"))
        assert ask(store, "a").digest == old.digest
        with store.using(ask(store, "a")):
            assert torch.isfinite(translated(old)).all()
        assert "device memory" in str(entry_of(store, "a").error)
        store.unload(entry_of(store, "a"))
        store.load(entry_of(store, "a"))
        assert ask(store, "a").digest != old.digest
        store.close()

    def test_requests_loads_swaps_and_evictions_at_once(self, root: Path) -> None:
        """Each request sees one version: the answer is the one that its digest gives."""
        store = store_of(root, device_memory=2 * one_mapper())
        store.load_all()
        versions: dict[tuple[str, str | None], Tensor] = {}
        wrong, answered, stop = list[str](), list[str](), threading.Event()

        def request(seed: int) -> None:
            for step in range(60):
                name = NAMES[(step + seed) % 3]
                try:
                    snapshot = ask(store, name)
                    with store.using(snapshot):
                        got = translated(snapshot)
                except Problem:
                    time.sleep(0.002)
                    continue
                answered.append(name)
                if not torch.equal(got, versions.setdefault((name, snapshot.digest), got)):
                    wrong.append(name)

        def swap() -> None:
            scale = 1.0
            while not stop.is_set():
                scale = 3.0 - scale
                publish(root, of("a", scale=scale))
                try:
                    store.load(entry_of(store, "a"))
                except Problem:
                    time.sleep(0.002)

        with ThreadPoolExecutor(5) as threads:
            swapping = threads.submit(swap)
            for one in [threads.submit(request, seed) for seed in range(4)]:
                one.result()
            stop.set()
            swapping.result()
        store.close()
        assert wrong == []
        assert answered
        assert store.residency.used_bytes("device") <= 2 * one_mapper()
        for entry in store.entries:
            store.unload(entry)
        assert store.residency.used_bytes("device") == store.residency.used_bytes("host") == 0


def test_states_bytes_and_evictions_are_seen_from_outside(root: Path) -> None:
    settings = Settings(artifacts=(root,), host_memory=10 * one_mapper(), shadow_rate=0)
    with served(settings) as client:
        listed = client.get("/mappers").json()["mappers"]
        metrics = client.get("/metrics").text
        assert [m["residency"] for m in listed] == ["device"] * 3
        assert all(m["resident_bytes"] > one_mapper() and m["load_seconds"] > 0 for m in listed)
        pair = listed[0]["id"]
        assert f'kvt_mapper_load_seconds{{pair="{pair}"}}' in metrics
        assert f'kvt_mapper_evictions_total{{pair="{pair}",tier="host"}} 0.0' in metrics
        assert f'memory_budget_bytes{{tier="host"}} {float(10 * one_mapper())}' in metrics
