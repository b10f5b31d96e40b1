"""The tiny pair's artifact, the service in this process, and the service as a real process."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from service.app import create_app
from service.settings import Settings
from tests.service.live import ADMIN_TOKEN, LEAKS, Live
from tests.service.pair import publish


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("KVT_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the mapper of the tiny pair."""
    root = tmp_path_factory.mktemp("artifacts")
    publish(root)
    return root


@pytest.fixture(scope="session")
def live(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A process with short deadlines and small limits, shared by all tests."""
    settings = {
        "artifacts": [str(artifacts)],
        "queue_requests": 4,
        "max_body_bytes": 4 << 20,
        "max_inflight_bytes": 8 << 20,
        "header_seconds": 2,
        "body_grace_seconds": 2,
        "admin_token": ADMIN_TOKEN,
        "shadow_rate": 0,
    }
    running = Live(json.dumps(settings), tmp_path_factory.mktemp("live") / "stderr.log")
    yield running
    code = running.stop()
    output = running.output()
    assert code in (0, -15), output
    assert not LEAKS.search(output), output


@pytest.fixture
def settings(artifacts: Path) -> Settings:
    """Settings of the service in this process."""
    return Settings(artifacts=(artifacts,), shadow_rate=0)


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    """The service in this process, loaded."""
    with TestClient(create_app(settings), raise_server_exceptions=False) as running:
        while running.get("/startupz").status_code != 200:
            pass
        yield running
