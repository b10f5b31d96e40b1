"""The application in this process: documents, health, mappers, admin routes, metrics."""

import json
import shutil
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from starlette.testclient import TestClient

from service.app import create_app
from service.errors import CODES
from service.metrics import OUTCOMES
from service.schemas import REASONS
from service.settings import Settings
from tests.service.live import ADMIN_TOKEN, LEAKS, assert_problem
from tests.service.pair import Request, document, good, publish

TYPE = {"Content-Type": "application/vnd.safetensors"}
ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}


@contextmanager
def serving(settings: Settings) -> Iterator[TestClient]:
    """An application, loaded."""
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        while client.get("/startupz").status_code != 200:
            pass
        yield client


def translate(client: TestClient, request: Request) -> Any:
    return client.post("/translate", content=request.body, headers=TYPE)


def references(node: Any) -> Iterator[str]:
    """Every $ref in a document."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_openapi_is_complete(client: TestClient) -> None:
    api = client.get("/openapi.json").json()
    for reference in references(api):
        assert reference.removeprefix("#/components/schemas/") in api["components"]["schemas"]
    post = api["paths"]["/translate"]["post"]
    binary = ("application/vnd.safetensors", "application/octet-stream")
    assert set(post["requestBody"]["content"]) == {*binary, "application/json"}
    for kind in binary:
        assert post["requestBody"]["content"][kind]["examples"]
    answers = post["responses"]["200"]["content"]
    assert set(answers) == {"application/vnd.safetensors", "application/json"}
    assert answers["application/json"]["example"]["decision"] == "reprefill"
    assert "KVT-Decision" in post["responses"]["200"]["headers"]
    for status in ("400", "404", "409", "413", "415", "422", "429", "503", "507"):
        problem = post["responses"][status]["content"]["application/problem+json"]
        assert problem["example"]["decision"] == "reprefill"
    assert {"TranslateRequest", "Receipt", "Reprefill", "ProblemBody", "IdentityClaim"} <= set(
        api["components"]["schemas"]
    )


def test_examples_of_the_documents_are_valid(client: TestClient) -> None:
    from service.openapi import EXAMPLE_REQUEST
    from service.schemas import read_request

    assert read_request(json.dumps(EXAMPLE_REQUEST)).tokens == 2
    assert client.get("/docs").status_code == 200


def test_health_routes(client: TestClient) -> None:
    for path in (
        "/livez",
        "/readyz",
        "/startupz",
        "/health",
        "/v2/health/live",
        "/v2/health/ready",
    ):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["status"]) == (200, "ok"), path
    assert client.get("/v2").json()["name"] == "kv-translator"


def test_info_lists_what_a_client_must_know(client: TestClient) -> None:
    info = client.get("/info").json()
    assert info["reasons"] == list(REASONS)
    assert info["layouts"] == ["NHD", "HND", "hf", "vllm_hn2d", "vllm_2bnhd", "lmcache"]
    assert info["mappers"] == [client.get("/mappers").json()["mappers"][0]["id"]]


def test_mappers_show_both_identities(client: TestClient) -> None:
    listed = client.get("/mappers").json()["mappers"][0]
    assert client.get(f"/mappers/{listed['id']}").json() == listed
    assert (listed["state"], listed["recipe"]) == ("ready", "full_head")
    assert (listed["source"]["model"], listed["target"]["model"]) == ("small", "large")
    assert listed["certified_tokens"] == [16, 64]
    assert listed["why_not_servable"] is None
    assert_problem(client.get("/mappers/nothing"), 404, "mapper_not_found")


def test_metrics_count_what_happened(client: TestClient) -> None:
    request = good(40, reprefill_ms=60_000.0)
    assert translate(client, request).status_code == 200
    text = client.get("/metrics").text
    mapper = client.get("/info").json()["mappers"][0]
    labels = f'{{outcome="translate",pair="{mapper}",reason=""}}'
    assert f"kvt_translations_total{labels} 1.0" in text
    assert f'kvt_tokens_translated_total{{pair="{mapper}"}} 39.0' in text
    assert f'kvt_bytes_total{{direction="in"}} {float(len(request.data))}' in text
    for stage in ("gate", "ingest", "queue", "content_gate", "translate", "egress"):
        assert f'kvt_stage_seconds_count{{stage="{stage}"}} 1.0' in text
    saved = next(line for line in text.splitlines() if "seconds_saved_total{" in line)
    assert 0 < float(saved.split()[-1]) < 60
    assert "kvt_build_info{" in text
    assert f'kvt_kl_bound_nats_count{{pair="{mapper}"}} 1.0' in text
    assert f'kvt_mapper_resident_bytes{{pair="{mapper}",tier="host"}} ' in text


def test_labels_are_bounded(client: TestClient) -> None:
    for name in ("a", "b", "c"):
        request = Request(document(32, source=document(32)["source"] | {"model": name}))
        assert_problem(translate(client, request), 404, "pair_not_found")
    lines = [
        line
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("kvt_translations_total")
    ]
    assert len(lines) == 1
    assert 'pair="unknown"' in lines[0]
    assert lines[0].endswith(" 3.0")


def test_reasons_and_codes_share_no_word() -> None:
    assert not set(REASONS) & set(CODES)
    assert "refused" in OUTCOMES


def test_admin_routes_are_off_without_a_token(client: TestClient) -> None:
    mapper = client.get("/info").json()["mappers"][0]
    for action in ("load", "unload"):
        answer = client.post(f"/mappers/{mapper}/{action}", headers=ADMIN)
        assert_problem(answer, 403, "admin_off")


@pytest.fixture
def own_artifact(tmp_path: Path) -> Path:
    """A mapper that a test may spoil."""
    return publish(tmp_path / "own")


@pytest.fixture
def admin(own_artifact: Path) -> Iterator[TestClient]:
    settings = Settings(
        artifacts=(own_artifact,), admin_token=SecretStr(ADMIN_TOKEN), shadow_rate=0
    )
    with serving(settings) as client:
        yield client


@pytest.mark.parametrize("given", [None, "Bearer wrong", ADMIN_TOKEN, f"Bearer {ADMIN_TOKEN}x", ""])
def test_admin_routes_need_the_token(admin: TestClient, given: str | None) -> None:
    mapper = admin.get("/info").json()["mappers"][0]
    headers = {} if given is None else {"Authorization": given}
    answer = admin.post(f"/mappers/{mapper}/unload", headers=headers)
    assert_problem(answer, 401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert admin.get(f"/mappers/{mapper}").json()["state"] == "ready"


def test_unload_and_load_again(admin: TestClient) -> None:
    before = translate(admin, good()).content
    mapper = admin.get("/info").json()["mappers"][0]
    unloaded = admin.post(f"/mappers/{mapper}/unload", headers=ADMIN).json()
    assert (unloaded["state"], unloaded["resident_bytes"]) == ("unloaded", 0)
    assert admin.get("/readyz").json() == {"status": "no_mapper", "mappers": {mapper: "unloaded"}}
    assert_problem(translate(admin, good()), 503, "mapper_not_ready")
    loaded = admin.post(f"/mappers/{mapper}/load", headers=ADMIN).json()
    assert loaded["state"] == "ready"
    assert translate(admin, good()).content == before


def test_e4_a_reload_that_fails_leaves_the_old_one_serving(
    admin: TestClient, own_artifact: Path
) -> None:
    before = translate(admin, good()).content
    weights = own_artifact / "weights.safetensors"
    spoiled = bytearray(weights.read_bytes())
    spoiled[-1] ^= 1
    weights.write_bytes(spoiled)
    mapper = admin.get("/info").json()["mappers"][0]
    answer = admin.post(f"/mappers/{mapper}/load", headers=ADMIN)
    assert answer.status_code == 500
    assert not LEAKS.search(answer.content)
    assert admin.get(f"/mappers/{mapper}").json()["error"]
    assert admin.get("/readyz").status_code == 200
    assert translate(admin, good()).content == before


def test_e4_an_artifact_that_is_altered_is_not_served(own_artifact: Path, artifacts: Path) -> None:
    (own_artifact / "evidence.json").write_text("{}")
    with serving(Settings(artifacts=(own_artifact,))) as client:
        assert client.get("/readyz").status_code == 503
        assert client.get("/livez").status_code == 200
        listed = client.get("/mappers").json()["mappers"][0]
        assert listed["state"] == "failed"
        assert listed["error"]
        assert not LEAKS.search(listed["error"].encode())
        assert_problem(translate(client, good()), 404, "pair_not_found")


def test_without_evidence_a_mapper_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, proven=False)
    with serving(Settings(artifacts=(tmp_path,))) as client:
        listed = client.get("/mappers").json()["mappers"][0]
        assert listed["state"] == "failed"
        assert "evidence" in listed["error"]


def test_unproven_answers_are_marked(tmp_path: Path) -> None:
    publish(tmp_path, proven=False)
    with serving(Settings(artifacts=(tmp_path,), allow_unproven=True)) as client:
        answer = translate(client, good())
        plan = client.post("/translate/plan", json=good().document).json()
    size = int.from_bytes(answer.content[:8], "little")
    receipt = json.loads(json.loads(answer.content[8 : 8 + size])["__metadata__"]["kvt"])
    assert answer.headers["kvt-unproven"] == "true"
    assert "kvt-kl-bound" not in answer.headers
    assert (receipt["unproven"], receipt["kl_bound"], plan["unproven"]) == (True, None, True)
    assert receipt["guarantee"].startswith("none")


def test_proven_answers_are_not_marked(client: TestClient) -> None:
    assert "kvt-unproven" not in translate(client, good()).headers


def test_metrics_on_a_port_of_their_own(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serving(settings.model_copy(update={"metrics_port": port})) as client:
        assert_problem(client.get("/metrics"), 404, "not_found")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert b"kvt_build_info" in answer.read()


def test_two_applications_in_one_process(settings: Settings) -> None:
    with serving(settings) as first, serving(settings) as second:
        assert translate(first, good()).status_code == 200
        assert "kvt_translations_total{" not in second.get("/metrics").text


def test_a_fault_of_ours_says_nothing(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> None:
        raise RuntimeError("secret /etc/passwd 0xdeadbeef")

    monkeypatch.setattr("service.store.Store.find", fault)
    answer = translate(client, good())
    assert_problem(answer, 500, "internal")
    assert "secret" not in answer.text


def test_copies_of_an_artifact_folder_are_found(own_artifact: Path, tmp_path: Path) -> None:
    root = tmp_path / "many"
    shutil.copytree(own_artifact.parent, root)
    with serving(Settings(artifacts=(root,))) as client:
        assert len(client.get("/mappers").json()["mappers"]) == 1
