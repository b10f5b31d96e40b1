"""``kvt bench`` on small shapes: its rows, its table, and what it refuses before it begins."""

import json

import pytest
from typer.testing import CliRunner, Result

import mappers.bench_room
from mappers.errors import TooLittleMemory
from service.cli import app
from service.commands.exits import Code

SMALL = ("--geometry", "demo", "--k", "2", "--tokens", "8", "--rounds", "1", "--threads", "1")
FIELDS = {
    *(
        "geometry",
        "recipe",
        "k",
        "tokens",
        "device",
        "hardware",
        "threads",
        "cache_dtype",
        "rounds",
    ),
    *("translate_tokens_per_second", "gemm_tokens_per_second", "prefill_tokens_per_second"),
    *("translate_over_gemm", "translate_over_prefill", "translate_over_copy"),
    *("load_seconds", "artifact_bytes", "load_peak_bytes", "load_peak_bytes_over_artifact"),
}


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_a_json_line_a_row() -> None:
    result = bench(*SMALL, "--recipe", "head_local", "--recipe", "top_heads", "--json")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["recipe"] for row in rows] == ["head_local", "top_heads"]
    for row in rows:
        assert row.keys() == FIELDS
        assert row["translate_tokens_per_second"] > 0
        assert row["prefill_tokens_per_second"] > 0
        assert row["artifact_bytes"] > 0
        assert row["load_seconds"] > 0


def test_a_table_for_people_and_no_prefill_where_none_is_wanted() -> None:
    result = bench(*SMALL, "--recipe", "full_head", "--no-prefill")
    assert result.exit_code == 0, result.output
    assert "full_head" in result.stdout
    assert "x gemm" in result.stdout


def test_what_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def little(needed_bytes: int, device: str, what: str) -> None:
        raise TooLittleMemory(what, needed_bytes, 1 << 20)

    monkeypatch.setattr(mappers.bench_room, "check_room", little)
    result = bench("--geometry", "qwen3-14b:qwen3-32b", "--recipe", "head_local", "--no-prefill")
    assert result.exit_code == Code.DATA
    assert "artifact, weights and caches take" in result.stderr


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--geometry", "gpt", "geometry is one of demo"),
        ("--recipe", "magic", "recipe is one of full_head"),
        ("--dtype", "int8", "dtype is one of float32"),
        ("--weights", "float16", "weights is one of float32, bfloat16"),
        ("--k", "9", "a source has 4 layers"),
    ],
)
def test_what_there_is_not_is_a_usage_error(option: str, value: str, word: str) -> None:
    result = bench("--geometry", "demo", "--k", "2", "--no-prefill", option, value)
    assert result.exit_code == Code.USAGE
    assert word in result.stderr
