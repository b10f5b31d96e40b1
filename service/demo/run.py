"""The demonstration from start to end."""

from pathlib import Path

import torch
from rich.console import Console

from mappers import hf_compat
from mappers.arms import CONTINUATION_TOKENS
from service.client import Client
from service.demo.family import directions
from service.demo.family import prompts as held_out
from service.demo.measure import measure
from service.demo.process import ServerProcess
from service.demo.show import show
from service.hf import request_for
from service.upload import Upload


def run(console: Console, family: Path, *, tokens: int, prompts: int) -> bool:
    """Serve, translate, compare and show; whether every direction came out good."""
    with console.status("loading the two models"):
        ways = directions(family)
        texts = [held_out(family, way, tokens=tokens, count=prompts) for way in ways]
    with (
        console.status("starting the server process") as status,
        ServerProcess([family / "artifacts"]) as server,
        Client(server.url) as client,
    ):
        console.print(f"server process ready at {server.url}", highlight=False)
        results = []
        for way, ids in zip(ways, texts, strict=True):
            status.update(f"translating {way.label}")
            results.append(measure(client, server.url, way, ids))
    show(console, results)
    return all(result.good for result in results)


def write(family: Path, file: Path, tokens: int) -> None:
    """Write one request for the first direction, as ``POST /translate`` takes it."""
    way = directions(family)[0]
    whole = held_out(family, way, tokens=tokens, count=1)[0]
    ids = whole[None, : len(whole) - CONTINUATION_TOKENS]
    _, cache = hf_compat.read(way.source.model, ids, logits_at=torch.tensor([0]))
    sent, request = request_for(
        cache, source=way.source.identity, target=way.target.identity, prompt_ids=ids
    )
    with file.open("wb") as out:
        out.writelines(Upload.of(sent, request))
