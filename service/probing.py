"""A probe in a request: the target's own KV of the first tokens, which shows how good the rest is.

It is checked like any other cache, compared with the translation (``mappers/probe.py``), and then
takes its place: it is exact. A mapper without the queries that judge a probe refuses it rather than
to ignore it: the caller has paid for a sharper answer, and can see at ``/mappers`` who gives one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mappers.probe import PROBE_TOKENS, ProbeQueries
from service.entry import Entry
from service.errors import Problem
from service.gate import Ruling
from service.schemas import TranslateRequest
from service.side import Side


@dataclass(frozen=True, slots=True)
class Probing:
    """A probe's form on the wire, what judges it, and the gate that rules on its error."""

    side: Side
    queries: ProbeQueries
    rule: Callable[[float], Ruling]


def check_probe(entry: Entry, request: TranslateRequest) -> None:
    """Whether a probe, if one is announced, can be used at all. Raises ``Problem`` 422."""
    if request.probe is None:
        return
    given, start = request.probe.tokens, request.start_position
    if given != PROBE_TOKENS:
        raise _unusable(f"measured were probes of {PROBE_TOKENS} tokens, this one has {given}")
    if start:
        raise _unusable(f"a probe begins at position 0, the cache that is sent at {start}")
    if given > request.tokens - 1:
        raise _unusable(f"a probe of {given} tokens leaves none of {request.tokens} to translate")
    queries_of(entry)


def queries_of(entry: Entry) -> ProbeQueries:
    """What judges a probe. Raises ``Problem`` 422 for a mapper that has no such queries."""
    queries = entry.loaded.probe_queries
    if queries is None:
        raise _unusable("this mapper was made without what judges a probe: send none")
    return queries


def probe_side(target: Side) -> Side:
    """A probe for an answer of this form: the target's geometry, dtype and layout."""
    return replace(target.with_tokens(PROBE_TOKENS), stem="probe")


def _unusable(detail: str) -> Problem:
    return Problem("bad_probe", detail)
