"""The documents of the HTTP interface, as they are read and as they are answered."""

from service.schemas.answers import (
    REASONS,
    BufferReceipt,
    Certified,
    Decision,
    Plan,
    ProblemBody,
    Receipt,
    Reprefill,
    ShadowRequest,
    TensorPlace,
)
from service.schemas.buffers import (
    BufferAsk,
    BufferId,
    BufferInfo,
    BufferRequest,
    LeasedClaim,
)
from service.schemas.listing import (
    BreakerInfo,
    Health,
    Info,
    MapperInfo,
    MapperList,
    SideInfo,
)
from service.schemas.reading import (
    MAX_DEPTH,
    MAX_DOCUMENT_CHARS,
    read_document,
    read_request,
)
from service.schemas.request import (
    Probe,
    TokenSample,
    TranslateRequest,
)

__all__ = [
    "BreakerInfo",
    "BufferAsk",
    "BufferId",
    "BufferInfo",
    "BufferReceipt",
    "BufferRequest",
    "Certified",
    "Decision",
    "Health",
    "Info",
    "LeasedClaim",
    "MAX_DEPTH",
    "MAX_DOCUMENT_CHARS",
    "MapperInfo",
    "MapperList",
    "Plan",
    "Probe",
    "ProblemBody",
    "REASONS",
    "Receipt",
    "Reprefill",
    "ShadowRequest",
    "SideInfo",
    "TensorPlace",
    "TokenSample",
    "TranslateRequest",
    "read_document",
    "read_request",
]
