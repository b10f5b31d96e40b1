"""Places of half-open breakers: how many answers may be out whose KL has not come yet.

Each known client has an equal share of them, so one that takes places and never reports keeps
nobody else from trying. What a client took while it was alone it keeps, but it counts as its share
only; so a newcomer finds a place at once.
"""

from collections import Counter
from typing import NamedTuple

from service.breaker import Key


class Taken(NamedTuple):
    """One place; free again after ``until_seconds`` (since 1970) if nobody gives it back."""

    client: str
    until_seconds: float


class Probes:
    """The places that are taken, by breaker and answer id."""

    def __init__(self) -> None:
        self._taken: dict[Key, dict[str, Taken]] = {}

    def free(self, key: Key, client: str, now: float, *, places: int, clients: int) -> bool:
        """Whether this client may have one more of ``places``, which ``clients`` share."""
        counts = Counter(taken.client for taken in self._waiting(key, now).values())
        share = max(1, places // clients)
        return counts[client] < share and sum(min(n, share) for n in counts.values()) < places

    def take(self, key: Key, answer_id: str, client: str, until_seconds: float) -> None:
        """The answer waits for its KL."""
        self._taken.setdefault(key, {})[answer_id] = Taken(client, until_seconds)

    def give_back(self, key: Key, answer_id: str) -> None:
        """It waits no longer, if it did."""
        self._taken.get(key, {}).pop(answer_id, None)

    def _waiting(self, key: Key, now: float) -> dict[str, Taken]:
        waiting = self._taken.get(key, {})
        for answer_id in [a for a, taken in waiting.items() if taken.until_seconds < now]:
            del waiting[answer_id]
        return waiting
