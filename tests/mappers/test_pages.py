"""Memory of large files: it lives as long as a tensor looks at it, and goes on another thread."""

import gc
import threading
from pathlib import Path

import pytest
import torch

from mappers import artifact, pages
from mappers.pages import Pages, room_for
from tests.service.pair import mapper, publish

ROOM = 1 << 20


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that have unmapped pages."""
    threads: list[threading.Thread] = []
    original = Pages.close

    def noted(self: Pages) -> None:
        original(self)
        threads.append(threading.current_thread())

    monkeypatch.setattr(Pages, "close", noted)
    return threads


def join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(60)


def test_a_view_keeps_them_and_the_last_one_has_them_unmapped_elsewhere(
    closed: list[threading.Thread],
) -> None:
    tensor = torch.frombuffer(Pages(ROOM), dtype=torch.uint8)[5:10]
    gc.collect()
    join("kvt-unmap")
    assert closed == []
    assert tensor.tolist() == [0] * 5
    del tensor
    join("kvt-unmap")
    [thread] = closed
    assert thread is not threading.current_thread()


def test_only_what_is_large_is_worth_a_thread() -> None:
    assert isinstance(room_for(ROOM), bytearray)
    large = room_for(pages.LARGE_BYTES)
    assert (type(large), len(large)) == (Pages, pages.LARGE_BYTES)


def test_an_artifact_in_pages_is_the_same_and_goes_with_its_last_tensor(
    tmp_path: Path, closed: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = publish(tmp_path)
    monkeypatch.setattr(pages, "LARGE_BYTES", 1)
    loaded = artifact.load(path)
    expected = mapper().layers[2].keys.weight
    weight = loaded.mapper.layers[2].keys.weight
    assert loaded.evidence is not None
    del loaded
    gc.collect()
    join("kvt-unmap")
    before = len(closed)
    assert torch.equal(weight, expected)
    del weight
    join("kvt-unmap")
    assert len(closed) == before + 1
