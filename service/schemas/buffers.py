"""The documents about leases of shared memory, and a request whose caches lie in two of them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mappers.identity import IdentityClaim
from service.schemas.request import TranslateRequest

BufferId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", description="Id of a lease.")]


class LeasedClaim(IdentityClaim):
    """One side of a pair whose cache lies in a buffer."""

    buffer: BufferId


class BufferRequest(TranslateRequest):
    """A request whose caches lie in two buffers of the caller, and not in a body.

    The source's tensors, and after them a probe's, lie end to end from byte 0: layer by layer, keys
    then values, after them the layer's scales and zero points (of keys, then of values, each). The
    target's are written likewise.
    """

    source: LeasedClaim
    target: LeasedClaim


class BufferAsk(BaseModel):
    """What to lease."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    nbytes: int = Field(ge=1, le=1 << 40, description="Bytes of data.")
    kind: Literal["host", "cuda"] = "host"


class BufferInfo(BaseModel):
    """A lease. Its memory comes over the Unix socket ``socket``: connect (SOCK_SEQPACKET), send the
    ``id``, receive ``ok`` and one descriptor of ``file_bytes`` bytes, and map it. Of kind ``cuda``
    the file has no data, and after ``ok`` a JSON document says what to open by CUDA IPC."""

    model_config = ConfigDict(frozen=True)

    id: BufferId
    kind: Literal["host", "cuda"] = "host"
    nbytes: int
    file_bytes: int = Field(description="Size of the file: the data, if it is there, and a page.")
    progress_offset: int = Field(
        description="Where two little-endian u64 say how many target layers are ready (2^64 - 1: "
        "refused or failed) and how many tokens each has."
    )
    expires_seconds: float = Field(description="Until it ends, if nobody uses it.")
    ttl_seconds: float = Field(description="The same, after each use.")
    in_use: bool
    socket: str
