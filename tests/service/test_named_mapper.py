"""A router names the mapper that it chose (``x-vsr-kv-mapper-id``): that one answers, or none."""

import json

import pytest
from starlette.testclient import TestClient

from service.state import Service
from tests.service.live import SAFETENSORS
from tests.service.pair import document, good

HEADER = "x-vsr-kv-mapper-id"


def named(client: TestClient) -> str:
    service: Service = client.app.state.service  # type: ignore[attr-defined]
    return service.store.entries[0].id


def test_the_mapper_of_the_pair_answers(client: TestClient) -> None:
    plain = client.post("/translate", content=good().body, headers=SAFETENSORS)
    wanted = {HEADER: named(client), **SAFETENSORS}
    answer = client.post("/translate", content=good().body, headers=wanted)
    assert answer.headers["x-vsr-kv-transfer-status"] == "applied"
    assert answer.headers[HEADER] == named(client)
    assert answer.content == plain.content


@pytest.mark.parametrize("other", ["qwen3-14b-32b-v1", ""])
def test_another_one_is_refused_before_the_tensors_are_read(client: TestClient, other: str) -> None:
    request = good()
    request.tensors.clear()  # were it read further, it would be refused for that
    headers = {HEADER: other, **SAFETENSORS}
    answer = client.post("/translate", content=request.body, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (404, "pair_not_found")
    assert answer.headers["x-vsr-kv-transfer-status"] == "unsupported"
    assert named(client) in answer.json()["detail"]


def test_a_plan_takes_it_too(client: TestClient) -> None:
    def plan(mapper: str) -> int:
        headers = {HEADER: mapper, "Content-Type": "application/json"}
        content = json.dumps(document(32))
        return int(client.post("/translate/plan", content=content, headers=headers).status_code)

    assert plan(named(client)) == 200
    assert plan("qwen3-14b-32b-v1") == 404
