"""Whether this process can have shared memory of the service: a lease is taken, mapped and given
back."""

from service.doctor.findings import Finding, ok, warn
from service.schemas import Info
from service.vllm.errors import NotLoaded
from service.vllm.link import Link

_TRIED_BYTES = 4096
_TIMEOUT_SECONDS = 10.0


def check_buffers(url: str, info: Info, socket: str | None) -> Finding:
    """Without buffers a cache travels in the body of a request, and no engine can load it."""
    if not info.buffers:
        change = "kvt serve --buffers SOCKET, on this host or in a volume that both see"
        return warn("buffers", "switched off: caches travel in HTTP bodies", change)
    link = Link(url, _TIMEOUT_SECONDS, socket)
    try:
        link.release(link.lease(_TRIED_BYTES))
    except NotLoaded as error:
        change = "mount the socket here (--socket says where), as the same user or in buffer_uids"
        return warn("buffers", f"not to be had here: {error.reason}: {error}", change)
    finally:
        link.close()
    return ok("buffers", "a lease was mapped here and given back")
