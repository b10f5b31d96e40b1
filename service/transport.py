"""How a cache comes in and how its answer goes out: what the pipeline asks of either way.

``service/body_transport.py`` moves bytes over HTTP, ``service/buffer_transport.py`` reads and
writes shared memory; the order of a request (``service/pipeline.py``) is the same for both.
"""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple, Protocol

from starlette.responses import Response

from service.call import Judged
from service.guards import Claim
from service.schemas import ShadowRequest, TranslateRequest
from service.side import Side
from service.space import Space
from service.stream import Running


class Approved(NamedTuple):
    """An answer that may go out: nothing speaks against it any more.

    ``claim`` says what it has taken from the books; one that is not ``given`` after all, and to its
    end, gives that back.
    """

    judged: Judged
    running: Running
    claim: Claim
    shadow: ShadowRequest | None
    tail_token: str | None

    def given(self) -> None:
        """All of it has gone out: from now on it counts, and whoever has it may report on it."""
        self.claim.given = True


class Transport(Protocol):
    """One request's way in and out; made when its document has been read."""

    @property
    def request(self) -> TranslateRequest:
        """The request document."""
        ...

    def reserve(self, sent: list[Side], target: Side, held: AsyncExitStack) -> Space:
        """Check that the tensors are those of ``sent``, and hold the memory for them and for an
        answer as large as ``target``. Raises ``Problem``."""
        ...

    async def ingest(
        self, space: Space, milestones_bytes: Sequence[int], arrived: Callable[[int], None]
    ) -> None:
        """Have all of them in ``space.received``, and tell of each milestone that is reached.

        Raises ``Problem`` or ``ClientGone``.
        """
        ...

    async def answer(self, approved: Approved, held: AsyncExitStack) -> Response:
        """Hand the target's cache out while its later layers are computed."""
        ...
