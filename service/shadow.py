"""Which answers a caller is asked to measure, and the token that lets it report.

The choice is a keyed hash of the answer's id: the same answer is always chosen alike, and without
the secret nobody can tell beforehand which one will be. Ids are made by the service, never taken
from a caller.
"""

import hashlib
import hmac
from ipaddress import IPv6Address, ip_address

# An IPv6 network of this size is one customer's: its addresses are one client.
IPV6_CLIENT_BITS = 64
_CLIENT_CHARS = 16


class Shadow:
    """Keyed with the secret of the state file, so that it outlives the process."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def chosen(self, answer_id: str, rate: float) -> bool:
        """Whether the answer belongs to the share ``rate`` of all answers that is measured."""
        return int.from_bytes(self._mac("sample", answer_id)[:8]) < rate * 2**64

    def token(self, answer_id: str) -> str:
        """Proof of having been given this answer."""
        return self._mac("token", answer_id).hex()

    def genuine(self, answer_id: str, token: str) -> bool:
        """In constant time."""
        return hmac.compare_digest(self.token(answer_id).encode(), token.encode())

    def client(self, address: str | None) -> str:
        """A client's name for our books: no address is kept. None: a Unix socket."""
        return self._mac("client", _network(address))[: _CLIENT_CHARS // 2].hex()

    def session(self, session_id: str) -> bytes:
        """A session's name for our books."""
        return self._mac("session", session_id)

    def _mac(self, use: str, text: str) -> bytes:
        # No use contains a colon, so no two uses can meet.
        return hmac.digest(self._secret, f"{use}:{text}".encode(), hashlib.sha256)


def _network(address: str | None) -> str:
    try:
        parsed = ip_address(address or "")
    except ValueError:
        return "local"
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return str(int(parsed) >> (128 - IPV6_CLIENT_BITS))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
