"""``kvt bridge lmcache`` against a real LMCache server on the CPU; no engine runs, the tests store
what one would have stored. ``make test-lmcache`` runs them in an environment that has LMCache."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

pytest.importorskip("lmcache.sdk", reason="make test-lmcache installs LMCache where it can be had")

from lmcache import sdk

from mappers.layouts import Layout, write
from mappers.translate import Translator
from service.cli import app
from service.commands.exits import Code
from service.settings import Settings
from tests.lmcache.server import CHUNK_TOKENS, Address, lmcache_server, register
from tests.service.pair import PREFIX_IDS, SOURCE, TARGET, cache, mapper, publish
from tests.service.threaded import Running, serving

TOKENS = 64


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("artifacts")
    publish(root)
    with serving(Settings(artifacts=(root,), shadow_rate=0)) as found:
        yield found


@pytest.fixture(scope="module")
def lmcache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """The server, with the layouts of both models of the pair, and of one that is neither."""
    with lmcache_server(tmp_path_factory.mktemp("lmcache") / "server.log") as address:
        engines = [register(address, model.model, model) for model in (SOURCE, TARGET)]
        engines.append(register(address, "odd", SOURCE))
        yield address
        del engines


def kept(address: Address, model: str) -> Any:
    """The SDK's context, as any other client of LMCache has it."""
    return sdk.connect(sdk.LMCacheSDKCacheKind.KV, *address, model)


def prompt(seed: int) -> list[int]:
    drawn = torch.randint(10, 4000, (TOKENS,), generator=torch.Generator().manual_seed(seed))
    return [*PREFIX_IDS, *drawn.tolist()[len(PREFIX_IDS) :]]


def bridge(running: Running, address: Address, *jobs: dict[str, Any], **more: str) -> Result:
    options = {
        "--source": "small",
        "--target": "large",
        "--url": running.url,
        "--lmcache-url": address.url,
        "--lmcache-http-url": address.http_url,
        **{f"--{name.replace('_', '-')}": value for name, value in more.items()},
    }
    arguments = [word for pair in options.items() for word in pair]
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    return CliRunner().invoke(app, ["bridge", "lmcache", *arguments], input=lines)


def answers(result: Result) -> list[dict[str, Any]]:
    """One for each job; the service in this process logs to the same stream."""
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def native(seed: int) -> Tensor:
    """What the source's engine computed, as LMCache holds it."""
    return write(Layout.LMCACHE, cache(TOKENS, seed=seed))["kv"]


def translated(seed: int, tokens: int) -> Tensor:
    """What the library gives of the first tokens, as LMCache holds it."""
    built = mapper()
    match = built.prefixes.longest_match(PREFIX_IDS)
    assert match is not None
    whole = Translator(built).translate(
        cache(TOKENS, seed=seed), tokens=TOKENS - 1, prefix=match[1], dtype=torch.float32
    )
    return write(Layout.LMCACHE, whole.slice(0, tokens))["kv"]


def test_chunks_of_one_model_become_those_of_the_other(running: Running, lmcache: Address) -> None:
    ids = prompt(1)
    source, target = kept(lmcache, "small"), kept(lmcache, "large")
    assert source.store(
        write(Layout.LMCACHE, cache(TOKENS, seed=1))["kv"], ids, cache_salt="tenant"
    )
    job = {"token_ids": ids, "source_salt": "tenant", "session": "s1"}
    [answer] = answers(bridge(running, lmcache, job))
    digest = running.service.store.entries[0].digest
    assert answer["decision"] == "translate"
    assert answer["cache_salt"] == f"kvt-{digest}-1-s1"
    # The native tail is one token, and a part of a chunk is none.
    assert answer["tokens"] == TOKENS - CHUNK_TOKENS
    found = target.retrieve(ids, cache_salt=answer["cache_salt"])
    assert torch.equal(found, translated(1, answer["tokens"]))
    for salt in ("", "tenant", f"kvt-{digest}-1"):
        assert target.retrieve(ids, cache_salt=salt) is None
    assert source.retrieve(ids, cache_salt=answer["cache_salt"]) is None


def test_whatever_else_is_a_prefill_and_nothing_is_stored(
    running: Running, lmcache: Address
) -> None:
    ids, unknown = prompt(2), prompt(3)
    source, target = kept(lmcache, "small"), kept(lmcache, "large")
    assert source.store(native(2), ids)
    jobs = [
        {"token_ids": ids, "max_kl": 1e-6},
        {"token_ids": unknown},
        {"token_ids": ids, "source_salt": "tenant"},
        {"token_ids": ids[:CHUNK_TOKENS]},
        {"token_ids": ids, "hops": 1},
    ]
    said = answers(bridge(running, lmcache, *jobs))
    assert [each["decision"] for each in said] == ["reprefill"] * len(jobs)
    assert [each["reason"] for each in said] == [
        "certified_kl_exceeds_threshold",
        "not_cached",
        "not_cached",
        "less_than_a_chunk",
        "drift_budget_exhausted",
    ]
    digest = running.service.store.entries[0].digest
    assert target.retrieve(ids, cache_salt=f"kvt-{digest}-1") is None


@pytest.mark.parametrize(
    ("name", "word"),
    [("odd", "layers: the engine has registered 3, expected 4"), ("nobody", "no engine")],
)
def test_a_layout_that_is_not_the_models(
    running: Running, lmcache: Address, name: str, word: str
) -> None:
    result = bridge(running, lmcache, {"token_ids": [1]}, target_name=name)
    assert result.exit_code == Code.DATA
    assert word in result.stderr
