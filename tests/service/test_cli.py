"""``kvt``: every command on a real family, every kind of failure with its line and its code."""

import inspect as signatures
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import safetensors.torch
import typer
import yaml
from typer.testing import CliRunner, Result

from mappers.errors import CorpusError, IdentityMismatch, LayoutError, UnsupportedModel
from mappers.plan import FitPlan
from mappers.recipes import RECIPES
from service.cli import app
from service.commands import exits
from service.commands.exits import Code
from service.commands.fit import Recipe, fit
from service.commands.models import layer_numbers
from service.commands.texts import by_domain
from service.settings import Settings
from tests.service.pair import good, publish
from tests.service.tiny_family import TOKENS, fit_arguments
from tests.service.tiny_family import family as tiny_family

COMMANDS = (
    "bench",
    "demo",
    "serve",
    "translate",
    "fit",
    "evaluate",
    "doctor",
    "inspect",
    "verify",
    "export",
    "import",
)


def kvt(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env=environment)


def assert_one_line(result: Result, code: Code, *words: str) -> None:
    """The one line on stderr that goes with an exit code, and nothing on stdout."""
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("kvt: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr


@pytest.fixture
def artifact(artifacts: Path) -> Path:
    """The folder of the tiny pair's mapper."""
    return next(path for path in artifacts.iterdir() if path.is_dir())


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    path = tmp_path / "request.safetensors"
    path.write_bytes(good(40).body)
    return path


@pytest.fixture
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_family(tmp_path_factory)


class TestHelp:
    def test_every_command_is_there_with_help(self) -> None:
        listed = kvt("--help").stdout
        for command in COMMANDS:
            assert re.search(rf"\b{command}\b", listed)
            shown = kvt(command, "--help")
            assert shown.exit_code == 0
            assert f"KVT_{command.upper()}_" in shown.stdout or command == "serve"

    def test_every_setting_is_an_option_of_serve(self) -> None:
        serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
        options = {p.name: p for p in serve.params}
        in_the_file_only = {"pairs"}
        assert options.keys() & in_the_file_only == set()
        for name, field in Settings.model_fields.items():
            if name in in_the_file_only:
                continue
            assert options[name].help == field.description
            assert options[name].envvar == f"KVT_{name.upper()}"

    def test_fits_recipes_are_all_recipes(self) -> None:
        assert get_args(Recipe) == tuple(RECIPES)

    def test_fits_defaults_are_the_plans(self) -> None:
        for name, parameter in signatures.signature(fit).parameters.items():
            field = FitPlan.model_fields.get(name)
            if field is not None and not field.is_required() and parameter.default is not None:
                assert parameter.default == field.default, name


class TestPrecedence:
    """Command line over environment over YAML over default, seen in what inspect prints."""

    def shown(self, *arguments: object, **environment: str) -> str:
        result = kvt("inspect", *arguments, **environment)
        assert result.exit_code == 0, result.output
        found = re.search(r"max_kl ([\d.]+)", result.stdout)
        assert found is not None
        return found[1]

    def test_inspect(self, artifact: Path, tmp_path: Path) -> None:
        config = tmp_path / "kvt.yaml"
        config.write_text("max-kl: 0.011\n")
        environment = {"KVT_INSPECT_MAX_KL": "0.012"}
        assert self.shown(artifact) == f"{Settings().max_kl:g}"
        assert self.shown(artifact, "--config", config) == "0.011"
        assert self.shown(artifact, KVT_INSPECT_CONFIG=str(config)) == "0.011"
        assert self.shown(artifact, "--config", config, **environment) == "0.012"
        both = ("--config", config, "--max-kl", "0.013")
        assert self.shown(artifact, *both, **environment) == "0.013"

    def test_serve(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        served: list[Settings] = []
        monkeypatch.setattr("service.server.run", lambda settings, _: served.append(settings))
        config = tmp_path / "kvt.yaml"
        config.write_text("max_kl: 0.011\nalpha: 0.2\nport: 0\nartifacts: [a, b]\n")
        assert kvt("serve", "--config", config).exit_code == 0
        assert kvt("serve", "--config", config, KVT_MAX_KL="0.012").exit_code == 0
        given = kvt("serve", "--config", config, "--max-kl", "0.013", KVT_MAX_KL="0.012")
        assert given.exit_code == 0
        assert [s.max_kl for s in served] == [0.011, 0.012, 0.013]
        assert {s.alpha for s in served} == {0.2}
        assert {s.delta for s in served} == {Settings().delta}
        assert served[0].artifacts == (Path("a"), Path("b"))
        assert re.search(r"listening on http://127\.0\.0\.1:\d+ ", given.stderr)

    @pytest.mark.parametrize(
        ("text", "word"),
        [("max-klx: 1\n", "max_klx"), ("[1]\n", "mapping"), ("a: [\n", "YAML")],
    )
    def test_a_bad_file(self, artifact: Path, tmp_path: Path, text: str, word: str) -> None:
        config = tmp_path / "kvt.yaml"
        config.write_text(text)
        assert_one_line(kvt("inspect", artifact, "--config", config), Code.USAGE, word)
        assert kvt("serve", "--config", config, "--port", 0).exit_code == Code.USAGE


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            (("serv",), "serve"),
            (("inspect",), "artifact"),
            (("inspect", "/no/such/folder"), "does not exist"),
            (("serve", "--port", "99999"), "port"),
            (("serve", "--port", "x"), "port"),
            (("serve", "--no-such-option"), "--no-such-option"),
            (("serve", "--config", "/no/such/file"), "does not exist"),
        ],
    )
    def test_one_line_and_code_2(self, arguments: tuple[str, ...], word: str) -> None:
        assert_one_line(kvt(*arguments), Code.USAGE, word)

    def test_a_bad_environment(self) -> None:
        assert_one_line(kvt("serve", KVT_PORT="x"), Code.USAGE, "KVT_PORT")
        assert_one_line(kvt("serve", KVT_ARTIFACTS="not json"), Code.USAGE, "JSON")

    def test_a_port_that_is_taken(self) -> None:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            assert_one_line(kvt("serve", "--port", port), Code.SERVER, f"127.0.0.1:{port}")

    @pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:99"])
    def test_a_device_that_is_not_there(
        self, artifact: Path, request_file: Path, device: str
    ) -> None:
        given = ("translate", request_file, "answer", "--artifact", artifact, "--device", device)
        assert_one_line(kvt(*given), Code.USAGE, "device")

    def test_a_threshold_that_is_none(self, artifact: Path, request_file: Path) -> None:
        given = ("translate", request_file, "answer", "--artifact", artifact, "--max-kl", "-1")
        assert_one_line(kvt(*given), Code.USAGE, "max-kl")

    def test_layers_and_domains(self) -> None:
        assert layer_numbers("10-12, 15") == (10, 11, 12, 15)
        assert by_domain(["a=x", "b=y", "a=z"]) == {"a": (Path("x"), Path("z")), "b": (Path("y"),)}
        for bad in ("", "3-", "a", "1,,2"):
            with pytest.raises(typer.BadParameter):
                layer_numbers(bad)
        for bad in ("", "a", "a=", "=b"):
            with pytest.raises(typer.BadParameter):
                by_domain([bad])

    def test_codes_of_the_librarys_errors(self) -> None:
        assert exits.code_of(UnsupportedModel("mla", "MLA")) is Code.IDENTITY
        assert exits.code_of(IdentityMismatch("source", "dtype", "a", "b")) is Code.IDENTITY
        assert exits.code_of(LayoutError("x")) is Code.DATA
        assert exits.code_of(CorpusError("x")) is Code.DATA


