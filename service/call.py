"""What the pipeline carries from step to step."""

from dataclasses import dataclass

from service.body import Body
from service.deadline import Deadline
from service.entry import Entry
from service.gate import Ruling
from service.guards import Standing
from service.ledger import Ledger
from service.schemas import TranslateRequest
from service.state import Service


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request to /translate; ``declared_bytes`` is its Content-Length.

    ``client`` is what our books call the caller; the request's id is the answer's as well.
    ``named_mapper`` is the only mapper that the caller would have.
    """

    service: Service
    body: Body
    declared_bytes: int | None
    request_id: str
    client: str
    ledger: Ledger
    deadline: Deadline
    named_mapper: str | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """A call whose pair is known and on which the cheap gate has ruled."""

    call: Call
    entry: Entry
    request: TranslateRequest
    standing: Standing
    ruling: Ruling
