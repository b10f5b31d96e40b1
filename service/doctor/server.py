"""Whether the service answers, is ready, is the version that this client was made for, and takes
the layouts that a deployment uses."""

from collections.abc import Sequence

from service.client import Client, NotTranslated
from service.commands.exits import Code
from service.doctor.findings import Finding, fail, ok, warn
from service.health import current_version
from service.schemas import Info


def check_reachable(client: Client) -> tuple[Finding, Info | None]:
    """What the service says of itself; None where nothing more can be asked."""
    try:
        info = client.info()
    except NotTranslated as error:
        change = "start it (kvt serve), or name where it listens (--url)"
        return fail("service", Code.SERVER, str(error), change), None
    said = f"{info.name} {info.version}, device {info.device}, torch {info.torch}"
    return ok("service", said), info


def check_ready(client: Client) -> Finding:
    """``/readyz``."""
    try:
        mappers = client.health().mappers
    except NotTranslated as error:
        change = "wait until its mappers are loaded; those that failed are listed below"
        found = f"requests are not taken yet: it answers {error.outcome.status}"
        return fail("ready", Code.SERVER, found, change)
    return ok("ready", f"{sum(s == 'ready' for s in mappers.values())} of {len(mappers)} mappers")


def check_version(info: Info) -> Finding:
    """Client and service speak the same version of the interface."""
    ours = current_version()
    if info.version == ours:
        return ok("version", f"client and service are both {ours}")
    found = f"the service is {info.version}, this client {ours}"
    return warn("version", found, "install one version on both sides")


def check_layouts(info: Info, layouts: Sequence[str]) -> list[Finding]:
    """Those that a deployment declares, against those that the service reads."""
    unknown = [name for name in layouts if name not in info.layouts]
    if unknown:
        change = f"declare one of {', '.join(info.layouts)}; a layout is never guessed"
        return [fail("layout", Code.USAGE, f"not known: {', '.join(unknown)}", change)]
    return [ok("layout", f"known: {', '.join(layouts)}")] if layouts else []
