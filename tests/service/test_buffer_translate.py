"""Translations from one buffer into another: the body's bits, and nothing that a body can't do."""

import itertools
import json
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from mappers.cache import DTYPES
from mappers.layouts import Layout
from mappers.mapper import Mapper
from mappers.quantize import Storage
from mappers.stored import store
from mappers.translate import Translator
from service import output, pipeline
from service.app import create_app
from service.settings import Settings
from tests.service.live import SAFETENSORS, assert_problem
from tests.service.pair import SOURCE, TARGET, Request, cache, claim, good, mapper, publish
from tests.service.sharing import Leased, Sharer, exchange
from tests.service.test_stored import TOKENS, mapper_of, parts_of, request_of

ROOM_BYTES = 1 << 16
PAGED = (Layout.VLLM_HN2D, Layout.VLLM_2BNHD)


@pytest.fixture
def shared(settings: Settings, tmp_path: Path) -> Settings:
    return settings.model_copy(update={"buffers": tmp_path / "s"})


@pytest.fixture
def client(shared: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(shared), raise_server_exceptions=False) as running:
        while running.get("/startupz").status_code != 200:
            pass
        yield running


@pytest.fixture
def sharer(client: TestClient) -> Sharer:
    return Sharer(client)


def by_body(client: TestClient, request: Request) -> tuple[dict[str, Any], bytes, httpx.Response]:
    """Receipt, tensors and response of the same request in its other form."""
    answer = client.post("/translate", content=request.body, headers=SAFETENSORS)
    size = int.from_bytes(answer.content[:8], "little")
    header = json.loads(answer.content[8 : 8 + size])
    metadata = header.pop("__metadata__")
    return {**json.loads(metadata["kvt"]), "tensors": header}, answer.content[8 + size :], answer


def assert_same(sharer: Sharer, request: Request) -> None:
    receipt, tensors, by_http = by_body(sharer.http, request)
    source, target = sharer.lease(ROOM_BYTES), sharer.lease(ROOM_BYTES)
    answer = sharer.translate(request, source, target)
    assert answer.status_code == 200
    assert answer.json() == {**receipt, "buffer": target.id}
    assert target.content[: len(tensors)] == tensors
    assert not any(target.content[len(tensors) :])
    assert target.memory.ready_layers == 4
    own = {"content-length", "content-type", "kvt-answer-id", "x-request-id"}
    tokens = {"kvt-feedback-token"}
    headers = [
        {k: v for k, v in a.headers.items() if k not in own | tokens} for a in (answer, by_http)
    ]
    assert headers[0] == headers[1]
    return target


@pytest.mark.parametrize("layout", list(Layout))
def test_every_layout_has_the_bodys_bits(sharer: Sharer, layout: Layout) -> None:
    block = 16 if layout in PAGED else None
    assert_same(sharer, good(40, layout=layout, block_tokens=block))


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_every_dtype_has_the_bodys_bits(sharer: Sharer, stored: str, wanted: str) -> None:
    assert_same(sharer, in_dtypes(good(24), stored, wanted))


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ("float8_e4m3fn", "float8_e5m2"),
        ("float8_e5m2", "float8_e4m3fn"),
        ("bfloat16", "float8_e4m3fn"),
    ],
)
def test_eight_bits_have_the_bodys_bits(
    settings: Settings, tmp_path: Path, stored: str, wanted: str
) -> None:
    pair = (
        SOURCE.model_copy(update={"kv_dtype": stored}),
        TARGET.model_copy(update={"kv_dtype": wanted}),
    )
    with serving(settings, tmp_path, mapper(*pair)) as client:
        assert_same(Sharer(client), in_dtypes(good(24), stored, wanted))


@pytest.mark.parametrize("layout", [Layout.NHD, Layout.LMCACHE])
def test_scales_and_zero_points_lie_in_the_buffers_too(
    settings: Settings, tmp_path: Path, layout: Layout
) -> None:
    source, target = Storage("int8", "per_token_head", True), Storage("int8", "per_head")
    parts = parts_of(store(cache(TOKENS), source), layout, None)
    kinds = ("k", "v", "k_scale", "v_scale", "k_zero", "v_zero")
    order = ["kv", *(f"layers.{layer}.{kind}" for layer in range(3) for kind in kinds)]
    tensors = {name: parts[name] for name in order if name in parts}
    assert tensors.keys() == parts.keys()
    request = Request(request_of(source, target, layout=layout.value), tensors)
    with serving(settings, tmp_path, mapper_of(source, target)) as client:
        assert_same(Sharer(client), request)


