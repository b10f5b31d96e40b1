"""Leases of a device's memory: everything but the driver's own calls, over a pool of our own."""

import asyncio
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from service import buffer_pair, cuda_ipc, sharing
from service.allocators import Allocator, HostAllocator, Kind
from service.app import create_app
from service.buffer_socket import NotHandedOver, fetch_slice
from service.buffers import Buffers
from service.client import Client
from service.cuda_ipc import CudaError, CudaPool
from service.device import Cpu
from service.device_pool import HOLDERS, Export, PoolAllocator, Slice, opened
from service.errors import Problem
from service.memfd import DESCRIPTORS, BadMemory, allocate, attach, file_bytes
from service.metrics import Metrics
from service.settings import Settings
from service.slices import ALIGNED_BYTES
from tests.service.device_memory import DIRT, FakePool, open_slice
from tests.service.live import assert_problem
from tests.service.pair import cache, good
from tests.service.reporting import elsewhere
from tests.service.sharing import Leased, Sharer
from tests.service.test_client_buffers import Passing, assert_equal, request, translated

POOL_BYTES = 1 << 20
TOKENS = 40


class TestAllocator:
    def test_what_is_leased_is_zeros_whoever_had_it(self) -> None:
        pool = FakePool(4 * ALIGNED_BYTES)
        allocator = PoolAllocator(pool)
        first = allocator.allocate(700)
        assert (first.data.tolist(), pool.waited) == ([0] * 700, 1)
        assert set(pool.data[2 * ALIGNED_BYTES :].tolist()) == {DIRT}
        first.data.fill_(7)
        allocator.free(first)
        again = allocator.allocate(900)
        assert again.data.data_ptr() == pool.data.data_ptr()
        assert not again.data.any()
        allocator.free(again)

    def test_a_full_pool_is_no_memory(self) -> None:
        allocator = PoolAllocator(FakePool(2 * ALIGNED_BYTES))
        held = allocator.allocate(ALIGNED_BYTES + 1)
        with pytest.raises(OSError, match="no free part"):
            allocator.allocate(1)
        allocator.free(held)
        allocator.free(allocator.allocate(2 * ALIGNED_BYTES))

    def test_what_fails_half_way_takes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        allocator = PoolAllocator(FakePool(ALIGNED_BYTES))

        def none_left(*_: object) -> None:
            raise OSError(28, "no space")

        with monkeypatch.context() as patch:
            patch.setattr("os.posix_fallocate", none_left)
            with pytest.raises(OSError, match="no space"):
                allocator.allocate(1)
        allocator.free(allocator.allocate(ALIGNED_BYTES))

    def test_memory_of_another_kind_is_not_taken_back(self) -> None:
        memory = allocate(10)
        with pytest.raises(TypeError, match="SharedMemory"):
            PoolAllocator(FakePool(ALIGNED_BYTES)).free(memory)
        memory.close()


