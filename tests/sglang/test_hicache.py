"""The dynamic backend in SGLang's own factory; no engine runs, the tests ask as its prefetch does.

``make test-sglang`` runs it in an environment that has SGLang, without CUDA.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

pytest.importorskip(
    "sglang.srt.mem_cache.hicache_storage", reason="make test-sglang installs SGLang"
)

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from service.bridge.carry import Carried, Job
from service.bridge.hicache import TranslatedPages
from service.bridge.inbox import Inbox
from service.bridge.pages import PagesError
from service.client import Client
from service.hf import claim_of
from tests.service.pair import PREFIX_IDS, SOURCE, TARGET, cache
from tests.service.threaded import Running
from tests.sglang.engine import PAGE, Order, backend, config, hashes, host, pages, translated

TOKENS = 64
IDS = [*PREFIX_IDS, *range(100, 98 + TOKENS)]
GIVEN = cache(TOKENS, seed=1)
WHOLE = TOKENS // PAGE - 1
SECONDS = 60.0


class Deployment:
    """The folders of a source and a target; the target's backend is made by SGLang's factory."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.jobs = folder / "jobs"
        self.jobs.mkdir()
        (folder / "source").mkdir()

    def made(self, pool: Any = None, places: Any = None, **changes: Any) -> TranslatedPages:
        kvt = {
            "source": "small",
            "target": "large",
            "url": self.url,
            "source_pages": str(self.folder / "source"),
            "source_name": "org/small",
            "jobs": str(self.jobs),
            "deadline_seconds": SECONDS,
        }
        extra = {
            "backend_name": "kvt",
            "module_path": "service.bridge.hicache",
            "class_name": "TranslatedPages",
            "file_storage_path": str(self.folder / "target"),
            "kvt": kvt | (places or {}),
        }
        of = config("org/large", **({"extra_config": extra} | changes))
        made: TranslatedPages = StorageBackendFactory.create_backend("dynamic", of, None)
        made.register_mem_pool_host(pool or host())  # as the engine does next
        return made

    def cached(self, order: Order = "layer_first") -> None:
        source = backend(self.folder / "source", "org/small")
        assert source.batch_set(hashes(IDS), pages(GIVEN, order))

    def dropped(self, url: str, session: str = "") -> Carried:
        claims = claim_of(SOURCE), claim_of(TARGET)
        with Client(url) as client:
            inbox = Inbox(self.jobs, PAGE)
            return inbox.drop(client, claims, Job(token_ids=tuple(IDS), session=session))


@pytest.fixture
def deployed(running: Running, tmp_path: Path) -> Deployment:
    return Deployment(tmp_path, running.url)


