"""Who is served behind which breaker: whether a client's report decides for others as well."""

from collections import OrderedDict

from service.breaker import MAX_CLIENTS, Key
from service.state_file import MAX_BREAKERS


class Audience:
    """The latest clients of each breaker; those not seen for ``seconds`` are gone."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: OrderedDict[Key, OrderedDict[str, float]] = OrderedDict()

    def note(self, key: Key, client: str, now: float) -> None:
        """This client has been given an answer."""
        clients = self._seen.setdefault(key, OrderedDict())
        clients[client] = now
        clients.move_to_end(client)
        self._seen.move_to_end(key)
        while len(clients) > MAX_CLIENTS:
            clients.popitem(last=False)
        while len(self._seen) > MAX_BREAKERS:
            self._seen.popitem(last=False)

    def others(self, key: Key, client: str, now: float) -> int:
        """How many others are served here. Safe from another thread than ``note``'s."""
        seen = tuple(self._seen.get(key, {}).items())
        return sum(c != client and now - at <= self._seconds for c, at in seen)
