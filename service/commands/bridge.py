"""``kvt bridge``: translate between two models' caches in an LMCache server or SGLang's folders."""

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import ValidationError

from service.commands.exits import Code, Failure, fault_of
from service.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from service.bridge.carry import Bridge, Carried, Kept
    from service.client import Client
    from service.schemas import SideInfo

    Sides = tuple[SideInfo, SideInfo]

_URL = f"http://127.0.0.1:{Settings.model_fields['port'].default}"
Source = Annotated[str, typer.Option(help="MODEL or MODEL@VERSION that has the caches.")]
Target = Annotated[str, typer.Option(help="MODEL or MODEL@VERSION that is to have them.")]
Url = Annotated[str, typer.Option(help="This service.")]

bridge = typer.Typer(
    name="bridge",
    help="Carry translated caches between places that other projects keep caches in.",
    no_args_is_help=True,
)


@bridge.command()
def lmcache(
    source: Source,
    target: Target,
    url: Url = _URL,
    lmcache_url: Annotated[
        str, typer.Option(help="LMCache's request port; the scheme says ZMQ or gRPC.")
    ] = "tcp://127.0.0.1:5555",
    lmcache_http_url: Annotated[
        str, typer.Option(help="LMCache's HTTP port.")
    ] = "http://127.0.0.1:8081",
    source_name: Annotated[
        str | None, typer.Option(help="What LMCache calls the source (default: MODEL).")
    ] = None,
    target_name: Annotated[
        str | None, typer.Option(help="What LMCache calls the target (default: MODEL).")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="For each call of LMCache.")] = 10.0,
) -> None:
    """Read prompts from standard input, a JSON object a line, and answer each with one.

    {"token_ids": [...], "source_salt": "", "session": "s1", "max_kl": 0.05} retrieves the source's
    chunks, has them translated, and stores them as the target's under a salt that names the mapper.
    The answer is {"decision": "translate", "tokens": n, "cache_salt": ...}: what the request to the
    target's engine has to carry; or "reprefill", with a reason.

    Needs an environment that has LMCache as well; models on one rank, plain 16- or 32-bit caches.
    """
    from service.bridge.chunks import connect
    from service.client import Client

    with ExitStack() as open_:
        client = open_.enter_context(Client(url))
        sides = _sides(client, source, target)
        ends = [
            open_.enter_context(
                closing(connect(lmcache_url, lmcache_http_url, name or side.model, side, seconds))
            )
            for name, side in zip((source_name, target_name), sides, strict=True)
        ]
        _answer(client, sides, ends)


@bridge.command()
def sglang(
    source: Source,
    target: Target,
    source_pages: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The source's folder of pages.")
    ],
    target_pages: Annotated[Path, typer.Option(exists=True, file_okay=False, help="The target's.")],
    page_tokens: Annotated[int, typer.Option(min=1, help="--page-size of both engines.")],
    url: Url = _URL,
    layout: Annotated[
        Literal["layer_first", "page_first"], typer.Option(help="--hicache-mem-layout of both.")
    ] = "layer_first",
    source_name: Annotated[
        str | None, typer.Option(help="The source's --served-model-name (default: MODEL).")
    ] = None,
    target_name: Annotated[
        str | None, typer.Option(help="The target's --served-model-name (default: MODEL).")
    ] = None,
) -> None:
    """The same between two folders of SGLang's `file` backend (HiCache).

    Prompts and answers are those of `kvt bridge lmcache`. The request to the target's engine has to
    carry the answer's cache_salt.
    """
    from service.bridge.pages import Pages
    from service.client import Client

    with Client(url) as client:
        sides = _sides(client, source, target)
        folders, names = (source_pages, target_pages), (source_name, target_name)
        ends = [
            Pages(folder, name or side.model, side, page_tokens=page_tokens, layout=layout)
            for folder, name, side in zip(folders, names, sides, strict=True)
        ]
        _answer(client, sides, ends)


def _answer(client: "Client", sides: "Sides", ends: "Sequence[Kept]") -> None:
    """A line for each line, also for one that is no job."""
    from service.bridge.carry import Bridge
    from service.listed import claims_of

    over = Bridge(client, claims_of(sides), ends[0], ends[1])
    for line in sys.stdin.buffer:
        typer.echo(_answered(over, line).model_dump_json(exclude_none=True))
        sys.stdout.flush()


def _answered(over: "Bridge", line: bytes) -> "Carried":
    from service.bridge.carry import Job, not_carried

    try:
        job = Job.model_validate_json(line)
    except ValidationError as error:
        return not_carried("invalid_job", fault_of(error))
    return over.carry(job)


def _sides(client: "Client", source: str, target: str) -> "Sides":
    """Of the only mapper of the pair. Raises Failure, KVTranslatorError."""
    from service.client import NotTranslated
    from service.listed import sides_between

    try:
        listed = client.mappers().mappers
    except NotTranslated as error:
        raise Failure(Code.SERVER, str(error)) from error
    return sides_between(listed, source, target)