class TestLookAt:
    def test_inspect_shows_pair_evidence_and_decisions(self, family: Path) -> None:
        folder = next((family / "artifacts").glob("small-to-large-*"))
        result = kvt("inspect", folder)
        assert result.exit_code == 0
        for word in (
            folder.name,
            "full_head, 2 source layers",
            "theta 20,000",
            "in_domain",
            "tail 1",
        ):
            assert word in result.stdout
        tight = kvt("inspect", folder, "--max-kl", "0.000001")
        assert tight.stdout.count("no:") == 2
        assert "tail 1, bound" not in tight.stdout

    def test_inspect_by_the_mean(self, artifact: Path) -> None:
        result = kvt("inspect", artifact, "--risk", "mean", "--max-kl", "0.2")
        assert result.exit_code == 0
        assert "bounds hold for the mean, KLs cut at 1, 95% sure" in " ".join(result.stdout.split())
        loose = kvt("inspect", artifact, "--risk", "mean", "--max-kl", "1.5")
        assert_one_line(loose, Code.USAGE, "kl_clip")

    def test_inspect_without_evidence(self, tmp_path: Path) -> None:
        folder = publish(tmp_path, proven=False)
        result = kvt("inspect", folder)
        assert result.exit_code == 0
        assert "Not servable" in result.stdout

    def test_verify(self, artifact: Path) -> None:
        result = kvt("verify", artifact, artifact)
        assert result.exit_code == 0
        assert result.stdout.count("intact, sha256:") == 2

    @pytest.mark.parametrize("command", ["verify", "inspect", "translate"])
    def test_an_altered_artifact(
        self, artifact: Path, request_file: Path, tmp_path: Path, command: str
    ) -> None:
        altered = tmp_path / artifact.name
        shutil.copytree(artifact, altered)
        weights = bytearray((altered / "weights.safetensors").read_bytes())
        weights[-1] ^= 1
        (altered / "weights.safetensors").write_bytes(weights)
        arguments: tuple[object, ...] = (altered,)
        if command == "translate":
            arguments = (request_file, tmp_path / "answer", "--artifact", altered)
        assert_one_line(kvt(command, *arguments), Code.ARTIFACT, "weights.safetensors")
        assert not (tmp_path / "answer").exists()