@pytest.fixture
def dripping() -> Iterator[str]:
    """A service whose answer never pauses for long, and does not come to an end."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(SECONDS)
    over = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            for _ in range(200):
                connection.sendall(b" ")
                if over.wait(0.02):
                    break

    thread = threading.Thread(target=drip)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    over.set()
    thread.join()
    listener.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_job_is_translated_when_its_pages_are_wanted(deployed: Deployment, layout: str) -> None:
    order: Order = "page_first" if layout == "page_first" else "layer_first"
    deployed.cached(order)
    target = deployed.made(host(layout))
    promised = deployed.dropped(deployed.url)
    assert (promised.decision, promised.tokens) == ("translate", WHOLE * PAGE)
    keys = hashes(IDS, promised.cache_salt or "")
    assert target.batch_exists(keys) == WHOLE
    assert target.batch_exists_v2(keys).kv_hit_pages == WHOLE
    for key, page in zip(keys, pages(translated(GIVEN), order), strict=False):
        [found] = target.batch_get([key], [torch.empty_like(page)])
        assert torch.equal(found, page)
    assert list(deployed.jobs.iterdir()) == []
    target.close()


def test_only_the_plans_salt_meets_a_job_or_its_pages(deployed: Deployment) -> None:
    deployed.cached()
    target = deployed.made()
    salts = [deployed.dropped(deployed.url, session).cache_salt or "" for session in ("a", "b")]
    for other in ("", "tenant", salts[0].removesuffix("-a"), f"{salts[0]}c"):
        assert target.batch_exists(hashes(IDS, other)) == 0
    assert len(list(deployed.jobs.iterdir())) == 2
    assert target.batch_exists(hashes(IDS, salts[0])) == WHOLE
    for other in ("", "tenant", salts[0].removesuffix("-a"), f"{salts[0]}c"):
        assert target.batch_exists(hashes(IDS, other)) == 0
    assert not target.exists(hashes(IDS, salts[1])[0])
    assert target.batch_exists(hashes(IDS, salts[1])) == WHOLE
    target.close()


def test_an_engine_that_has_the_first_page_asks_from_the_second_on(deployed: Deployment) -> None:
    deployed.cached()
    target = deployed.made()
    keys = hashes(IDS, deployed.dropped(deployed.url).cache_salt or "")
    said = HiCacheStorageExtraInfo(prefix_keys=keys[:1])
    assert target.batch_exists(keys[1:], said) == WHOLE - 1
    target.close()


def test_another_prompt_with_the_same_beginning_leaves_the_job(deployed: Deployment) -> None:
    deployed.cached()
    target = deployed.made()
    salt = deployed.dropped(deployed.url).cache_salt or ""
    other = list(IDS)
    other[WHOLE * PAGE - 1] += 1
    assert target.batch_exists(hashes(other, salt)) == 0
    assert len(list(deployed.jobs.iterdir())) == 1
    longer = [*IDS, *range(PAGE)]
    assert target.batch_exists(hashes(longer, salt)) == WHOLE
    assert list(deployed.jobs.iterdir()) == []
    target.close()


def test_what_is_there_is_not_translated_again(deployed: Deployment) -> None:
    target = deployed.made()
    salt = deployed.dropped(deployed.url).cache_salt or ""
    native = pages(translated(GIVEN), "layer_first")[:WHOLE]
    assert target.batch_set(hashes(IDS, salt), native)
    assert target.batch_exists(hashes(IDS, salt)[:WHOLE]) == WHOLE
    assert len(list(deployed.jobs.iterdir())) == 1
    target.close()


class TestMisses:
    """The engine prefills, the job is gone, and the log says why."""

    @pytest.fixture(autouse=True)
    def _logged(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", logger="service.bridge.hicache")
        self.caplog = caplog

    def missed(self, deployed: Deployment, target: TranslatedPages, reason: str) -> None:
        keys = hashes(IDS, deployed.dropped(deployed.url).cache_salt or "")
        assert target.batch_exists(keys) == 0
        assert list(deployed.jobs.iterdir()) == []
        target.close()
        [said] = [
            Carried.model_validate_json(record.getMessage().removeprefix("kvt: "))
            for record in self.caplog.records
            if record.name == "service.bridge.hicache"
        ]
        assert (said.decision, said.reason) == ("reprefill", reason)

    def test_nothing_is_cached(self, deployed: Deployment) -> None:
        self.missed(deployed, deployed.made(), "not_cached")

    def test_the_service_is_gone(self, deployed: Deployment) -> None:
        deployed.cached()
        target = deployed.made(places={"url": "http://127.0.0.1:1"})
        self.missed(deployed, target, "not_translated")

    def test_the_service_takes_too_long(self, deployed: Deployment, dripping: str) -> None:
        deployed.cached()
        target = deployed.made(places={"url": dripping, "deadline_seconds": 1.0})
        self.missed(deployed, target, "deadline")

    def test_there_is_no_mapper(self, deployed: Deployment) -> None:
        deployed.cached()
        self.missed(deployed, deployed.made(places={"target": "huge"}), "unsupported_model")

    def test_a_page_is_damaged(self, deployed: Deployment) -> None:
        deployed.cached()
        for page in (deployed.folder / "source").iterdir():
            page.write_bytes(page.read_bytes()[:-1])
        self.missed(deployed, deployed.made(), "layout_error")

    def test_the_engine_caches_in_another_dtype(self, deployed: Deployment) -> None:
        deployed.cached()
        self.missed(deployed, deployed.made(host(dtype=torch.bfloat16)), "pages_error")

    def test_the_job_is_none(self, deployed: Deployment) -> None:
        target, keys = deployed.made(), hashes(IDS, "salt")
        (deployed.jobs / f"{keys[0]}.json").write_bytes(b'{"token_ids": []}')
        assert target.batch_exists(keys) == 0
        assert list(deployed.jobs.iterdir()) == []
        assert target.batch_exists([]) == 0
        target.close()


class TestStart:
    @pytest.mark.parametrize(
        "changes",
        [{"tp_size": 2}, {"pp_size": 2}, {"attn_cp_size": 2}, {"is_mla_model": True}],
    )
    def test_a_part_of_a_model(self, deployed: Deployment, changes: dict[str, Any]) -> None:
        with pytest.raises(PagesError, match="on one rank, and not of MLA"):
            deployed.made(**changes)

    @pytest.mark.parametrize(
        "pool", [host("page_head"), host("page_first_kv_split"), host(storage_format_tag="unified")]
    )
    def test_pages_of_an_order_that_is_not_known(self, deployed: Deployment, pool: Any) -> None:
        with pytest.raises(PagesError, match="--hicache-mem-layout"):
            deployed.made(pool)

    @pytest.mark.parametrize("places", [{"deadline_seconds": 0}, {"uri": "x"}, {"jobs": None}])
    def test_places_that_are_none(self, deployed: Deployment, places: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            deployed.made(places=places)
