"""The router example, between engines that only say what a connector would say."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.examples.router import router as example

MAPPER = "sha256:" + "a" * 64
PATH = "/v1/completions"
CONFIG = example.Config.model_validate(
    yaml.safe_load(Path(example.__file__).with_name("router.yaml").read_text())
)
CLAIMS = {name: engine.model for name, engine in CONFIG.engines.items()}
PLAN = {
    "decision": "translate", "reason": None, "detail": None, "mapper": "m", "digest": MAPPER,
    "tokens": 30, "native_tail": 1, "expected_ms": 1.0, "bytes_in": 1, "bytes_out": 1,
    "kl_bound": 0.1, "max_kl": 0.2, "risk": "exceedance", "alpha": 0.1, "delta": 0.05,
    "kl_clip": 1.0, "rows": 60, "unproven": False,
}  # fmt: skip


def handle(engine: str, hops: int = 0) -> dict[str, Any]:
    return {
        "buffer": "0" * 32, "nbytes": 100, "tokens": 31, "seal_offset": 64, "ranks": 1,
        "hops": hops, "source": CLAIMS[engine].model_dump(mode="json"),
    }  # fmt: skip


class World:
    """Engines that remember what they were asked, and a service with one plan."""

    def __init__(self, plan: dict[str, Any] | int) -> None:
        self.plan = plan
        self.strict = False
        self.said: dict[str, Any] = {}
        self.answers: list[Any] = []
        self.asked: list[dict[str, Any]] = []
        self.router = example.Router(CONFIG)
        self.router._http = httpx.AsyncClient(transport=httpx.MockTransport(self._engine))
        self.router._kvt._http = httpx.AsyncClient(
            transport=httpx.MockTransport(self._service), base_url=CONFIG.service
        )

    def _engine(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.asked.append(body)
        if self.strict and "kv_transfer_params" in body:
            return httpx.Response(400, json={"error": "an unknown field"})
        said = {"kvt": {"handle": handle(body["model"], hops=len(self.asked) - 1)} | self.said}
        choice: dict[str, Any] = {"text": "y", "logprobs": None}
        if "return_token_ids" in body:
            choice |= {"logprobs": {}, "token_ids": [1], "prompt_token_ids": [2]}
        return httpx.Response(200, json={"choices": [choice], "kv_transfer_params": said})

    def _service(self, request: httpx.Request) -> httpx.Response:
        if isinstance(self.plan, int):
            return httpx.Response(self.plan, json={"code": "pair_not_found"})
        return httpx.Response(200, json=self.plan)

    def turns(
        self, *models: str, session: str | None = "s", **changes: Any
    ) -> list[dict[str, Any]]:
        """What the engines were asked for these turns."""

        async def talk() -> None:
            for model in models:
                body = {"model": model, "prompt": "x", "logprobs": 1} | changes
                self.answers.append(await self.router.turn(PATH, body, session))
            await self.router.aclose()

        asyncio.run(talk())
        return self.asked


def params(asked: dict[str, Any]) -> dict[str, Any]:
    return dict(asked["kv_transfer_params"]["kvt"])


def test_a_move_takes_the_cache_along_under_a_salt_that_names_the_mapper() -> None:
    first, second, third = World(PLAN).turns("small", "large", "large")
    assert params(first) == {"export": True}
    assert "cache_salt" not in first
    assert second["model"] == "large"
    assert second["cache_salt"].startswith(f"kvt-{MAPPER}-1-")
    assert params(second)["mapper"] == MAPPER
    assert params(second)["handle"]["source"]["model"] == "small"
    # Who stays meets the same blocks again.
    assert third["cache_salt"] == second["cache_salt"]
    assert params(third) == {"export": True, "replaces": "0" * 32}


@pytest.mark.parametrize("plan", [PLAN | {"decision": "reprefill", "reason": "no_evidence"}, 404])
def test_anything_but_a_plan_to_translate_is_a_plain_request(plan: Any) -> None:
    _, second = World(plan).turns("small", "large")
    assert params(second) == {"export": True, "replaces": "0" * 32}
    assert "cache_salt" not in second


def test_without_a_session_nothing_is_added() -> None:
    (asked,) = World(PLAN).turns("small", session=None)
    assert asked == {"model": "small", "prompt": "x", "logprobs": 1}


def test_what_was_added_to_a_request_is_not_in_its_answer() -> None:
    world = World(PLAN)
    _, second = world.turns("small", "large", logprobs=None)
    assert second["return_token_ids"] is True
    assert world.answers[1] == (200, {"choices": [{"text": "y", "logprobs": None}]})
    asked = World(PLAN)
    asked.turns("small", "large", return_token_ids=True)
    assert asked.answers[1][1]["choices"][0]["token_ids"] == [1]


@pytest.mark.parametrize(
    "changes",
    [{"echo": True}, {"logprobs": 0}, {"prompt": ["x", "y"]}, {"prompt": [[1], [2]]}, {"n": 2}],
)
def test_what_cannot_be_measured(changes: dict[str, Any]) -> None:
    _, second = World(PLAN).turns("small", "large", **({"logprobs": None} | changes))
    assert "return_token_ids" not in second
    assert params(second)["mapper"] == MAPPER


def test_an_engine_that_does_not_know_what_was_added_is_asked_without() -> None:
    world = World(PLAN)
    world.strict = True
    assert world.turns("small")[1] == {"model": "small", "prompt": "x", "logprobs": 1}
    assert world.answers[0][0] == 200


def test_a_measurement_that_breaks_does_not_keep_the_router_from_closing() -> None:
    router = World(PLAN).router

    async def broken() -> None:
        raise KeyError

    async def close() -> None:
        router._shadows.add(asyncio.create_task(broken()))
        await router.aclose()

    asyncio.run(close())
    assert router._http.is_closed


def test_an_unknown_document_is_as_if_there_were_none() -> None:
    world = World(PLAN)
    world.said = {"another": "version"}
    first, second = world.turns("small", "small")
    assert params(first) == params(second) == {"export": True}
    assert world.answers[1][0] == 200


@pytest.mark.parametrize(
    ("model", "chars", "expected"),
    [
        ("large", 1, "large"),
        ("small", 9000, "small"),
        ("auto", 1, "small"),
        ("auto", 9000, "large"),
    ],
)
def test_the_rule(model: str, chars: int, expected: str) -> None:
    assert example.choose({"model": model, "prompt": "x" * chars}, CONFIG) == expected


def test_the_example_is_for_the_embedded_mappers() -> None:
    claims = {name: claim.version for name, claim in CLAIMS.items()}
    manifests = Path(example.__file__).parents[3].glob("mappers/demo/artifacts/*/manifest.json")
    sides = [json.loads(path.read_text())["target"] for path in manifests]
    assert claims == {side["model"]: side["version"] for side in sides}
