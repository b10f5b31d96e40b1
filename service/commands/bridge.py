"""``kvt bridge lmcache``: translate between two models' caches in an LMCache server."""

import sys
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from service.commands.exits import Code, Failure, fault_of
from service.settings import Settings

if TYPE_CHECKING:
    from service.client import Client
    from service.schemas import MapperInfo

_PORT = Settings.model_fields["port"].default

bridge = typer.Typer(
    name="bridge",
    help="Carry translated caches between places that other projects keep caches in.",
    no_args_is_help=True,
)


@bridge.callback()
def _group() -> None:
    """A group, although it has one command."""


@bridge.command()
def lmcache(
    source: Annotated[str, typer.Option(help="MODEL or MODEL@VERSION that has the caches.")],
    target: Annotated[str, typer.Option(help="MODEL or MODEL@VERSION that is to have them.")],
    url: Annotated[str, typer.Option(help="This service.")] = f"http://127.0.0.1:{_PORT}",
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
    from service.bridge.carry import Bridge, Job
    from service.bridge.chunks import connect
    from service.client import Client
    from service.listed import claim_of_listed

    with ExitStack() as open_:
        client = open_.enter_context(Client(url))
        mapper = _mapper(client, source, target)
        claims = claim_of_listed(mapper.source), claim_of_listed(mapper.target)
        if claims[0] is None or claims[1] is None or not (mapper.source and mapper.target):
            raise Failure(Code.IDENTITY, "models with a scaled rope cannot be named this way")
        ends = [
            open_.enter_context(
                closing(connect(lmcache_url, lmcache_http_url, name or side.model, side, seconds))
            )
            for name, side in ((source_name, mapper.source), (target_name, mapper.target))
        ]
        over = Bridge(client, (claims[0], claims[1]), *ends)
        for line in sys.stdin:
            try:
                job = Job.model_validate_json(line)
            except ValidationError as error:
                raise Failure(Code.DATA, fault_of(error)) from error
            typer.echo(over.carry(job).model_dump_json(exclude_none=True))
            sys.stdout.flush()


def _mapper(client: "Client", source: str, target: str) -> "MapperInfo":
    """The only mapper of the pair. Raises Failure."""
    from service.client import NotTranslated
    from service.listed import is_between

    try:
        listed = client.mappers().mappers
    except NotTranslated as error:
        raise Failure(Code.SERVER, str(error)) from error
    found = [mapper for mapper in listed if is_between(mapper, (source, target))]
    if len(found) != 1:
        raise Failure(Code.IDENTITY, f"{len(found)} mappers for {source} -> {target}")
    return found[0]
