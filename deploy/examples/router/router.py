"""A router that moves conversations between two vLLM servers and takes their KV cache along.

    python deploy/examples/router/router.py deploy/examples/router/router.yaml

It speaks OpenAI's completions and chat completions, not streamed. A conversation is known by the
header ``X-Session-Id``. For each of its turns ``choose`` picks an engine. When that is another one
than for the turn before, the service is asked for a plan; if that is to translate, the new engine
gets the handle of the cache, and translates it through its connector (service/vllm_connector.py).
Everything else is a plain request, which any server answers.
"""

import asyncio
import hashlib
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import yaml
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, generate_latest
from pydantic import BaseModel, ConfigDict, ValidationError

from mappers.identity import IdentityClaim
from mappers.layouts import Layout
from service.client import AsyncClient, NotTranslated
from service.schemas import Plan, TranslateRequest
from service.vllm.params import Answered, Handle, Loaded, salt

MOST_SESSIONS = 10_000
SHADOW_TOP = 20


class Engine(BaseModel):
    """A vLLM server and the model that it serves, as mappers know it."""

    model_config = ConfigDict(extra="forbid")

    url: str
    model: IdentityClaim


class Config(BaseModel):
    """``engines`` from the cheapest to the best; the names are those that the servers go by."""

    model_config = ConfigDict(extra="forbid")

    service: str
    engines: dict[str, Engine]
    domain: str | None = None
    long_chars: int = 2000
    port: int = 8000


@dataclass
class Session:
    """Where the last turn was answered, and what is left of it there."""

    engine: str
    handle: Handle
    salt: str | None


def choose(body: dict[str, Any], config: Config) -> str:
    """The rule: the engine that the request names; for any other name, such as ``auto``, the last
    one for long texts and the first one for the rest. Put your own here."""
    if body.get("model") in config.engines:
        return str(body["model"])
    names = list(config.engines)
    text = str(body.get("messages") or body.get("prompt"))
    return names[-1] if len(text) > config.long_chars else names[0]


class Router:
    """All of it but HTTP."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._kvt = AsyncClient(config.service)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(600, connect=5))
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._shadows: set[asyncio.Task[None]] = set()
        self.registry = CollectorRegistry()
        self._turns = self._counter("turns", "Turns by engine and what became of the cache.")
        self._tokens = self._counter("loaded_tokens", "Prompt tokens that were not prefilled.")
        self._feedback = self._counter("feedback", "Answers measured for the service.")

    async def turn(
        self, path: str, body: dict[str, Any], session_id: str | None
    ) -> tuple[int, Any]:
        """Answer one request of a conversation: status and document. Raises httpx.HTTPError."""
        engine = choose(body, self._config)
        asked = {**body, "model": engine}
        before = self._sessions.get(session_id) if session_id else None
        how, shadowed = "plain", False
        if session_id:
            how, extra = await self._moved(before, engine, session_id)
            asked |= extra
            shadowed = how == "planned" and _can_be_measured(path, body)
            if shadowed:
                asked |= _measurable()
        url = self._config.engines[engine].url + path
        response = await self._http.post(url, json=asked)
        if response.status_code == 400 and session_id:  # perhaps for what was added
            how, asked, shadowed = "refused", {**body, "model": engine}, False
            response = await self._http.post(url, json=asked)
        answer = _json(response)
        answered = _answered(answer)
        if answered.loaded:
            how = "loaded"
            self._tokens.labels(engine, how).inc(answered.loaded.tokens)
            if shadowed and answered.loaded.receipt.shadow:
                self._measure_later(engine, answer, answered.loaded)
        elif answered.refused:
            how = answered.refused.reason
        self._turns.labels(engine, how).inc()
        if session_id:
            self._remember(session_id, engine, answered.handle, asked.get("cache_salt"))
        return response.status_code, _without_added(answer, body)

    async def _moved(
        self, before: Session | None, engine: str, session_id: str
    ) -> tuple[str, dict[str, Any]]:
        """What happens to the cache, and what the request says for it."""
        if before is None:
            return "first", _said(export=True)
        if before.engine == engine:
            extra = _said(export=True, replaces=before.handle.buffer)
            return "stayed", extra | ({"cache_salt": before.salt} if before.salt else {})
        plan = await self._plan(before.handle, engine, session_id)
        if plan is None or plan.decision != "translate":
            plain = _said(export=True, replaces=before.handle.buffer)
            return (plan and plan.reason) or "no_plan", plain
        handle = before.handle.model_dump(mode="json", exclude_none=True)
        limits = {"domain": self._config.domain, "session_id": session_id}
        said = _said(export=True, handle=handle, mapper=plan.digest, **limits)
        own = salt(plan.digest, before.handle.hops + 1, _hashed(session_id))
        return "planned", said | {"cache_salt": own}

    async def _plan(self, handle: Handle, engine: str, session_id: str) -> Plan | None:
        request = TranslateRequest(
            source=handle.source,
            target=self._config.engines[engine].model,
            tokens=handle.tokens,
            layout=Layout.NHD,
            hops=handle.hops,
            domain=self._config.domain,
            session_id=session_id,
        )
        try:
            return await self._kvt.plan(request)
        except NotTranslated:
            return None

    def _remember(
        self, session_id: str, engine: str, handle: Handle | None, used_salt: str | None
    ) -> None:
        self._sessions.pop(session_id, None)
        if handle is not None:
            self._sessions[session_id] = Session(engine, handle, used_salt)
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)

    def _measure_later(self, engine: str, answer: dict[str, Any], loaded: Loaded) -> None:
        choice = dict(answer["choices"][0])
        if not choice.get("token_ids"):  # nothing was said
            return
        task = asyncio.create_task(self._measure(engine, choice, loaded))
        self._shadows.add(task)
        task.add_done_callback(self._shadows.discard)

    async def _measure(self, engine: str, choice: dict[str, Any], loaded: Loaded) -> None:
        """The same tokens on the engine's own cache: both lists of the likeliest tokens are posted
        to /feedback, and the service's breaker learns what its answer was worth."""
        spoken = choice["token_ids"]
        asked = {
            "model": engine,
            "prompt": choice["prompt_token_ids"] + spoken,
            "max_tokens": 1,
            "prompt_logprobs": SHADOW_TOP,
        }
        try:
            url = self._config.engines[engine].url + "/v1/completions"
            native = (await self._http.post(url, json=asked)).raise_for_status().json()
            await self._kvt.feedback(
                loaded.receipt,
                native=[_ranked(at) for at in native["choices"][0]["prompt_logprobs"]][
                    -len(spoken) :
                ],
                translated=[_listed(at) for at in choice["logprobs"]["top_logprobs"]],
            )
        except (httpx.HTTPError, NotTranslated):
            self._feedback.labels(engine, "lost").inc()
        else:
            self._feedback.labels(engine, "posted").inc()

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"router_{name}", text, ["engine", "outcome"], registry=self.registry)

    async def aclose(self) -> None:
        """Let measurements end, then close."""
        await asyncio.gather(*self._shadows, return_exceptions=True)
        await self._kvt.aclose()
        await self._http.aclose()