@contextmanager
def serving(settings: Settings, folder: Path, built: Mapper) -> Iterator[TestClient]:
    publish(folder / "artifacts", built)
    changes = {"artifacts": (folder / "artifacts",), "buffers": folder / "s"}
    with TestClient(create_app(settings.model_copy(update=changes))) as client:
        while client.get("/startupz").status_code != 200:
            pass
        yield client


def in_dtypes(request: Request, stored: str, wanted: str) -> Request:
    request.document["source"]["kv_dtype"] = stored
    request.document["target"]["kv_dtype"] = wanted
    request.tensors = {name: t.to(DTYPES[stored]) for name, t in request.tensors.items()}
    return request


def test_another_place_in_the_text(sharer: Sharer) -> None:
    assert_same(sharer, good(40, start_position=24, prefix_token_ids=[]))


def test_leases_are_used_again_and_again(sharer: Sharer) -> None:
    source, target = sharer.lease(), sharer.lease()
    for seed in range(4):
        request = good(40, seed=seed)
        _, tensors, _ = by_body(sharer.http, request)
        target.memory.ready_layers = 0
        assert sharer.translate(request, source, target).status_code == 200
        assert target.content[: len(tensors)] == tensors
        assert target.memory.ready_layers == 4


class TestRefusals:
    """Whatever is refused leaves the buffers as they were, and free."""

    @pytest.fixture
    def leases(self, sharer: Sharer) -> tuple[Leased, Leased]:
        source, target = sharer.lease(ROOM_BYTES), sharer.lease(ROOM_BYTES)
        target.memory.data.fill_(9)
        return source, target

    def untouched(self, sharer: Sharer, target: Leased) -> None:
        assert set(target.content) == {9}
        info = sharer.http.get(f"/buffers/{target.id}").json()
        assert info["in_use"] is False

    def test_the_gates_decision(self, sharer: Sharer, leases: tuple[Leased, Leased]) -> None:
        answer = sharer.translate(good(40, max_kl=1e-6), *leases)
        assert (answer.status_code, answer.headers["kvt-decision"]) == (200, "reprefill")
        assert answer.json()["reason"] == "certified_kl_exceeds_threshold"
        self.untouched(sharer, leases[1])

    def test_another_model(self, sharer: Sharer, leases: tuple[Leased, Leased]) -> None:
        wrong = good(40, source=claim(SOURCE, rope_theta=9_999.0))
        assert_problem(sharer.translate(wrong, *leases), 409, "identity_mismatch")
        self.untouched(sharer, leases[1])

    def test_values_that_are_not_finite(
        self, sharer: Sharer, leases: tuple[Leased, Leased]
    ) -> None:
        request = good(40)
        request.tensors["layers.0.v"][7, 0, 0] = float("nan")
        answer = sharer.translate(request, *leases)
        assert (answer.status_code, answer.json()["reason"]) == (200, "non_finite")
        self.untouched(sharer, leases[1])
        assert leases[1].memory.ready_layers is None

    def test_values_that_overflow_on_the_way(
        self, sharer: Sharer, leases: tuple[Leased, Leased]
    ) -> None:
        request = good(40)
        request.document["target"]["kv_dtype"] = "float16"
        request.tensors["layers.2.v"].fill_(1e5)
        answer = sharer.translate(request, *leases)
        assert (answer.status_code, answer.json()["reason"]) == (200, "non_finite")
        assert leases[1].memory.ready_layers is None
        written = 39 * 4 * 2 * 2 * 8 * 2
        assert set(leases[1].content[:written]) == {output.POISON}
        assert set(leases[1].content[written:]) == {9}

    def test_what_is_refused_after_it_was_computed_is_gone(
        self,
        sharer: Sharer,
        leases: tuple[Leased, Leased],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(pipeline, "_broken", lambda *_: True)
        answer = sharer.translate(good(40), *leases)
        assert (answer.status_code, answer.json()["reason"]) == (200, "breaker_open")
        assert leases[1].memory.ready_layers is None
        written = 39 * 4 * 2 * 2 * 8 * 4
        assert set(leases[1].content[:written]) == {output.POISON}
        assert set(leases[1].content[written:]) == {9}
        monkeypatch.undo()
        assert sharer.translate(good(40), *leases).status_code == 200
        assert leases[1].memory.ready_layers == 4

    def test_rows_that_were_never_written_do_not_count_as_ready(
        self,
        sharer: Sharer,
        leases: tuple[Leased, Leased],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def late_and_not_at_all(self: Translator, *args: Any, **names: Any) -> Iterator[Any]:
            whole = (layer for layer in original(self, *args, **names) if layer is not None)
            yield from itertools.islice(whole, 2)
            seen.append(wait_for_two())
            yield names["answer"][2]

        def wait_for_two() -> int:
            deadline = time.monotonic() + 10
            while leases[1].memory.ready_layers < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            return leases[1].memory.ready_layers

        seen: list[int] = []
        original = Translator.steps
        monkeypatch.setattr(Translator, "steps", late_and_not_at_all)
        answer = sharer.translate(good(40), *leases)
        assert_problem(answer, 500, "internal_invariant")
        assert seen == [2]
        assert leases[1].memory.ready_layers is None
        assert set(leases[1].content[: 39 * 4 * 2 * 2 * 8 * 4]) == {output.POISON}

    @pytest.mark.parametrize(
        ("source_bytes", "target_bytes"), [(100, ROOM_BYTES), (ROOM_BYTES, 100)]
    )
    def test_a_buffer_that_is_too_small(
        self, sharer: Sharer, source_bytes: int, target_bytes: int
    ) -> None:
        source, target = sharer.lease(source_bytes), sharer.lease(target_bytes)
        answer = sharer.post(good(40), source.id, target.id)
        assert_problem(answer, 422, "bad_buffer")
        needed = {100: 3 * 2 * 40 * 16 * 4, ROOM_BYTES: 4 * 2 * 39 * 16 * 4}[source_bytes]
        assert answer.json()["needed_bytes"] == needed
        assert set(target.content) == {0}

    def test_one_buffer_for_both(self, sharer: Sharer, leases: tuple[Leased, Leased]) -> None:
        answer = sharer.post(good(40), leases[1].id, leases[1].id)
        assert_problem(answer, 422, "bad_buffer")
        self.untouched(sharer, leases[1])

    def test_ids_of_nobody(self, sharer: Sharer, leases: tuple[Leased, Leased]) -> None:
        for source, target in ((leases[0].id, "0" * 32), ("0" * 32, leases[1].id)):
            assert_problem(sharer.post(good(40), source, target), 404, "buffer_not_found")
        self.untouched(sharer, leases[1])

    def test_a_lease_that_was_never_fetched(
        self, sharer: Sharer, leases: tuple[Leased, Leased]
    ) -> None:
        unfetched = sharer.ask().json()["id"]
        assert_problem(sharer.post(good(40), leases[0].id, unfetched), 422, "bad_buffer")
        assert_problem(sharer.post(good(40), unfetched, leases[1].id), 422, "bad_buffer")
        self.untouched(sharer, leases[1])

    @pytest.mark.parametrize(
        "named", ["", "0", "G" * 32, "0" * 33, "/dev/shm/x", "../x", 7, None, ["0" * 32]]
    )
    def test_what_is_no_id(
        self, sharer: Sharer, leases: tuple[Leased, Leased], named: object
    ) -> None:
        answer = sharer.post(good(40), leases[0].id, named)  # type: ignore[arg-type]
        assert_problem(answer, 422, "bad_document")
        assert "target.buffer" in answer.json()["detail"]

    def test_a_body_names_no_buffers_and_buffers_are_both_named(self, sharer: Sharer) -> None:
        request = good(40)
        request.document["source"]["buffer"] = "0" * 32
        answer = sharer.http.post("/translate", content=request.body, headers=SAFETENSORS)
        assert_problem(answer, 422, "bad_document")
        assert_problem(sharer.http.post("/translate", json=good(40).document), 422, "bad_document")

    def test_documents_that_are_none(self, sharer: Sharer) -> None:
        kind = {"Content-Type": "application/json"}
        for content, status, code in (
            (b"{", 400, "bad_json"),
            (b"\xff\xfe", 422, "bad_document"),
            (b" " * (1 << 17), 413, "body_too_large"),
            (b"[" * 64, 400, "bad_json"),
        ):
            answer = sharer.http.post("/translate", content=content, headers=kind)
            assert_problem(answer, status, code)


class TestLeases:
    def test_a_lease_says_what_it_is(self, sharer: Sharer, shared: Settings) -> None:
        lease = sharer.lease(5_000)
        info = sharer.http.get(f"/buffers/{lease.id}").json()
        assert info == {
            "id": lease.id,
            "kind": "host",
            "nbytes": 5_000,
            "file_bytes": 12_288,
            "progress_offset": 8_192,
            "expires_seconds": 300,
            "ttl_seconds": 300,
            "in_use": False,
            "socket": str(shared.buffers),
        }

    def test_the_number_of_layers_lies_where_it_says(self, sharer: Sharer) -> None:
        source, target = sharer.lease(ROOM_BYTES), sharer.lease(ROOM_BYTES)
        assert sharer.translate(good(40), source, target).status_code == 200
        _, [descriptor] = exchange(target.info["socket"], target.id.encode())
        with open(descriptor, "rb") as file:
            file.seek(target.info["progress_offset"])
            layers, tokens = struct.unpack("<QQ", file.read(16))
            assert (layers, tokens) == (4, 39)

    def test_a_refusal_lies_where_the_number_would(self, sharer: Sharer) -> None:
        request = good(40)
        request.tensors["layers.0.v"][7, 0, 0] = float("nan")
        source, target = sharer.lease(ROOM_BYTES), sharer.lease(ROOM_BYTES)
        assert sharer.translate(request, source, target).json()["reason"] == "non_finite"
        _, [descriptor] = exchange(target.info["socket"], target.id.encode())
        with open(descriptor, "rb") as file:
            file.seek(target.info["progress_offset"])
            assert file.read(8) == b"\xff" * 8

    def test_given_back_it_is_gone(self, sharer: Sharer) -> None:
        lease = sharer.lease()
        assert sharer.http.delete(f"/buffers/{lease.id}").status_code == 204
        for answer in (
            sharer.http.get(f"/buffers/{lease.id}"),
            sharer.http.delete(f"/buffers/{lease.id}"),
        ):
            assert_problem(answer, 404, "buffer_not_found")
        assert exchange(lease.info["socket"], lease.id.encode()) == (b"buffer_not_found", [])

    def test_metrics_count_them(self, sharer: Sharer) -> None:
        lease = sharer.lease(5_000)
        text = sharer.http.get("/metrics").text
        assert "\nkvt_buffer_leases 1.0\n" in text
        assert "\nkvt_buffer_bytes 12288.0\n" in text
        sharer.http.delete(f"/buffers/{lease.id}")
        text = sharer.http.get("/metrics").text
        assert "\nkvt_buffer_bytes 0.0\n" in text

    @pytest.mark.parametrize(
        "asked",
        [
            {},
            {"nbytes": 0},
            {"nbytes": -1},
            {"nbytes": 1.5},
            {"nbytes": "7"},
            {"nbytes": 1 << 63},
            {"nbytes": 1 << 64},
            {"nbytes": True},
            {"nbytes": 1, "kind": "disk"},
            {"nbytes": 1, "name": "/x"},
        ],
    )
    def test_what_cannot_be_asked_for(self, sharer: Sharer, asked: dict[str, object]) -> None:
        assert_problem(sharer.http.post("/buffers", json=asked), 422, "bad_document")

    def test_more_than_there_may_be(self, sharer: Sharer, shared: Settings) -> None:
        answer = sharer.ask(shared.buffer_client_bytes)
        assert_problem(answer, 413, "buffer_too_large")
        most = shared.buffer_client_bytes - 4096
        assert sharer.ask(most).status_code == 201
        assert_problem(sharer.ask(1), 429, "buffer_budget")

    def test_without_the_setting_there_are_none(self, settings: Settings) -> None:
        with TestClient(create_app(settings)) as client:
            assert_problem(client.post("/buffers", json={"nbytes": 1}), 403, "buffers_off")
            for method in (client.get, client.delete):
                assert_problem(method(f"/buffers/{'0' * 32}"), 403, "buffers_off")
            assert_problem(client.post("/translate", json={}), 415, "unsupported_media_type")
            assert client.get("/info").json()["buffers"] is False
