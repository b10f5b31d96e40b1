"""The router example between real servers: a conversation moves there and back."""

import re
from typing import Any

from tests.vllm import native
from tests.vllm.stack import Stack
from tests.vllm.waiting import until

Texts = list[list[int]]
TURNS = re.compile(r'router_turns_total\{engine="(\w+)",outcome="(\w+)"\} 1\.0')


def turn(stack: Stack, session: str, model: str, text: str) -> str:
    """One more answer of a conversation."""
    asked: dict[str, Any] = {"model": model, "prompt": text, "max_tokens": 16, "temperature": 0}
    headers = {"X-Session-Id": session}
    response = stack.router.http.post("/v1/completions", json=asked, headers=headers)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["model"] == model
    assert "kv_transfer_params" not in answer
    return str(answer["choices"][0]["text"])


def test_a_conversation_moves_there_and_back(
    stack: Stack, texts: Texts, figures: list[str]
) -> None:
    text = native.TOKENIZER.decode(texts[27][1:400])
    for model in ("small", "large", "small", "small"):
        text += turn(stack, "one", model, text)
    seen = stack.router.http.get("/metrics").text
    assert sorted(TURNS.findall(seen)) == [
        ("large", "loaded"),
        ("small", "first"),
        ("small", "loaded"),
        ("small", "stayed"),
    ]
    saved = stack.router.metric("router_loaded_tokens_total")
    figures.append(f"there and back by the router, {saved:.0f} prompt tokens were not prefilled")
    # Every answer of this translator is to be measured.
    until(
        lambda: stack.router.metric("router_feedback_total", outcome="posted") >= 2,
        "feedback is posted",
    )


def test_it_goes_on_without_the_translator(stack: Stack, texts: Texts) -> None:
    text = native.TOKENIZER.decode(texts[28][1:300])
    stack.translator.kill()
    turn(stack, "two", "small", text)
    answer = turn(stack, "two", "large", text)
    ids = native.TOKENIZER.encode(text).ids
    assert answer == native.continued(ids, 16)
    stack.translator.start()
    stack.translator.wait_ready()
