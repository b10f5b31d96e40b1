"""The bridge where there is no LMCache (``tests/lmcache`` has the real one): what it refuses."""

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from mappers.cache import KVCache
from mappers.identity import ModelIdentity
from mappers.layouts import Layout, write
from service.bridge.carry import Bridge, Job
from service.bridge.chunks import BridgeError, Chunks, check_registered
from service.cli import app
from service.client import Client
from service.commands.exits import Code
from service.hf import claim_of
from service.schemas import SideInfo
from service.settings import Settings
from service.vllm.params import salt
from tests.service.pair import SOURCE, TARGET, cache
from tests.service.threaded import Running, serving

TOKENS = 64


@pytest.fixture(scope="module")
def running(artifacts: Path) -> Iterator[Running]:
    with serving(Settings(artifacts=(artifacts,), shadow_rate=0)) as found:
        yield found


def bridge(running: Running, *arguments: str, lines: str = "") -> Any:
    given = ["bridge", "lmcache", "--url", running.url, *arguments]
    return CliRunner().invoke(app, given, input=lines)


def side(model: ModelIdentity) -> SideInfo:
    """As the service lists it."""
    rope = {"rope_theta": model.rope.theta, "rope_type": model.rope.type}
    plain = SideInfo.model_fields.keys() - rope.keys()
    return SideInfo(**rope, **{name: getattr(model, name) for name in plain})


class Forgetful:
    """A store that says it has taken what it has not."""

    chunk_size = 16

    def __init__(self, held: Tensor | None = None, damaged: float | None = None) -> None:
        self.held, self.damaged = held, damaged

    def retrieve(self, tokens: Sequence[int], cache_salt: str = "") -> Tensor | None:
        return self.held

    def store(self, kv: Tensor, tokens: Sequence[int], cache_salt: str = "") -> bool:
        if self.damaged is not None:
            self.held = kv.clone()
            self.held.view(-1)[-1] += self.damaged
        return True

    def close(self) -> None:
        raise RuntimeError("closed")


class TestCommand:
    def test_without_lmcache(self, running: Running) -> None:
        if importlib.util.find_spec("lmcache") is not None:
            pytest.skip("lmcache is installed here")
        result = bridge(running, "--source", "small", "--target", "large")
        assert result.exit_code == Code.DATA
        assert "lmcache is not installed here" in result.stderr

    def test_a_pair_that_is_not_there(self, running: Running) -> None:
        result = bridge(running, "--source", "large", "--target", "small")
        assert result.exit_code == Code.IDENTITY
        assert "0 mappers for large -> small" in result.stderr


class TestRegistered:
    GOOD = {
        "world_size": 1,
        "kv_cache_layout": {
            "num_layers": 4,
            "cache_size_per_token": 2 * 4 * 2 * 8 * 4,
            "kernel_groups": [{"dtype": "torch.float32"}],
        },
    }

    def test_the_models_own(self) -> None:
        check_registered(self.GOOD, side(TARGET))

    @pytest.mark.parametrize(
        ("layout", "kv", "word"),
        [
            ({"world_size": 2}, {}, "ranks: the engine has registered 2, expected 1"),
            ({}, {"num_layers": 3}, "layers: the engine has registered 3, expected 4"),
            ({}, {"cache_size_per_token": 256}, "bytes a token"),
            ({}, {"kernel_groups": [{"dtype": "torch.float16"}]}, "dtype: .* torch.float16"),
            ({}, {"kernel_groups": [{}, {}]}, "groups of layers"),
            ({"kv_cache_layout": {}}, None, "groups of layers: the engine has registered 0"),
        ],
    )
    def test_any_other(self, layout: dict[str, Any], kv: Any, word: str) -> None:
        said = self.GOOD | layout
        if kv is not None:
            said = said | {"kv_cache_layout": said["kv_cache_layout"] | kv}  # type: ignore[operator]
        with pytest.raises(BridgeError, match=word):
            check_registered(said, side(TARGET))

    def test_scales(self) -> None:
        scaled = side(TARGET).model_copy(update={"kv_scales": "per_head"})
        with pytest.raises(BridgeError, match="scales"):
            check_registered(self.GOOD, scaled)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (None, Forgetful(), "not_cached"),
        (torch.zeros(2, 3, TOKENS), Forgetful(), "layout_error"),
        (torch.zeros(2, 3, TOKENS, 17), Forgetful(), "layout_error"),
        (torch.full((2, 3, TOKENS, 16), torch.nan), Forgetful(), "non_finite"),
        (write(Layout.LMCACHE, cache(TOKENS))["kv"], Forgetful(), "lmcache_error"),
        (write(Layout.LMCACHE, cache(TOKENS))["kv"], Forgetful(damaged=1e-3), "lmcache_error"),
    ],
)
def test_a_store_that_fails(
    running: Running, source: Tensor | None, target: Forgetful, reason: str
) -> None:
    ends = Chunks(Forgetful(source), side(SOURCE)), Chunks(target, side(TARGET))
    with Client(running.url) as client:
        over = Bridge(client, (claim_of(SOURCE), claim_of(TARGET)), *ends)
        answer = over.carry(Job(token_ids=tuple(range(TOKENS))))
    assert (answer.decision, answer.reason, answer.tokens) == ("reprefill", reason, 0)


class Written:
    """A store of all tokens of the source's, which takes whatever it is given."""

    chunk_tokens = 16

    def read(self, token_ids: Sequence[int], salt: str) -> KVCache | None:
        return cache(len(token_ids))

    def write(self, cache: KVCache, token_ids: Sequence[int], salt: str) -> None:
        pass


def test_hops_of_what_was_translated_are_said_both_ways(running: Running) -> None:
    ids, digest = tuple(range(TOKENS)), running.service.store.entries[0].digest
    with Client(running.url) as client:
        over = Bridge(client, (claim_of(SOURCE), claim_of(TARGET)), Written(), Written())
        fresh = over.carry(Job(token_ids=ids))
        unknown = over.carry(Job(token_ids=ids, source_salt=f"kvt-{digest}", hops=1))
        again = over.carry(Job(token_ids=ids, source_salt=salt(digest, 1)))
        more = over.carry(Job(token_ids=ids, source_salt="tenant", hops=1))
    assert (fresh.decision, fresh.hops) == ("translate", 1)
    assert fresh.cache_salt == salt(digest, 1)
    assert unknown.reason == "unknown_hops"
    assert again.reason == more.reason == "drift_budget_exhausted"


def test_one_line_that_is_no_job_does_not_end_the_run(running: Running, tmp_path: Path) -> None:
    folders = ("--source-pages", str(tmp_path), "--target-pages", str(tmp_path))
    pair = ("--source", "small", "--target", "large", "--page-tokens", "4")
    given = ["bridge", "sglang", "--url", running.url, *pair, *folders]
    bad = [b"{", b'{"token_ids": [-1]}', b'{"token_ids": [4294967296]}', b'"\xff"', b""]
    lines = b"\n".join([*bad, b'{"token_ids": [4294967295, 0, 0, 0]}'])
    result = CliRunner().invoke(app, given, input=lines)
    assert result.exit_code == 0, result.output
    said = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"dec')]
    assert [each["reason"] for each in said] == ["invalid_job"] * len(bad) + ["not_cached"]
