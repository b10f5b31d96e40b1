"""Buffers of a real process over time: used while it computes, expired, killed, and its memory."""

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mappers.layouts import Layout, write
from mappers.quantize import Stored
from service.client import Client, Translated
from service.memfd import DESCRIPTORS, file_bytes
from service.output import POISON
from service.schemas import TranslateRequest
from tests.service.live import LEAKS, Live, assert_problem, wait_until
from tests.service.pair import (
    Request,
    cache,
    cache_of,
    claim,
    document,
    good,
    identity,
    mapper,
    publish,
)
from tests.service.sharing import Leased, Sharer, exchange
from tests.service.sharing import write as write_into

LAYER_SECONDS = 0.2
TTL_SECONDS = 0.5
ROOM_BYTES = 1 << 16


def start(artifacts: Path, folder: Path, *, layer_seconds: float, **more: object) -> Live:
    given = {"artifacts": [str(artifacts)], "shadow_rate": 0, "buffers": str(folder / "s"), **more}
    return Live(json.dumps(given), folder / "log", layer_seconds=layer_seconds)


@pytest.fixture(scope="module")
def slow(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Translations take longer than leases last that nobody uses."""
    folder = tmp_path_factory.mktemp("slow")
    running = start(artifacts, folder, layer_seconds=LAYER_SECONDS, buffer_seconds=TTL_SECONDS)
    yield running
    code = running.stop()
    assert code in (0, -15)
    assert not LEAKS.search(running.output())
    assert not (folder / "s").exists()


def leases(live: Live) -> tuple[Sharer, Leased, Leased]:
    sharer = Sharer(live.client)
    return sharer, sharer.lease(ROOM_BYTES), sharer.lease(ROOM_BYTES)


def golden(live: Live, request: Request) -> bytes:
    body = live.translate(request).content
    return body[8 + int.from_bytes(body[:8], "little") :]


def test_a_reader_sees_layers_as_they_are_ready(slow: Live) -> None:
    tensors = golden(slow, good())
    sharer, source, target = leases(slow)
    layer_bytes = len(tensors) // 4
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sharer.translate, good(), source, target)
        seen = []
        while not running.done():
            ready = target.memory.ready_layers
            seen.append(ready)
            assert target.content[: ready * layer_bytes] == tensors[: ready * layer_bytes]
            time.sleep(0.01)
        assert running.result().status_code == 200
    assert seen == sorted(seen)
    assert {0, 1, 2, 3} <= set(seen)
    assert target.memory.ready_layers == 4


@pytest.mark.parametrize("by_buffers", [True, False])
def test_a_client_has_the_first_layer_while_the_last_is_computed(
    slow: Live, by_buffers: bool
) -> None:
    told: list[tuple[int, float, torch.Tensor]] = []

    def note(layer: int, keys: Stored, values: Stored) -> None:
        in_flight = slow.metric("kvt_in_flight")
        told.append((layer, in_flight, torch.stack([keys.numbers, values.numbers])))

    asked = TranslateRequest.model_validate(good().document, strict=False)
    with Client(f"http://127.0.0.1:{slow.port}") as client, client.buffers() as buffers:
        pair = buffers if by_buffers else None
        outcome = client.translate(cache(32), asked, buffers=pair, on_layer=note)
        assert isinstance(outcome, Translated)
        assert outcome.transport == ("buffers" if by_buffers else "body")
        layers = list(outcome.stored.layers())
    assert [layer for layer, _, _ in told] == [0, 1, 2, 3]
    assert [in_flight for _, in_flight, _ in told][:2] == [1, 1]
    for (_, _, seen), layer in zip(told, layers, strict=True):
        assert torch.equal(seen, torch.stack(layer))


def test_a_lease_in_use_neither_goes_nor_expires(slow: Live) -> None:
    tensors = golden(slow, good())
    sharer, source, target = leases(slow)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sharer.translate, good(), source, target)
        wait_until(lambda: target.memory.ready_layers)
        for lease in (source, target):
            answer = slow.client.delete(f"/buffers/{lease.id}")
            assert_problem(answer, 409, "buffer_in_use")
        busy = sharer.post(good(), source.id, target.id)
        assert_problem(busy, 409, "buffer_in_use")
        answer = running.result()
    assert answer.elapsed.total_seconds() > TTL_SECONDS
    assert answer.status_code == 200
    assert target.content[: len(tensors)] == tensors
    assert slow.client.delete(f"/buffers/{target.id}").status_code == 204
    assert target.content[: len(tensors)] == tensors


def test_memory_comes_back_when_nobody_asks_and_nobody_maps_it(slow: Live) -> None:
    sharer, source, target = leases(slow)
    wait_until(lambda: slow.metric("kvt_buffer_leases") == 0)
    for lease in (source, target):
        assert_problem(slow.client.get(f"/buffers/{lease.id}"), 404, "buffer_not_found")
    assert_problem(sharer.post(good(), source.id, target.id), 404, "buffer_not_found")
    mapped, held = slow.metric("kvt_buffer_ended_bytes"), slow.descriptors()
    room = 2 * file_bytes(ROOM_BYTES)
    assert mapped >= room  # earlier tests may have mapped more
    for lease in (source, target):
        lease.memory.close()
    del source, target, lease
    wait_until(lambda: slow.metric("kvt_buffer_ended_bytes") <= mapped - room)
    wait_until(lambda: slow.descriptors() <= held - 2 * DESCRIPTORS)


def test_a_client_that_leaves_frees_its_leases(slow: Live) -> None:
    sharer, source, target = leases(slow)
    write_into(source, good().data)
    document = dict(good().document)
    for side, lease in (("source", source), ("target", target)):
        document[side] = {**document[side], "buffer": lease.id}
    content = json.dumps(document).encode()
    head = f"Host: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with pytest.raises(TimeoutError):
        slow.raw(b"POST /translate HTTP/1.1\r\n" + head.encode() + content, seconds=0.3)
    wait_until(lambda: target.memory.ready_layers is None)
    wait_until(lambda: slow.client.delete(f"/buffers/{target.id}").status_code == 204)
    assert set(target.content[: len(golden(slow, good()))]) == {POISON}
    assert slow.at_rest()["disconnected", "client_disconnect"] >= 1


def test_one_who_writes_into_a_source_spoils_only_that_answer(slow: Live) -> None:
    tensors = golden(slow, good())
    sharer, source, target = leases(slow)
    _, neighbours, other = leases(slow)
    stop = threading.Event()

    def scribble() -> None:
        noise = torch.randint(0, 256, (ROOM_BYTES,), dtype=torch.uint8)
        while not stop.is_set():
            source.memory.data.copy_(noise)
            source.memory.ready_layers = 1 << 63

    scribbler = threading.Thread(target=scribble)
    scribbler.start()
    with ThreadPoolExecutor(2) as pool:
        spoilt = pool.submit(sharer.post, good(), source.id, target.id)
        right = pool.submit(sharer.translate, good(), neighbours, other)
        assert right.result().status_code == 200
        assert spoilt.result().status_code == 200
    stop.set()
    scribbler.join()
    assert other.content[: len(tensors)] == tensors
    assert golden(slow, good()) == tensors


def test_killed_and_started_again(artifacts: Path, tmp_path: Path) -> None:
    first = start(artifacts, tmp_path, layer_seconds=0)
    sharer, source, target = leases(first)
    assert sharer.translate(good(), source, target).status_code == 200
    before = target.content
    first.stop(signal.SIGKILL)
    assert (tmp_path / "s").is_socket()
    assert target.content == before  # what a client has mapped is its own
    second = start(artifacts, tmp_path, layer_seconds=0)
    try:
        assert_problem(second.client.get(f"/buffers/{target.id}"), 404, "buffer_not_found")
        assert exchange(str(tmp_path / "s"), target.id.encode()) == (b"buffer_not_found", [])
        assert second.metric("kvt_buffer_bytes") == 0
        sharer, source, target = leases(second)
        assert set(target.content) == {0}
        assert sharer.translate(good(), source, target).status_code == 200
        assert target.content == before
    finally:
        second.stop()
    assert not (tmp_path / "s").exists()


def test_memory_beyond_the_leases_is_a_few_layers(tmp_path: Path) -> None:
    """At 24 layers a copy of source or target would be 24 of them."""
    layers, tokens, heads, dim = 24, 500, 8, 32
    source = identity("small", layers=layers, theta=10_000.0, heads=heads, dim=dim)
    target = identity("large", layers=layers, theta=500_000.0, heads=heads, dim=dim)
    publish(tmp_path / "artifacts", mapper(source, target), proven=False)
    said = document(
        tokens, source=claim(source), target=claim(target), prefix_token_ids=[], layout="NHD"
    )
    request = Request(said, write(Layout.NHD, cache_of(source, tokens)))
    layer_bytes = len(request.data) // layers
    live = start(tmp_path / "artifacts", tmp_path, layer_seconds=0.02, allow_unproven=True)
    try:
        sharer = Sharer(live.client)
        room = len(request.data)
        leased = sharer.lease(room), sharer.lease(room)
        before, peak = anonymous_bytes(live), 0
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(sharer.translate, request, *leased)
            while not running.done():
                peak = max(peak, anonymous_bytes(live))
                time.sleep(0.001)
        assert running.result().json()["decision"] == "translate"
    finally:
        live.stop()
    # Two source layers as float32 content, one target layer, and what threads and malloc keep.
    assert peak - before < 8 * layer_bytes


def anonymous_bytes(live: Live) -> int:
    """Memory of the process that is nobody else's: not the leases, which are shared."""
    status = Path(f"/proc/{live.process.pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024
