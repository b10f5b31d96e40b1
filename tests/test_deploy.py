"""What deploy/ and the Dockerfile say must agree with the code and with one another."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.app import create_app
from service.settings import Settings

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def image_environment() -> dict[str, str]:
    return dict(re.findall(r"^(?:ENV)?\s+([A-Z_]+)=(\S+)", DOCKERFILE, re.MULTILINE))


def rules() -> list[dict[str, Any]]:
    groups = read("prometheus/rules.yml")["groups"]
    return [rule for group in groups for rule in group["rules"]]


def exported_names() -> set[str]:
    service = create_app(Settings()).state.service
    families = list(service.metrics.registry.collect())
    service.worker.stop()
    service.guards.close()
    suffixes = ("", "_total", "_bucket", "_sum", "_count", "_info")
    return {family.name + suffix for family in families for suffix in suffixes}


def test_the_image_sets_settings_that_exist() -> None:
    names = {name for name in image_environment() if name.startswith("KVT_")}
    assert names == {"KVT_HOST", "KVT_PORT", "KVT_METRICS_PORT"}
    assert {name.removeprefix("KVT_").lower() for name in names} <= set(Settings.model_fields)


def test_the_image_runs_without_rights_and_is_built_from_files_that_exist() -> None:
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", last, re.MULTILINE)
    copies = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    copied = {name for line in copies for name in line.split()[:-1]}
    assert copied >= {"service", "mappers", "deploy/constraints.txt"}
    allowed = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert copied <= allowed
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_the_image_exposes_the_ports_that_it_listens_on() -> None:
    environment = image_environment()
    exposed = re.search(r"^EXPOSE (.+)$", DOCKERFILE, re.MULTILINE)
    assert exposed is not None
    assert exposed[1].split() == [environment["KVT_PORT"], environment["KVT_METRICS_PORT"]]
    assert environment["KVT_HOST"] == "0.0.0.0"


def test_compose_hardens_the_service_and_lets_it_drain() -> None:
    service = read("compose.yaml")["services"]["kvt"]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    settings = Settings.model_fields
    drain = settings["drain_seconds"].default + settings["drain_notice_seconds"].default
    assert int(service["stop_grace_period"].removesuffix("s")) > drain


def test_compose_publishes_on_the_loopback_address_only() -> None:
    services = read("compose.yaml")["services"].values()
    ports = [port for service in services for port in service.get("ports", [])]
    assert len(ports) == 2
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_state_file_is_on_a_volume_that_the_service_may_write_to() -> None:
    compose = read("compose.yaml")
    service = compose["services"]["kvt"]
    folder = str(Path(service["environment"]["KVT_STATE"]).parent)
    name, _, mounted = service["volumes"][0].partition(":")
    assert mounted == folder
    assert name in compose["volumes"]
    # A new volume takes owner and mode from the folder of the image.
    user = re.findall(r"^USER (\d+):", DOCKERFILE, re.MULTILINE)[-1]
    assert f"install -d -o {user} -g {user} -m 700 {folder}\n" in DOCKERFILE


def test_prometheus_scrapes_the_service_and_finds_its_rules() -> None:
    services = read("compose.yaml")["services"]
    config = read("prometheus/prometheus.yml")
    assert "./prometheus:/etc/prometheus:ro" in services["prometheus"]["volumes"]
    assert [(DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"]] == [True]
    [target] = config["scrape_configs"][0]["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert host in services
    assert port == image_environment()["KVT_METRICS_PORT"]


def test_the_cuda_file_only_adds_to_the_service() -> None:
    added = read("compose.cuda.yaml")["services"]
    assert list(added) == ["kvt"]
    assert added["kvt"]["build"]["args"] == {"TORCH_INDEX": ""}
    assert Settings(device=added["kvt"]["environment"]["KVT_DEVICE"]).device == "cuda"


class TestSharedMemory:
    COMPOSE: Any = read("compose.buffers.yaml")

    def settings(self, monkeypatch: pytest.MonkeyPatch) -> Settings:
        for name, value in self.COMPOSE["services"]["kvt"]["environment"].items():
            monkeypatch.setenv(name, value)
        return Settings()

    def test_both_see_the_folder_of_the_socket_and_one_writes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        socket = self.settings(monkeypatch).buffers
        assert socket is not None
        [ours], [theirs] = (self.COMPOSE["services"][name]["volumes"] for name in ("kvt", "engine"))
        name, _, mounted = ours.partition(":")
        assert (mounted, theirs) == (str(socket.parent), f"{ours}:ro")
        assert name in self.COMPOSE["volumes"]
        user = re.findall(r"^USER (\d+):", DOCKERFILE, re.MULTILINE)[-1]
        assert f"install -d -o {user} -g {user} -m 711 {mounted} " in DOCKERFILE

    def test_the_engines_user_may_ask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        user = self.COMPOSE["services"]["engine"]["user"].partition(":")[0]
        assert int(user) in self.settings(monkeypatch).buffer_uids

    def test_all_memory_fits_the_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = self.settings(monkeypatch)
        assert settings.host_memory is not None
        most = settings.buffer_bytes + settings.host_memory + settings.max_inflight_bytes
        limit = int(self.COMPOSE["services"]["kvt"]["mem_limit"].removesuffix("g")) << 30
        assert most <= limit - (2 << 30), "python, torch, and what is not counted"

    def test_it_adds_no_rights(self) -> None:
        base = read("compose.yaml")["services"]["kvt"]
        for service in self.COMPOSE["services"].values():
            rights = {"privileged", "ipc", "shm_size", "pid", "cap_add", "network_mode"}
            assert not rights & (service.keys() | base.keys())
            assert not {"read_only", "cap_drop", "security_opt"} & service.keys()

    def test_its_metric_exists(self) -> None:
        named = re.findall(r"`(kvt_buffer_\w+)`", (DEPLOY / "README.md").read_text())
        assert named
        assert set(named) <= exported_names()


def test_rules_read_metrics_that_the_service_exports() -> None:
    used = {name for rule in rules() for name in re.findall(r"(?<!:)\bkvt_\w+", rule["expr"])}
    assert "kvt_translations_total" in used
    assert used <= exported_names()


def test_every_rule_has_a_unit_test() -> None:
    text = (DEPLOY / "prometheus" / "rules.test.yml").read_text()
    names = [rule.get("alert") or rule["record"] for rule in rules()]
    assert len(names) == len(set(names)) > 1
    assert [name for name in names if name not in text] == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH")
@pytest.mark.parametrize("command", ["check config prometheus.yml", "test rules rules.test.yml"])
def test_promtool_accepts(command: str) -> None:
    run = subprocess.run(
        ["promtool", *command.split()],
        cwd=DEPLOY / "prometheus",
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