def _said(**params: Any) -> dict[str, Any]:
    given = {name: value for name, value in params.items() if value is not None}
    return {"kv_transfer_params": {"kvt": given}}


def _json(response: httpx.Response) -> Any:
    """Raises httpx.DecodingError."""
    try:
        return response.json()
    except ValueError as error:
        raise httpx.DecodingError("the engine's answer is not JSON") from error


def _answered(answer: Any) -> Answered:
    """What the connector adds to an answer; nothing where there is none, or another one."""
    try:
        found = (answer.get("kv_transfer_params") or {}).get("kvt") or {}
        return Answered.model_validate(found, strict=False)
    except (AttributeError, ValidationError):
        return Answered()


def _without_added(answer: Any, body: dict[str, Any]) -> Any:
    """The answer as it is for a client that has asked for ``body`` only."""
    if not isinstance(answer, dict):
        return answer
    kept = {name: value for name, value in answer.items() if name != "kv_transfer_params"}
    if isinstance(choices := kept.get("choices"), list):
        kept["choices"] = [_choice_without_added(choice, body) for choice in choices]
    return kept


def _choice_without_added(choice: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    added = set() if body.get("return_token_ids") else {"token_ids", "prompt_token_ids"}
    kept = {name: value for name, value in choice.items() if name not in added}
    if body.get("logprobs") is None and "logprobs" in kept:  # a field that is always there
        kept["logprobs"] = None
    return kept


def _hashed(session_id: str) -> str:
    return hashlib.sha256(session_id.encode()).hexdigest()[:32]


def _can_be_measured(path: str, body: dict[str, Any]) -> bool:
    """Only one prompt and one answer to it, and where the client has not asked for
    log-probabilities in a form of its own."""
    prompt = body.get("prompt")
    alone = isinstance(prompt, str) or (
        isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    )
    own = body.get("logprobs") is not None or body.get("return_tokens_as_token_ids")
    once = body.get("n", 1) == 1 and not body.get("echo")
    return path == "/v1/completions" and alone and once and not own


def _measurable() -> dict[str, Any]:
    return {
        "logprobs": SHADOW_TOP,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }


def _listed(at: dict[str, float]) -> list[tuple[int, float]]:
    """``{"token_id:17": -0.1, ...}``."""
    return [(int(name.removeprefix("token_id:")), value) for name, value in at.items()]


def _ranked(at: dict[str, Any] | None) -> list[tuple[int, float]]:
    """``{"17": {"logprob": -0.1, ...}, ...}``; the first token of a prompt has none."""
    return [(int(token), said["logprob"]) for token, said in (at or {}).items()]


def create_app(config: Config) -> FastAPI:
    """The proxy."""
    router = Router(config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await router.aclose()

    app = FastAPI(title="KV router", lifespan=lifespan)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def turn(request: Request) -> JSONResponse:
        body = await request.json()
        if body.get("stream"):
            raise HTTPException(400, "this example does not stream")
        session_id = request.headers.get("x-session-id")
        try:
            status, answer = await router.turn(request.url.path, body, session_id)
        except httpx.HTTPError as error:
            raise HTTPException(502, "the engine cannot be reached") from error
        return JSONResponse(answer, status)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(router.registry).decode())

    return app


def main() -> None:
    """``router.py CONFIG``."""
    config = Config.model_validate(yaml.safe_load(Path(sys.argv[1]).read_text()))
    uvicorn.run(create_app(config), host="127.0.0.1", port=config.port)


if __name__ == "__main__":
    main()