class TestTranslate:
    def test_from_file_to_file(self, artifact: Path, request_file: Path, tmp_path: Path) -> None:
        answer = tmp_path / "answer.safetensors"
        result = kvt("translate", request_file, answer, "--artifact", artifact)
        assert result.exit_code == 0, result.output
        assert f"translated 39 tokens, native tail 1, KL bound 0.02, by {artifact.name}" in (
            result.stdout
        )
        assert len(safetensors.torch.load_file(answer)) == 8
        assert sorted(p.name for p in tmp_path.iterdir()) == [answer.name, request_file.name]

    def test_it_is_what_the_server_answers(
        self, live: Any, artifact: Path, request_file: Path, tmp_path: Path
    ) -> None:
        answer = tmp_path / "answer.safetensors"
        assert kvt("translate", request_file, answer, "--artifact", artifact).exit_code == 0
        assert answer.read_bytes() == live.translate(good(40)).content

    def test_a_reprefill_decision_is_code_10(
        self, artifact: Path, request_file: Path, tmp_path: Path
    ) -> None:
        answer = tmp_path / "answer.safetensors"
        answer.write_bytes(b"older")
        arguments = ("translate", request_file, answer, "--artifact", artifact)
        result = kvt(*arguments, "--max-kl", "1e-6")
        assert_one_line(result, Code.REPREFILL, "certified_kl_exceeds_threshold")
        assert answer.read_bytes() == b"older"

    @pytest.mark.parametrize(
        ("body", "code", "word"),
        [
            (good(40).body[:-5], Code.DATA, "truncated_body"),
            (good(40).body + b"\0", Code.DATA, "safetensors"),
            (b"", Code.DATA, "truncated_body"),
            (
                good(40, target={**good().document["target"], "model": "x"}).body,
                3,
                "pair_not_found",
            ),
            (good(40, max_kl=1e-6).body, Code.REPREFILL, "certified"),
        ],
    )
    def test_requests_that_are_not_translated(
        self, artifact: Path, tmp_path: Path, body: bytes, code: Code, word: str
    ) -> None:
        request, answer = tmp_path / "request", tmp_path / "answer"
        request.write_bytes(body)
        result = kvt("translate", request, answer, "--artifact", artifact)
        assert_one_line(result, code, word)
        assert [p.name for p in tmp_path.iterdir()] == ["request"]

    def test_an_answer_that_cannot_be_written(self, artifact: Path, request_file: Path) -> None:
        missing = request_file.parent / "missing" / "answer"
        result = kvt("translate", request_file, missing, "--artifact", artifact)
        assert_one_line(result, Code.DATA, "No such file")

    def test_without_evidence(self, request_file: Path, tmp_path: Path) -> None:
        unproven = publish(tmp_path / "unproven", proven=False)
        arguments = ("translate", request_file, tmp_path / "answer", "--artifact", unproven)
        assert_one_line(kvt(*arguments), Code.ARTIFACT, "evidence")
        allowed = kvt(*arguments, "--allow-unproven")
        assert allowed.exit_code == 0
        assert "unproven" in allowed.stdout


