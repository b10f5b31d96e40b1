"""What a router and an engine say to each other, under ``kvt`` in vLLM's ``kv_transfer_params``.

To the source, with a request:  ``{"export": true}``. Its answer has a ``handle``.
To the target, with a request:  that ``handle``, the ``mapper`` of the plan, limits; and a
``cache_salt`` that names the same mapper, and how many translations its KV will have been through.
Its answer says what was ``loaded``, or ``refused``. Later requests to it under that salt meet those
blocks again.

They come from whoever can reach the engine, so nothing that they say may end it: what is not
understood is the same as nothing.
"""

import json
import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mappers.identity import IdentityClaim
from service.policy import Word
from service.schemas import BufferId, Receipt

KEY = "kvt"
SALT_PREFIX = "kvt-"
MAX_HOPS = 64
_SALT = re.compile(r"kvt-sha256:[0-9a-f]{64}-([1-9][0-9]?)(-.*)?", re.DOTALL)

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=1, le=1 << 24)]


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Handle(_Said):
    """A cache that an engine has put into a lease of the service.

    Keys and values ``[tokens, H, D]`` of each layer lie end to end from byte 0, all heads; from
    ``seal_offset`` on lies what proves whose it is (``service/vllm/seal.py``).
    """

    buffer: BufferId
    nbytes: int = Field(ge=1, le=1 << 40)
    tokens: Count
    seal_offset: int = Field(ge=0, le=1 << 40)
    ranks: int = Field(ge=1, le=1024)
    hops: int = Field(ge=0, le=MAX_HOPS)
    source: IdentityClaim


class Params(_Said):
    """Of one request. ``deadline_seconds`` can only shorten the connector's own waiting, for a
    translation or for a lease; ``replaces``: the lease of an older handle that nobody will use;
    ``keep``: leave that of ``handle`` for more translations, where it would be given back after the
    first."""

    export: bool = False
    replaces: BufferId | None = None
    keep: bool = False
    handle: Handle | None = None
    mapper: Digest | None = None
    max_kl: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_native_tail: int | None = Field(None, ge=0)
    domain: Word | None = None
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    reprefill_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    deadline_seconds: Annotated[float, Field(gt=0, le=600, allow_inf_nan=False)] | None = None

    @property
    def limits(self) -> dict[str, Any]:
        """Those that go into the request to the service as they are."""
        named = {"max_kl", "max_native_tail", "domain", "session_id", "reprefill_ms"}
        return self.model_dump(include=named, exclude_none=True)


class Loaded(_Said):
    """What an engine took from a translation: ``tokens`` of those that ``receipt`` covers."""

    tokens: int
    receipt: Receipt


class Refused(_Said):
    """Why a prompt was prefilled: a reason of the service, or of the connector."""

    reason: str


class Answered(_Said):
    """What an engine adds to its answer."""

    handle: Handle | None = None
    loaded: Loaded | None = None
    refused: Refused | None = None


def read_params(said: object) -> Params | None:
    """Those of a request; None when there are none. Raises ValueError for any that are not ours."""
    if not isinstance(said, dict) or KEY not in said:
        return None
    try:
        # As JSON, which is what it was: strict models take a list for a tuple only there.
        return Params.model_validate_json(json.dumps(said[KEY]))
    except (ValidationError, TypeError, RecursionError) as error:
        raise ValueError("kv_transfer_params.kvt is not valid") from error


def salt(mapper: str, hops: int, session: str = "") -> str:
    """A ``cache_salt`` that keeps what this mapper translates apart from every exact cache, and
    from what has been through another number of translations, this one included."""
    return f"{SALT_PREFIX}{mapper}-{hops}{'-' if session else ''}{session}"


def hops_of(cache_salt: str | None) -> int | None:
    """Translations that KV under this salt has been through; None when it should say so and does
    not, or when they are too many."""
    if cache_salt is None or not cache_salt.startswith(SALT_PREFIX):
        return 0
    found = _SALT.fullmatch(cache_salt)
    return int(found[1]) if found and int(found[1]) <= MAX_HOPS else None


def allows(cache_salt: str | None, mapper: str | None, hops: int) -> bool:
    """Whether KV of ``mapper`` may be loaded under this salt: it has to name it and the hops."""
    if mapper is None or cache_salt is None:
        return False
    own = salt(mapper, hops)
    return cache_salt == own or cache_salt.startswith(f"{own}-")
