"""Requests to the engines of the stack, as a router makes them, and what comes back."""

import time
from dataclasses import dataclass
from typing import Any

from mappers.identity import IdentityClaim
from mappers.layouts import Layout
from service.client import Client
from service.schemas import Plan, TranslateRequest
from service.vllm.params import Answered, Handle, salt
from tests.vllm.stack import Process, Stack
from tests.vllm.waiting import until

DOMAIN = "in_domain"
TOP = 20
Ranked = list[tuple[int, float]]


@dataclass(frozen=True)
class Answer:
    """One completion: text, token ids, for each the likeliest, what the connector said, seconds."""

    text: str
    ids: list[int]
    top: list[Ranked]
    said: Answered
    seconds: float


def complete(engine: Process, prompt: list[int], *, tokens: int = 8, **more: Any) -> Answer:
    """Greedy. Fails for any other status than 200."""
    began = time.monotonic()
    headers = more.pop("headers", {})
    asked = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": TOP,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }
    response = engine.http.post("/v1/completions", json=asked | more, headers=headers)
    assert response.status_code == 200, response.text
    body = response.json()
    (choice,) = body["choices"]
    assert len(choice["token_ids"]) == tokens
    said = (body["kv_transfer_params"] or {}).get("kvt", {})
    return Answer(
        text=choice["text"],
        ids=choice["token_ids"],
        top=[_ranked(at) for at in choice["logprobs"]["top_logprobs"]],
        said=Answered.model_validate(said, strict=False),
        seconds=time.monotonic() - began,
    )


def export(engine: Process, prompt: list[int], *, tokens: int = 1, **more: Any) -> Handle:
    """Have a prompt read, and its KV put into a lease."""
    asked = {"kv_transfer_params": {"kvt": {"export": True}}}
    handle = complete(engine, prompt, tokens=tokens, **(asked | more)).said.handle
    assert handle is not None
    return handle


def load(engine: Process, prompt: list[int], handle: Handle, mapper: str, **more: Any) -> Answer:
    """Have a prompt answered over what the handle leads to."""
    params = {
        "handle": handle.model_dump(mode="json", exclude_none=True),
        "mapper": mapper,
        "domain": DOMAIN,
        **more.pop("params", {}),
    }
    # A salt of its own, so that no test meets what another has loaded.
    own = salt(mapper, handle.hops + 1, handle.buffer)
    asked = {"cache_salt": own, "kv_transfer_params": {"kvt": params}}
    return complete(engine, prompt, **(asked | more))


def plan(stack: Stack, handle: Handle, target: str) -> Plan:
    """The service's, for a move to that model."""
    with Client(stack.translator.url) as client:
        sides = (mapper.target for mapper in client.mappers().mappers)
        found = next(side for side in sides if side is not None and side.model == target)
        request = TranslateRequest(
            source=handle.source,
            target=IdentityClaim(
                model=found.model,
                version=found.version,
                dtype="float32",
                rope_theta=found.rope_theta,
            ),
            tokens=handle.tokens,
            layout=Layout.NHD,
            domain=DOMAIN,
            hops=handle.hops,
        )
        return client.plan(request)


def counted(engine: Process, name: str, value: float) -> float:
    """A counter, once it has this value or more; engines report a moment after they answer."""
    until(lambda: engine.metric(name) >= value, f"{name} is {value}")
    return engine.metric(name)


def _ranked(at: dict[str, float]) -> Ranked:
    return [(int(name.removeprefix("token_id:")), value) for name, value in at.items()]
