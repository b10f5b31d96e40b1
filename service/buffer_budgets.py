"""What leases may cost: bytes of each kind, for a client and in all, and their number.

A lease that has ended counts for as long as its client maps the memory.
"""

import math
import resource
from collections.abc import Collection, Mapping

from service.allocators import Kind
from service.device_pool import HOLDERS
from service.errors import Problem
from service.lease import Lease
from service.memfd import DESCRIPTORS

LEASES_A_CLIENT = 64
_DESCRIPTORS: dict[Kind, int] = {"host": DESCRIPTORS, "cuda": DESCRIPTORS + HOLDERS}


class Budgets:
    """``limits`` are bytes of each kind, of which a client has at most ``client_bytes``."""

    def __init__(self, limits: Mapping[Kind, int], client_bytes: int) -> None:
        self._limits, self._client_bytes = limits, client_bytes

    def check(self, asked: Lease, leases: Collection[Lease], now: float) -> None:
        """Raise ``Problem`` 413, 429 or 507 where ``asked`` is too much beside the others."""
        kind, limit = asked.kind, self._limits[asked.kind]
        share = min(self._client_bytes, limit)
        if asked.cost_bytes > share:
            raise Problem(
                "buffer_too_large",
                f"a client has {share} bytes of {kind} buffers, this one would take "
                f"{asked.cost_bytes}",
            )
        mine = [lease for lease in leases if lease.client == asked.client]
        said = f"a client has at most {LEASES_A_CLIENT} buffers"
        _check(len(mine) < LEASES_A_CLIENT, "buffer_budget", said, mine, now)
        most = most_descriptors()
        said = f"the descriptors for buffers, {most}, are taken"
        needed = sum(_DESCRIPTORS[lease.kind] for lease in (asked, *leases))
        _check(needed <= most, "out_of_memory", said, leases, now)

        def fits(holders: Collection[Lease], nbytes: int) -> bool:
            taken = sum(lease.cost_bytes for lease in holders if lease.kind == kind)
            return taken + asked.cost_bytes <= nbytes

        said = f"a client has at most {share} bytes of {kind} buffers"
        _check(fits(mine, share), "buffer_budget", said, mine, now)
        said = f"the memory for {kind} buffers, {limit} bytes, is taken"
        _check(fits(leases, limit), "out_of_memory", said, leases, now)


def most_descriptors() -> int:
    """Half of those that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft // 2


def _check(enough: bool, code: str, detail: str, holders: Collection[Lease], now: float) -> None:
    if not enough:
        raise Problem(code, detail, retry_after_seconds=_first_end(holders, now))


def _first_end(holders: Collection[Lease], now: float) -> int:
    """Seconds until one of them may be free, if nobody uses it again; 1 where all have ended: of
    these only their clients know when they let go."""
    first = min((lease.expires_seconds for lease in holders if not lease.ended), default=now)
    return max(1, math.ceil(first - now))
