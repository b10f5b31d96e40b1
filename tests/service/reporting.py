"""Answers that are to be measured, and what a caller reports about them."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from service.app import create_app
from service.settings import Settings
from tests.service.live import OUTCOME, SAFETENSORS
from tests.service.pair import good

KEEPS = 0.01  # a KL below every threshold that these tests use
BREAKS = 0.4


class Clock:
    """The time of the guards, which passes only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.time()
        monkeypatch.setattr("service.guards.wall_clock", lambda: self.now)


@contextmanager
def served(settings: Settings) -> Iterator[TestClient]:
    """The whole application in this process, its mappers loaded."""
    with TestClient(create_app(settings), raise_server_exceptions=False) as running:
        while running.get("/startupz").status_code != 200:
            pass
        yield running


def elsewhere(client: TestClient, address: str) -> TestClient:
    """Another client of the same application."""
    return TestClient(client.app, client=(address, 50000))


def ask(client: httpx.Client, **changes: Any) -> httpx.Response:
    """One good request of 32 tokens."""
    return client.post("/translate", content=good(**changes).body, headers=SAFETENSORS)


def report(
    client: httpx.Client, answer: httpx.Response, kl: object, **headers: str
) -> httpx.Response:
    """Post a KL for an answer, as its receiver may."""
    body = {"answer_id": answer.headers["kvt-answer-id"], "kl": kl}
    return post(client, body, answer.headers["kvt-feedback-token"], **headers)


def post(client: httpx.Client, body: dict[str, Any], token: str, **headers: str) -> httpx.Response:
    """Post any feedback."""
    return client.post(
        "/feedback",
        content=json.dumps(body),
        headers={"Content-Type": "application/json", "KVT-Feedback-Token": token, **headers},
    )


def asked_and_reported(client: httpx.Client, kl: object, **changes: Any) -> str:
    """The breaker's state after one more measured answer."""
    state = report(client, ask(client, **changes), kl).json()["breaker"]
    assert isinstance(state, str)
    return state


def until(client: httpx.Client, state: str, kl: object, *, most: int) -> int:
    """Report ``kl`` until the breaker has this state; how many it took."""
    for count in range(1, most + 1):
        if asked_and_reported(client, kl) == state:
            return count
    raise AssertionError(f"the breaker is not {state} after {most} reports")


def outcomes(client: httpx.Client) -> dict[tuple[str, str], float]:
    """How often each (outcome, reason) was answered."""
    rows = OUTCOME.findall(client.get("/metrics").text)
    return {(outcome, reason): float(value) for outcome, _, reason, value in rows}


def breakers(client: httpx.Client) -> list[dict[str, Any]]:
    """Those of the only mapper."""
    [mapper] = client.get("/mappers").json()["mappers"]
    found = client.get(f"/mappers/{mapper['id']}").json()["breakers"]
    assert found == mapper["breakers"] or found[0]["opened_seconds_ago"]
    return list(found)
