"""What the connector counts: requests and tokens by what became of them."""

from collections import Counter
from typing import Literal, NamedTuple

Side = Literal["export", "load"]


class Kind(NamedTuple):
    """``outcome``: exported, loaded, or why not."""

    side: Side
    outcome: str


class Counters:
    """Since they were last taken."""

    def __init__(self) -> None:
        self._requests: Counter[Kind] = Counter()
        self._tokens: Counter[Kind] = Counter()

    def add(self, side: Side, outcome: str, tokens: int = 0) -> None:
        """One request; ``tokens`` that were copied for it."""
        self._requests[Kind(side, outcome)] += 1
        self._tokens[Kind(side, outcome)] += tokens

    def take(self) -> dict[str, tuple[int, int]]:
        """Requests and tokens by ``side outcome``, and begin anew."""
        taken = {" ".join(k): (n, self._tokens[k]) for k, n in self._requests.items()}
        self._requests, self._tokens = Counter(), Counter()
        return taken
