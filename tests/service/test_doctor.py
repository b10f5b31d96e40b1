"""``kvt doctor`` against the real service: a good deployment, and each check that fails once."""

import ast
import importlib.util
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner, Result

from service.cli import app
from service.commands.exits import Code
from service.doctor import vllm
from service.doctor.packages import unmet
from service.settings import Settings
from service.vllm.engine import TESTED_VERSIONS
from service.vllm.params import salt
from tests.service.pair import publish
from tests.service.reporting import BREAKS, ask, report
from tests.service.threaded import Running, serving

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def running(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A good deployment, with buffers."""
    shared = tmp_path_factory.mktemp("shared") / "kvt.sock"
    with serving(Settings(artifacts=(artifacts,), shadow_rate=0, buffers=shared)) as found:
        yield found


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *(str(each) for each in arguments)])


def said(result: Result) -> dict[str, Any]:
    """The JSON document; the service in this process logs to the same stream."""
    found: dict[str, Any]
    found, _ = json.JSONDecoder().raw_decode(result.stdout[result.stdout.index("{\n") :])
    return found


def examined(url: str, *arguments: object) -> Found:
    """What was found, with an exit code that goes with it."""
    result = doctor("--url", url, "--json", *arguments)
    document = said(result)
    found: Found = {each["check"]: each for each in document["checks"]}
    failed = [each["code"] for each in found.values() if each["verdict"] == "fail"]
    assert result.exit_code == (failed[0] if failed else 0), result.output
    assert document["ok"] == (not failed)
    for each in found.values():
        assert (each["verdict"] == "ok") == (each["change"] == ""), each
    return found


def assert_not_ok(found: Found, check: str, code: Code | None, *words: str) -> None:
    """A failure with this code, or a warning where there is none, which says this."""
    finding = found[check]
    assert (finding["verdict"], finding["code"]) == ("fail" if code else "warn", code), finding
    for word in words:
        assert word in f"{finding['found']} | {finding['change']}"


def mapper_of(running: Running) -> Any:
    return running.service.store.entries[0]


def engine(url: str, **changes: Any) -> str:
    """What a vLLM that may load is told, as JSON; a change of ``...`` leaves the field out."""
    good = {
        "kv_connector": vllm.CONNECTOR,
        "kv_connector_module_path": vllm.MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url, "model": "large", "version": "large-r1"},
    }
    return json.dumps({name: v for name, v in (good | changes).items() if v is not ...})


class TestAGoodDeployment:
    def test_every_check_is_ok(self, running: Running, tmp_path: Path) -> None:
        config = tmp_path / "transfer.json"
        config.write_text(engine(running.url))
        mapper = mapper_of(running)
        found = examined(
            running.url,
            *("--source", "small", "--target", "large@large-r1", "--layout", "NHD"),
            *("--layout", "lmcache", "--vllm-config", config),
            *("--vllm-version", TESTED_VERSIONS[0], "--cache-salt", salt(mapper.digest, 2, "s1")),
        )
        assert {each["verdict"] for each in found.values()} == {"ok"}, found
        assert "small@small-r1 -> large@large-r1" in found[f"mapper {mapper.id}"]["found"]
        assert "16, 64 tokens" in found[f"evidence {mapper.id}"]["found"]
        # Nothing is known of the first tokens of no text at all.
        assert found[f"plan {mapper.id}"]["found"].count("native tail 8, KL bound 0.03") == 2
        assert found["vllm model"]["found"].startswith("large is target of")

    def test_a_table_for_people(self, running: Running) -> None:
        result = doctor("--url", running.url)
        assert result.exit_code == 0, result.output
        for word in ("packages", "version", "ready", "evidence", "buffers", "change"):
            assert word in result.stdout

    def test_the_connector_is_where_the_check_says(self) -> None:
        spec = importlib.util.find_spec(vllm.MODULE)
        assert spec is not None
        assert spec.origin is not None
        parsed = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        classes = {node.name for node in parsed.body if isinstance(node, ast.ClassDef)}
        assert vllm.CONNECTOR in classes


class TestService:
    def test_nobody_answers(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        found = examined(f"http://127.0.0.1:{port}")
        assert set(found) == {"packages", "service"}
        assert_not_ok(found, "service", Code.SERVER, "unreachable", "kvt serve")

    def test_no_mapper(self, tmp_path: Path) -> None:
        (tmp_path / "none").mkdir()
        with serving(Settings(artifacts=(tmp_path / "none",), shadow_rate=0)) as running:
            found = examined(running.url, "--source", "small", "--target", "large")
        assert_not_ok(found, "ready", Code.SERVER, "503")
        assert_not_ok(found, "pair", Code.IDENTITY, "small -> large", "kvt fit")

    def test_another_version(self, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.doctor.server.current_version", lambda: "0.0.1")
        assert_not_ok(examined(running.url), "version", None, "0.0.1")

    def test_packages(self) -> None:
        assert unmet(Requirement("torch>=2")) is None
        assert "torch>=99 is required" in (unmet(Requirement("torch>=99")) or "")
        assert "not installed" in (unmet(Requirement("no-such-package-of-ours")) or "")

    def test_layouts(self, running: Running) -> None:
        found = examined(running.url, "--layout", "NHD", "--layout", "vllm_new")
        assert_not_ok(found, "layout", Code.USAGE, "vllm_new", "vllm_hn2d")


class TestMappers:
    def test_another_pair(self, running: Running) -> None:
        found = examined(running.url, "--source", "small@small-r2", "--target", "large")
        assert_not_ok(found, "pair", Code.IDENTITY, "small@small-r2 -> large", "small@small-r1")

    def test_damaged(self, tmp_path: Path) -> None:
        folder = publish(tmp_path)
        (folder / "weights.safetensors").write_bytes(b"not what it was")
        with serving(Settings(artifacts=(tmp_path,), shadow_rate=0)) as running:
            found = examined(running.url)
        assert_not_ok(found, f"mapper {folder.name}", Code.ARTIFACT, "kvt verify")

    def test_without_evidence(self, tmp_path: Path) -> None:
        folder = publish(tmp_path, proven=False)
        with serving(Settings(artifacts=(tmp_path,), shadow_rate=0)) as running:
            found = examined(running.url)
        assert_not_ok(found, f"mapper {folder.name}", Code.ARTIFACT, "evidence", "kvt evaluate")
        assert f"plan {folder.name}" not in found

    def test_evidence_that_is_not_good_enough(self, artifacts: Path) -> None:
        with serving(Settings(artifacts=(artifacts,), shadow_rate=0, max_kl=1e-6)) as running:
            found = examined(running.url)
            entry = mapper_of(running)
        assert_not_ok(found, f"evidence {entry.id}", Code.ARTIFACT, "above 1e-06", "max_kl")

    def test_unproven(self, tmp_path: Path) -> None:
        folder = publish(tmp_path, proven=False)
        settings = Settings(artifacts=(tmp_path,), shadow_rate=0, allow_unproven=True)
        with serving(settings) as running:
            found = examined(running.url)
        assert_not_ok(found, f"evidence {folder.name}", None, "unproven")

    def test_unloaded(self, artifacts: Path) -> None:
        with serving(Settings(artifacts=(artifacts,), shadow_rate=0)) as running:
            entry = mapper_of(running)
            running.service.store.unload(entry)
            found = examined(running.url)
        assert_not_ok(found, f"mapper {entry.id}", None, "503", "preload")

    def test_no_tail_that_is_allowed_will_do(self, artifacts: Path) -> None:
        name = next(path.name for path in artifacts.iterdir() if path.is_dir())
        pairs = {name: {"native_tails": [1]}}
        settings = Settings.model_validate(
            {"artifacts": (artifacts,), "shadow_rate": 0, "pairs": pairs}
        )
        with serving(settings) as running:
            found = examined(running.url)
        assert_not_ok(found, f"plan {name}", Code.REPREFILL, "re-prefill")

    def test_a_breaker_that_is_open(self, artifacts: Path) -> None:
        settings = Settings(
            artifacts=(artifacts,), shadow_rate=1, breaker_quorum=1, breaker_delta=0.2
        )
        with serving(settings) as running, httpx.Client(base_url=running.url) as client:
            entry = mapper_of(running)
            while (answer := ask(client)).headers["kvt-decision"] == "translate":
                report(client, answer, BREAKS)
            found = examined(running.url)
        assert answer.headers["kvt-reason"] == "breaker_open"
        assert_not_ok(found, f"breakers {entry.id}", None, "open")


class TestBuffers:
    def test_switched_off(self, artifacts: Path) -> None:
        with serving(Settings(artifacts=(artifacts,), shadow_rate=0)) as running:
            assert_not_ok(examined(running.url), "buffers", None, "--buffers SOCKET")

    def test_a_socket_that_is_not_there(self, running: Running, tmp_path: Path) -> None:
        found = examined(running.url, "--socket", tmp_path / "kvt.sock")
        assert_not_ok(found, "buffers", None, "not_handed_over", "--socket")
        assert str(tmp_path) not in json.dumps(found)


class TestEngine:
    @pytest.mark.parametrize(
        ("changes", "check", "code", "word"),
        [
            ({"kv_connector": "NixlConnector"}, "vllm kv_connector", 2, vllm.CONNECTOR),
            ({"kv_connector_module_path": ...}, "vllm kv_connector_module_path", 2, "not set"),
            ({"kv_role": "kv_other"}, "vllm kv_role", 2, "kv_consumer"),
            ({"kv_load_failure_policy": ...}, "vllm kv_load_failure_policy", 2, "recompute"),
            ({"kv_load_failure_policy": "fail"}, "vllm kv_load_failure_policy", 2, "recompute"),
            ({"kv_connector_extra_config": {"urls": "x"}}, "vllm options", 2, "urls"),
            ({"kv_connector_extra_config": ...}, "vllm options", 2, "model"),
            (
                {"kv_connector_extra_config": {"url": "http://127.0.0.1:1", "model": "large"}},
                "vllm url",
                None,
                "another service",
            ),
            ({"kv_role": "kv_producer"}, "vllm model", 3, "large"),
        ],
    )
    def test_what_it_is_told(
        self, running: Running, changes: dict[str, Any], check: str, code: int | None, word: str
    ) -> None:
        found = examined(running.url, "--vllm-config", engine(running.url, **changes))
        assert_not_ok(found, check, None if code is None else Code(code), word)

    def test_what_is_no_configuration(self, running: Running, tmp_path: Path) -> None:
        binary = tmp_path / "config"
        binary.write_bytes(b'{"\xff": 1}')
        for said in ("{kv_connector", binary):
            found = examined(running.url, "--vllm-config", said)
            assert_not_ok(found, "vllm config", Code.USAGE, "JSON")
        assert doctor("--url", running.url, "--vllm-config", "/no/such").exit_code == Code.DATA

    def test_a_version_that_was_not_tested(self, running: Running) -> None:
        found = examined(running.url, "--vllm-version", "0.20.2")
        assert_not_ok(found, "vllm version", Code.USAGE, "0.20.2", TESTED_VERSIONS[0])

    def test_salts(self, running: Running) -> None:
        digest = mapper_of(running).digest
        without = examined(running.url, "--vllm-config", engine(running.url))
        assert_not_ok(without, "salt", None, f"cache_salt {salt(digest, 1)}")
        for wrong in ("session-1", salt("sha256:" + "0" * 64, 1), f"kvt-{digest}"):
            found = examined(running.url, "--cache-salt", wrong)
            assert_not_ok(found, "salt", Code.USAGE, salt(digest, 1))
