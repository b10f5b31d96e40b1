"""Content-Digest (RFC 9530): whether a request's body arrived as it was sent.

What the header says is compared with a digest of the bytes that came, taken while they stream in. A
caller that sends none is not asked for one; algorithms that we do not know are passed over, as the
RFC says, and of those that we know all must agree.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from typing import Self

from service.errors import Problem

ALGORITHMS = {"sha-256": hashlib.sha256, "sha-512": hashlib.sha512}
_KEY = r"[a-z*][a-z0-9_.*-]*"
# A member of a dictionary of structured fields (RFC 9651): a byte sequence, parameters after it.
_MEMBER = re.compile(rf"({_KEY})=:([A-Za-z0-9+/=]*):(?:; *{_KEY}(?:=[^;,\"]+)?)*")


class ContentDigest:
    """What a body's digests must be, by algorithm, and what they are so far."""

    def __init__(self, expected: Mapping[str, bytes]) -> None:
        known = {name: digest for name, digest in expected.items() if name in ALGORITHMS}
        self._expected = known
        self._running = {name: ALGORITHMS[name]() for name in known}

    @classmethod
    def of_header(cls, lines: Iterable[str]) -> Self:
        """From the field's lines, if there are any. Raises ``Problem`` when it is malformed."""
        members = [m for line in lines if line.strip() for m in line.split(",")]
        return cls(dict(_parsed(member.strip(" \t")) for member in members))

    def update(self, part: bytes | memoryview) -> None:
        """Take in what follows of the body."""
        for running in self._running.values():
            running.update(part)

    def check(self) -> None:
        """Call it when the body has ended. Raises ``Problem`` when it is not what was sent."""
        for name, running in self._running.items():
            if not hmac.compare_digest(running.digest(), self._expected[name]):
                raise Problem("digest_mismatch", f"the body's {name} is not that of Content-Digest")


def content_digest(parts: Iterable[bytes]) -> str:
    """The header's value for a body that consists of these parts."""
    running = hashlib.sha256()
    for part in parts:
        running.update(part)
    return f"sha-256=:{base64.b64encode(running.digest()).decode()}:"


def _parsed(member: str) -> tuple[str, bytes]:
    found = _MEMBER.fullmatch(member)
    if found is None:
        raise _malformed()
    name = found[1]
    try:
        digest = base64.b64decode(found[2], validate=True)
    except binascii.Error as error:
        raise _malformed() from error
    if name in ALGORITHMS and len(digest) != ALGORITHMS[name]().digest_size:
        raise _malformed()
    return name, digest


def _malformed() -> Problem:
    return Problem("bad_request", "Content-Digest is not a dictionary of digests (RFC 9530)")