class TestMake:
    def test_evaluate_replaces_the_evidence(self, family: Path, tmp_path: Path) -> None:
        fitted = next((family / "artifacts").glob("small-to-large-*"))
        folder = tmp_path / fitted.name
        shutil.copytree(fitted, folder)
        sides = ("--source", family / "small", "--target", family / "large")
        text = f"again={family / 'text' / 'held_out.jsonl'}"
        options = ("--held-out", text, "--documents", 2, "--lengths", 64, "--native-tails", 1)
        result = kvt("evaluate", folder, *sides, *options)
        assert result.exit_code == 0, result.output
        evidence = json.loads((folder / "evidence.json").read_text())
        assert list(evidence["corpora"]) == ["again"]
        assert kvt("verify", folder).exit_code == 0
        swapped = ("--source", family / "large", "--target", family / "small")
        wrong = kvt("evaluate", folder, *swapped, *options)
        assert_one_line(wrong, Code.IDENTITY, "source.model")

    def test_export_and_import_round_trip(self, family: Path, tmp_path: Path) -> None:
        fitted = next((family / "artifacts").glob("small-to-large-*"))
        out = tmp_path / "vsr"
        assert_one_line(kvt("export", fitted, out), Code.ARTIFACT, "exact prefixes")
        exported = kvt("export", fitted, out, "--without-prefixes", "--format", "vsr")
        assert exported.exit_code == 0, exported.output
        sides = ("--source", family / "small", "--target", family / "large")
        back = kvt("import", exported.stdout.strip(), tmp_path / "back", *sides)
        assert back.exit_code == 0, back.output
        weights = [
            safetensors.torch.load_file(folder / "weights.safetensors")
            for folder in (fitted, Path(back.stdout.strip()))
        ]
        assert weights[0].keys() == weights[1].keys()
        assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
        assert kvt("verify", back.stdout.strip()).exit_code == 0

    def test_fit_for_engines_that_store_8_bits(self, family: Path) -> None:
        stored = ("--source-kv-dtype", "int8", "--source-kv-scales", "per_head")
        arguments = [*fit_arguments(family, "small", "large", "stored"), *stored]
        result = kvt(*arguments, "--source-kv-zero-points", "--target-kv-dtype", "float8_e5m2")
        assert result.exit_code == 0, result.output
        folder = Path(result.stdout.strip())
        manifest = json.loads((folder / "manifest.json").read_text())
        kept = {name: manifest["source"][f"kv_{name}"] for name in ("dtype", "scales")}
        assert kept == {"dtype": "int8", "scales": "per_head"}
        assert manifest["source"]["kv_zero_points"] is True
        assert manifest["target"]["kv_dtype"] == "float8_e5m2"
        shown = kvt("inspect", folder).stdout
        assert re.search(r"kv zero points +True +False", shown)
        assert re.search(r"kv scales +per_head +none", shown)

    @pytest.mark.parametrize(
        ("stored", "said"),
        [
            (("--source-kv-dtype", "int8"), "an int8 cache has some"),
            (("--target-kv-scales", "per_head"), "only an 8-bit cache"),
            (("--source-kv-zero-points",), "only an int8 cache"),
        ],
    )
    def test_a_storage_that_there_is_not(
        self, family: Path, stored: tuple[str, ...], said: str
    ) -> None:
        result = kvt(*fit_arguments(family, "small", "large", "elsewhere"), *stored)
        assert_one_line(result, Code.USAGE, said)

    def test_fit_on_too_little_text(self, family: Path, tmp_path: Path) -> None:
        short = tmp_path / "short.txt"
        short.write_text("too short")
        arguments = fit_arguments(family, "small", "large", "elsewhere")
        arguments[arguments.index("--calibration") + 1] = str(short)
        result = kvt(*arguments)
        assert result.exit_code == Code.DATA
        assert result.stderr.splitlines()[-1].startswith("kvt: ")
        assert not list((family / "elsewhere").glob("small*"))

    def test_fit_of_a_model_that_is_not_supported(self, family: Path, tmp_path: Path) -> None:
        sliding = tmp_path / "sliding"
        shutil.copytree(family / "small", sliding)
        config = json.loads((sliding / "config.json").read_text())
        config |= {
            "use_sliding_window": True,
            "sliding_window": 32,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention"] * 2,
        }
        (sliding / "config.json").write_text(json.dumps(config))
        arguments = [
            str(sliding) if part == str(family / "small") else part
            for part in fit_arguments(family, "small", "large", "elsewhere")
        ]
        result = kvt(*arguments)
        assert result.exit_code == Code.IDENTITY, result.output
        assert "sliding" in result.stderr.splitlines()[-1]

    def test_a_fit_is_described_by_yaml_alone(self, family: Path, tmp_path: Path) -> None:
        arguments = fit_arguments(family, "small", "large", "elsewhere")[1:]
        pairs = dict(zip(arguments[0::2], arguments[1::2], strict=True))
        values = yaml.safe_load(Path(pairs.pop("--config")).read_text())
        values |= {name.removeprefix("--"): value for name, value in pairs.items()}
        values |= {"calibration": [values["calibration"]], "held-out": [values["held-out"]]}
        values |= {"recipe": "no-such-recipe", "root": str(tmp_path / "root")}
        config = tmp_path / "fit.yaml"
        config.write_text(yaml.safe_dump(values))
        result = kvt("fit", "--config", config)
        assert_one_line(result, Code.USAGE, "recipe")


