"""The order of the checks: what must hold first comes first, and what hangs on it is left out."""

from typing import NamedTuple

from service.client import Client, NotTranslated
from service.commands.exits import Code
from service.doctor import server, vllm
from service.doctor.findings import Finding, fail
from service.doctor.mappers import check_mappers
from service.doctor.packages import check_packages
from service.doctor.plans import check_plans
from service.doctor.sharing import check_buffers
from service.schemas import Info, MapperInfo


class Asked(NamedTuple):
    """What the command line says of a deployment."""

    url: str
    source: str | None = None
    target: str | None = None
    layouts: tuple[str, ...] = ()
    socket: str | None = None
    vllm_config: str | None = None
    vllm_version: str | None = None
    cache_salt: str | None = None


def examine(asked: Asked) -> list[Finding]:
    """Every finding, in the order of the checks. Raises OSError for a file that is not there."""
    found = [check_packages()]
    with Client(asked.url) as client:
        reachable, info = server.check_reachable(client)
        found.append(reachable)
        mappers: list[MapperInfo] = []
        if info is not None:
            of_service, mappers = _of_service(client, info, asked)
            found += of_service
    return [*found, *_of_engine(asked, mappers)]


def _of_service(client: Client, info: Info, asked: Asked) -> tuple[list[Finding], list[MapperInfo]]:
    found = [server.check_version(info), server.check_ready(client)]
    try:
        of_mappers, serving = check_mappers(client, (asked.source, asked.target))
    except NotTranslated as error:
        change = "look at its log"
        return [*found, fail("mappers", Code.SERVER, str(error), change)], []
    plans = [check_plans(client, mapper) for mapper in serving if mapper.state == "ready"]
    layouts = server.check_layouts(info, asked.layouts)
    buffers = check_buffers(asked.url, info, asked.socket)
    return [*found, *of_mappers, *plans, *layouts, buffers], serving


def _of_engine(asked: Asked, mappers: list[MapperInfo]) -> list[Finding]:
    found = vllm.check_engine_version(asked.vllm_version)
    if asked.vllm_config is not None:
        found += vllm.check_config(asked.vllm_config, asked.url, mappers)
    if asked.vllm_config is not None or asked.cache_salt is not None:
        found += [vllm.check_salt(asked.cache_salt, mapper) for mapper in mappers]
    return found
