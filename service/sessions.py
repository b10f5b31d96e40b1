"""How far each conversation may have drifted: the certified KLs of its answers, added up.

By the chain rule the divergence of a conversation's text is the sum over its turns, so turns that
are each good enough are not so together. Sessions are known by a keyed hash only.
"""

from collections import OrderedDict
from typing import NamedTuple


class _Account(NamedTuple):
    spent: float
    used_seconds: float


class Sessions:
    """Of one process, bounded in number and age; the longest unused is forgotten first."""

    def __init__(self, *, most: int, idle_seconds: float) -> None:
        self._most, self._idle_seconds = most, idle_seconds
        self._accounts: OrderedDict[bytes, _Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self._accounts)

    def spent(self, session: bytes, now: float) -> float:
        """Nats a token, added over the session's answers; 0 for one that is not known."""
        account = self._accounts.get(session)
        if account is None or now - account.used_seconds > self._idle_seconds:
            return 0.0
        return account.spent

    def charge(self, session: bytes, kl: float, now: float) -> None:
        """Add an answer."""
        spent = self.spent(session, now) + kl
        self._accounts[session] = _Account(spent, now)
        self._accounts.move_to_end(session)
        self._forget(now)

    def refund(self, session: bytes, kl: float) -> None:
        """Take an answer back that was not given after all."""
        account = self._accounts.get(session)
        if account is not None:
            self._accounts[session] = account._replace(spent=max(0.0, account.spent - kl))

    def _forget(self, now: float) -> None:
        while self._accounts:
            oldest = next(iter(self._accounts.values()))
            idle = now - oldest.used_seconds > self._idle_seconds
            if not idle and len(self._accounts) <= self._most:
                return
            self._accounts.popitem(last=False)