class TestProcess:
    """One real process, as a shell starts it."""

    @pytest.fixture(autouse=True)
    def patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However busy the machine is: a start is not timed here."""
        monkeypatch.setattr("service.demo.process.START_SECONDS", 300.0)

    @pytest.fixture
    def ctrl_c(self) -> Iterator[None]:
        """Ends a program that is started here, also where a shell has started the tests in the
        background: it has them ignore the signal, and what they start inherits that."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    @pytest.mark.usefixtures("ctrl_c")
    def test_serve_until_ctrl_c(self, artifacts: Path) -> None:
        from service.demo.process import ServerProcess

        with ServerProcess([artifacts]) as server:
            process = server._process
            assert process is not None
            assert server.url.startswith("http://127.0.0.1:")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == Code.INTERRUPTED
            assert server._last_line() == "kvt: interrupted"

    def test_a_server_that_cannot_start(self, artifacts: Path) -> None:
        from service.demo.process import ServerProcess

        with pytest.raises(exits.Failure, match="no-such-option") as caught:
            with ServerProcess([artifacts], "--no-such-option"):
                pass
        assert caught.value.code is Code.SERVER

    def test_the_script_and_the_module_are_one(self) -> None:
        shown = subprocess.run(
            [sys.executable, "-m", "service.cli", "verify", "/no/such/folder"],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (shown.returncode, shown.stdout) == (Code.USAGE, "")
        assert shown.stderr.startswith("kvt: ")


def test_tokens_of_the_family_fit_its_texts(family: Path) -> None:
    lines = (family / "text" / "held_out.jsonl").read_text().splitlines()
    assert len({json.loads(line)["text"] for line in lines}) == len(lines)
    assert TOKENS == 128
