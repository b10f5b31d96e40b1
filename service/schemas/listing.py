"""What the service says of its mappers, of itself, and of its health."""

from typing import Literal

from pydantic import BaseModel, Field

from mappers.quantize import ScaleScheme


class SideInfo(BaseModel):
    """One side of a pair; the identity's fields that a request must or may repeat."""

    model: str
    version: str
    rope_theta: float
    rope_type: str
    dtype: str
    kv_dtype: str
    kv_scales: ScaleScheme = "none"
    kv_zero_points: bool = False
    num_layers: int
    num_kv_heads: int
    head_dim: int


class BreakerInfo(BaseModel):
    """The sequential test of one kind of request; only those with feedback are listed."""

    domain: str
    max_tokens: int = Field(description="The longest prompts of its length bucket.")
    state: Literal["closed", "open", "half_open"]
    e_value: float = Field(description="Evidence that it is too bad; opens at 1 / delta.")
    close_e_value: float = Field(description="Evidence that it is good again, when half-open.")
    samples: int = Field(description="KLs counted since it last opened or closed.")
    violations: int
    clients: int = Field(description="Clients that these came from, as far as remembered.")
    opened_seconds_ago: float | None


class MapperInfo(BaseModel):
    """A mapper that the service knows, and the state it is in."""

    id: str
    state: Literal["ready", "unloaded", "failed"]
    residency: Literal["disk", "host", "device"] = Field(
        description="Where the weights are; what is on the device is in host memory as well."
    )
    digest: str | None
    recipe: str | None
    source: SideInfo | None
    target: SideInfo | None
    resident_bytes: int = Field(description="Host memory of weights, prefixes and profile.")
    device_bytes: int = Field(description="Memory of the weights as they are applied.")
    load_seconds: float | None = Field(description="What the last load took.")
    evidence_rows: int
    certified_tokens: list[int] = Field(description="Prompt lengths that were measured.")
    probe_tokens: int = Field(0, description="Tokens of a probe; 0: it takes none.")
    error: str | None = Field(description="Why it could not be loaded.")
    why_not_servable: str | None = Field(
        None, description="Why every request is told to re-prefill; none: some are not."
    )
    breakers: list[BreakerInfo] = Field(default_factory=list)


class MapperList(BaseModel):
    """All mappers, in the order in which they were configured."""

    mappers: list[MapperInfo]


class Info(BaseModel):
    """What this process is and which limits it applies."""

    name: str
    version: str
    device: str
    torch: str
    mappers: list[str]
    max_kl: float
    alpha: float
    delta: float
    buffers: bool = Field(False, description="Whether shared memory can be leased.")
    queue_requests: int
    queue_seconds: float = Field(description="Longest predicted wait for the device.")
    max_body_bytes: int
    max_header_bytes: int
    max_inflight_bytes: int
    layouts: list[str]
    dtypes: list[str]
    reasons: list[str]


class Health(BaseModel):
    """``ok`` or why not."""

    status: Literal["ok", "starting", "draining", "no_mapper"]
    mappers: dict[str, str] = Field(default_factory=dict)