class TestBooks:
    """The kinds have budgets of their own and one number of leases."""

    @pytest.fixture
    def buffers(self) -> Buffers:
        settings = Settings(buffers=Path("unused"), buffer_client_bytes=2 * ALIGNED_BYTES)
        allocators: dict[Kind, Allocator] = {
            "host": HostAllocator(settings.buffer_bytes, Cpu()),
            "cuda": PoolAllocator(FakePool(3 * ALIGNED_BYTES)),
        }
        return Buffers(settings, Metrics(version="test"), allocators)

    def test_a_client_and_all_of_them(self, buffers: Buffers) -> None:
        async def run() -> list[str]:
            codes = []
            for client, nbytes in (("a", 1025), ("a", 1024), ("a", 1), ("b", 512), ("b", 1)):
                try:
                    lease = await buffers.open(client, nbytes, "cuda")
                    await buffers.fetch(lease.id, 0)
                    codes.append("")
                except Problem as problem:
                    codes.append(problem.code)
            return codes

        assert asyncio.run(run()) == [
            "buffer_too_large", "", "buffer_budget", "", "out_of_memory",
        ]  # fmt: skip

    def test_a_slices_connections_count_among_the_descriptors(
        self, buffers: Buffers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def run() -> None:
            half = 2 * (DESCRIPTORS + HOLDERS)
            monkeypatch.setattr("resource.getrlimit", lambda _: (2 * half, 2 * half))
            for client in "ab":
                await buffers.open(client, 1, "cuda")
            with pytest.raises(Problem, match=f"the descriptors for buffers, {half}, are taken"):
                await buffers.open("c", 1, "cuda")

        asyncio.run(run())

    def test_a_slice_is_not_leased_again_while_a_client_holds_its_page(
        self, buffers: Buffers
    ) -> None:
        async def run() -> None:
            lease = await buffers.open("a", 1024, "cuda")
            memory = await buffers.fetch(lease.id, 0)
            page = memory.handle()
            theirs = opened(memory.where(), attach(page, 0), 1024, open_slice)
            view = theirs.data[10:20]
            view.fill_(9)
            theirs.close()
            await buffers.release(lease.id, "a")
            del theirs
            with pytest.raises(Problem, match="taken"):
                await buffers.open("b", 1024, "cuda")
            assert view.tolist() == [9] * 10
            del view
            await buffers.open("b", 1024, "cuda")

        asyncio.run(run())


@pytest.fixture(params=[True, False], ids=["leases", "no leases"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says who has a file open, and one that does not."""
    real = fcntl.fcntl

    def refuse(descriptor: int, command: int, *given: int) -> int:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, "leases are switched off")
        return real(descriptor, command, *given)

    if not request.param:
        monkeypatch.setattr(fcntl, "fcntl", refuse)


@pytest.mark.usefixtures("kernel")
class TestHolders:
    """A slice goes to nobody else before whoever has it mapped has let go of it."""

    def lease(self, service: TestClient, nbytes: int = POOL_BYTES) -> dict[str, Any]:
        answer = service.post("/buffers", json={"nbytes": nbytes, "kind": "cuda"})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def fetched(self, info: dict[str, Any]) -> Slice:
        memory = fetch_slice(info["socket"], info["id"], info["nbytes"], open_slice)
        memory.close()  # as the project's own client does
        return memory

    def refused(self, service: TestClient) -> None:
        """To another tenant."""
        asked = elsewhere(service, "192.0.2.7").post("/buffers", json={"nbytes": 1, "kind": "cuda"})
        assert_problem(asked, 507, "out_of_memory")

    def test_given_back_and_still_mapped(self, service: TestClient) -> None:
        info = self.lease(service)
        memory = self.fetched(info)
        view = memory.data[10:20]
        view.fill_(9)
        del memory
        assert service.delete(f"/buffers/{info['id']}").status_code == 204
        self.refused(service)
        assert view.tolist() == [9] * 10
        del view
        assert not self.fetched(self.lease(service)).data.any()

    def test_expired_and_still_mapped(self, service: TestClient) -> None:
        info = self.lease(service)
        memory = self.fetched(info)
        buffers = service.app.state.service.sharing.buffers
        buffers._leases[info["id"]].expires_seconds = 0
        self.refused(service)
        assert not memory.data.any()
        del memory
        self.lease(service)

    def test_a_process_that_is_killed_holds_nothing(self, service: TestClient) -> None:
        info = self.lease(service)
        program = (
            "import sys, torch; from service.buffer_socket import fetch_slice;"
            "held = fetch_slice(*sys.argv[1:3], int(sys.argv[3]),"
            " lambda export, keep: setattr(sys, 'keep', keep) or torch.zeros(1));"
            "print('held', flush=True); sys.stdin.read()"
        )
        said = (info["socket"], info["id"], str(info["nbytes"]))
        with subprocess.Popen(
            [sys.executable, "-c", program, *said], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"held\n"
            assert service.delete(f"/buffers/{info['id']}").status_code == 204
            self.refused(service)
            other.kill()
            other.wait()
        self.lease(service)

    def test_what_it_says_on_the_connection_changes_nothing(self, service: TestClient) -> None:
        info = self.lease(service)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(info["socket"])
            connection.send(info["id"].encode())
            descriptor = socket.recv_fds(connection, 512, 1)[1][0]
            os.close(descriptor)
            connection.send(b"still here")
            assert service.delete(f"/buffers/{info['id']}").status_code == 204
            self.refused(service)
        self.lease(service)

    def test_so_many_and_no_more(self, service: TestClient) -> None:
        info = self.lease(service)
        before = len(os.listdir("/proc/self/fd"))
        held = [self.fetched(info) for _ in range(HOLDERS)]
        with pytest.raises(NotHandedOver, match="buffer_budget"):
            self.fetched(info)
        held.pop()
        held.append(self.fetched(info))
        assert service.delete(f"/buffers/{info['id']}").status_code == 204
        held.clear()
        self.lease(service)
        assert len(os.listdir("/proc/self/fd")) <= before

    def test_the_services_end_closes_them(self, service: TestClient) -> None:
        info = self.lease(service)
        memory = self.fetched(info)
        buffers = service.app.state.service.sharing.buffers
        slice_ = buffers._leases[info["id"]].memory
        assert slice_.held_elsewhere
        slice_.close()
        assert not slice_._holders
        assert memory.data.nbytes == POOL_BYTES


class TestMessage:
    """Typed and bounded: nothing of it is believed before it was checked."""

    GOOD = {
        "device_uuid": "fa4e",
        "handle": "0" * 128,
        "pool_bytes": 100,
        "offset": 0,
        "nbytes": 10,
    }

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda said: said.pop("handle"),
            lambda said: said.update(handle="0" * 126),
            lambda said: said.update(handle="0" * 130),
            lambda said: said.update(handle="g" * 128),
            lambda said: said.update(device_uuid="../x"),
            lambda said: said.update(nbytes=11),
            lambda said: said.update(nbytes=10.0),
            lambda said: said.update(offset=91),
            lambda said: said.update(offset=-1),
            lambda said: said.update(offset=1 << 64),
            lambda said: said.update(more=1),
        ],
    )
    def test_what_is_not_a_place_is_not_opened(self, spoil: Callable[[Any], object]) -> None:
        said = dict(self.GOOD)
        spoil(said)
        self.refused(json.dumps(said).encode())

    @pytest.mark.parametrize("message", [b"", b"{", b"[]", b"\x80\x04K\x01.", b"\xff" * 300])
    def test_nor_what_is_no_document(self, message: bytes) -> None:
        self.refused(message)

    def refused(self, message: bytes) -> None:
        def never(export: Export, keep: object) -> torch.Tensor:
            raise AssertionError("opened")

        page = allocate(0)
        with pytest.raises(BadMemory):
            opened(message, page, 10, never)
        page.close()

    def test_it_says_where_the_slice_lies(self) -> None:
        allocator = PoolAllocator(FakePool(4 * ALIGNED_BYTES))
        held = [allocator.allocate(ALIGNED_BYTES + 1) for _ in range(2)]
        said = json.loads(held[1].where())
        assert (said["offset"], said["nbytes"]) == (2 * ALIGNED_BYTES, ALIGNED_BYTES + 1)
        assert (said["pool_bytes"], said["device_uuid"]) == (4 * ALIGNED_BYTES, "fa4e")
        assert len(b"ok" + held[1].where()) < 512
        for memory in held:
            allocator.free(memory)


@pytest.fixture
def service(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TestClient]:
    """A service with a pool, and clients that can open it."""
    monkeypatch.setattr(sharing, "CudaPool", lambda device, nbytes: FakePool(nbytes))
    monkeypatch.setattr(buffer_pair, "open_slice", open_slice)
    changes = {"buffers": tmp_path / "s", "buffer_device_bytes": POOL_BYTES}
    app = create_app(settings.model_copy(update=changes))
    with TestClient(app, raise_server_exceptions=False) as running:
        while running.get("/startupz").status_code != 200:
            pass
        yield running


class TestTranslations:
    def test_the_bodys_bits(self, service: TestClient) -> None:
        with Client("http://service", transport=Passing(service)) as client:
            body = translated(client.translate(cache(TOKENS), request()), "body")
            with client.buffers(kind="cuda") as buffers:
                outcome = client.translate(cache(TOKENS), request(), buffers=buffers)
                found = translated(outcome, "buffers")
                assert_equal(found.cache, body.cache)
                assert (buffers.ready_layers, buffers.why_not) == (4, None)
                gauges = service.get("/metrics").text
                assert "\nkvt_buffer_leases 2.0\n" in gauges
        assert_equal(found.cache, body.cache)  # held, so not leased to anyone else

    def test_a_lease_says_what_it_is(self, service: TestClient) -> None:
        asked = service.post("/buffers", json={"nbytes": 5_000, "kind": "cuda"})
        info = asked.json()
        assert (asked.status_code, info["kind"], info["nbytes"]) == (201, "cuda", 5_000)
        assert (info["file_bytes"], info["progress_offset"]) == (file_bytes(0), 0)
        memory = fetch_slice(info["socket"], info["id"], 5_000, open_slice)
        assert memory.data.tolist() == [0] * 5_000
        memory.close()

    def test_one_side_may_lie_on_the_device(self, service: TestClient) -> None:
        sharer = Sharer(service)
        info = service.post("/buffers", json={"nbytes": 1 << 16, "kind": "cuda"}).json()
        memory = fetch_slice(info["socket"], info["id"], 1 << 16, open_slice)
        hosts = sharer.lease(1 << 16)
        for target in (hosts, Leased(info, memory)):
            answer = sharer.translate(good(TOKENS), sharer.lease(1 << 16), target)
            assert answer.json()["decision"] == "translate"
            assert target.memory.ready_layers == 4
        assert torch.equal(memory.data, hosts.memory.data)
        memory.close()

    def test_without_a_pool_the_body_carries_it(self, settings: Settings, tmp_path: Path) -> None:
        shared = settings.model_copy(update={"buffers": tmp_path / "s"})
        with TestClient(create_app(shared)) as service:
            while service.get("/startupz").status_code != 200:
                pass
            asked = service.post("/buffers", json={"nbytes": 1, "kind": "cuda"})
            assert_problem(asked, 403, "buffers_off")
            with (
                Client("http://service", transport=Passing(service)) as client,
                client.buffers(kind="cuda") as buffers,
            ):
                outcome = client.translate(cache(TOKENS), request(), buffers=buffers)
                translated(outcome, "body")
                assert buffers.why_not == "buffers_off"


class TestWithoutAGpu:
    def test_a_pool_of_no_gpu_is_a_setting_that_is_refused(self) -> None:
        with pytest.raises(ValueError, match="the device is cpu"):
            Settings(buffers=Path("s"), buffer_device_bytes=1)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
    def test_nothing_is_opened(self) -> None:
        export = Export.model_validate(TestMessage.GOOD)
        with pytest.raises(BadMemory, match="not visible"):
            cuda_ipc.open_slice(export, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
class TestOnAGpu:
    """Never run so far: no machine with a GPU was at hand."""

    def test_another_process_sees_the_slice(self) -> None:
        allocator = PoolAllocator(CudaPool("cuda", 1 << 20))
        memory = allocator.allocate(1000)
        memory.data.fill_(7)
        torch.cuda.synchronize()
        program = (
            "import sys; from service.device_pool import Export;"
            "from service.cuda_ipc import open_slice;"
            "data = open_slice(Export.model_validate_json(sys.argv[1]), None);"
            "sys.exit(not bool((data == 7).all())); "
        )
        ran = subprocess.run([sys.executable, "-c", program, memory.where().decode()], check=False)
        assert ran.returncode == 0
        allocator.free(memory)

    def test_a_pool_larger_than_the_device_is_an_error(self) -> None:
        with pytest.raises(CudaError):
            CudaPool("cuda", 1 << 46)
