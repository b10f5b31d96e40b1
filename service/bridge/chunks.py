"""The KV of one model in an LMCache server, through LMCache's SDK (``lmcache.sdk``, 0.5.6).

LMCache keeps whole chunks of tokens, ``[2, L, T, H D]`` (keys then values, keys as cached), under a
model's name and a salt. Its SDK serves a model that runs on one rank, once its engine has
registered the layout. It is imported where it is needed: its requirements are not ours.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import httpx
from torch import Tensor

from mappers.cache import DTYPES, KVCache, consecutive
from mappers.errors import KVTranslatorError, LayoutError
from mappers.layouts import Geometry, Layout, read, write
from service.schemas import SideInfo


class BridgeError(KVTranslatorError):
    """LMCache cannot be used for this model, or has failed."""

    code = "lmcache_error"


class Context(Protocol):
    """What is used of ``lmcache.sdk.context.LMCacheSDKContext``."""

    @property
    def chunk_size(self) -> int:
        """Tokens of a chunk."""
        ...

    def retrieve(self, tokens: Sequence[int], cache_salt: str = "") -> Tensor | None:
        """The chunks that these tokens begin with."""
        ...

    def store(self, kv: Tensor, tokens: Sequence[int], cache_salt: str = "") -> bool:
        """Whether these chunks were taken."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class Chunks:
    """``side`` says what the model's cache looks like; ``context`` is connected to its name."""

    def __init__(self, context: Context, side: SideInfo) -> None:
        self._context, self._side = context, side

    @property
    def chunk_tokens(self) -> int:
        """Only multiples of it are kept."""
        return self._context.chunk_size

    def read(self, token_ids: Sequence[int], salt: str) -> KVCache | None:
        """What is kept of the first of these tokens; None for less than a chunk. Raises
        BridgeError, LayoutError."""
        kv = self._failing(self._context.retrieve, list(token_ids), cache_salt=salt)
        if kv is None:
            return None
        if kv.ndim != 4:
            raise LayoutError(f"LMCache gave {list(kv.shape)}, expected [2, layers, tokens, width]")
        tokens = kv.shape[2]
        return read(Layout.LMCACHE, {"kv": kv}, self._geometry(tokens), consecutive(tokens))

    def write(self, cache: KVCache, token_ids: Sequence[int], salt: str) -> None:
        """Keep the cache of these tokens, whole chunks; it is read back and compared, because
        LMCache has been seen to show what it had failed to store. Raises BridgeError."""
        kv = write(Layout.LMCACHE, cache)["kv"]
        self._failing(self._context.store, kv, list(token_ids), cache_salt=salt)
        kept = self._failing(self._context.retrieve, list(token_ids), cache_salt=salt)
        if kept is None or kept.shape != kv.shape or not bool((kept == kv).all()):
            raise BridgeError("LMCache does not give back what was stored")

    def close(self) -> None:
        """Close the connections."""
        self._context.close()

    def _geometry(self, tokens: int) -> Geometry:
        return Geometry(self._side.num_layers, tokens, self._side.num_kv_heads, self._side.head_dim)

    def _failing(self, call: Any, *arguments: Any, **more: Any) -> Any:
        try:
            return call(*arguments, **more)
        except RuntimeError as error:  # of which LMCache's own are
            raise BridgeError(f"LMCache failed: {type(error).__name__}") from error


def connect(url: str, http_url: str, name: str, side: SideInfo, timeout_seconds: float) -> Chunks:
    """Connect to a server (ZMQ or gRPC, and its HTTP port) for the model that it calls ``name``.

    Raises BridgeError when LMCache is not installed or not there, and when the layout that the
    engine has registered is not that of ``side``.
    """
    try:
        from lmcache import sdk
    except ImportError as error:
        raise BridgeError(
            "lmcache is not installed here; it needs an environment of its own, with this package"
        ) from error
    check_registered(_registered(http_url, name, timeout_seconds), side)
    try:
        context = sdk.connect(sdk.LMCacheSDKCacheKind.KV, url, http_url, name, timeout_seconds)
    except RuntimeError as error:
        raise BridgeError(f"LMCache takes no connection: {type(error).__name__}") from error
    return Chunks(context, side)


def check_registered(layout: dict[str, Any], side: SideInfo) -> None:
    """Raise BridgeError unless an entry of ``/status`` is of one rank and of this model's cache.

    A wrong dtype would be read as other numbers, and nothing would say so.
    """
    if side.kv_scales != "none" or side.kv_dtype not in DTYPES:
        raise BridgeError("LMCache has no place for the scales of an 8-bit cache")
    dtype = DTYPES[side.kv_dtype]
    token_bytes = 2 * side.num_layers * side.num_kv_heads * side.head_dim * dtype.itemsize
    kv = layout.get("kv_cache_layout", {})
    groups = kv.get("kernel_groups", [])
    stated = {
        "ranks": (layout.get("world_size"), 1),
        "groups of layers": (len(groups), 1),
        "layers": (kv.get("num_layers"), side.num_layers),
        "bytes a token": (kv.get("cache_size_per_token"), token_bytes),
        "dtype": (groups[0].get("dtype") if groups else None, str(dtype)),
    }
    for what, (found, expected) in stated.items():
        if found != expected:
            raise BridgeError(f"{what}: the engine has registered {found}, expected {expected}")


def _registered(http_url: str, name: str, timeout_seconds: float) -> dict[str, Any]:
    """What the engine of this model has registered."""
    try:
        response = httpx.get(f"{http_url}/status", timeout=timeout_seconds)
        entries = response.raise_for_status().json().get("cache_context_meta", {})
        found = [each for each in entries.values() if each.get("model_name") == name]
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        raise BridgeError(f"LMCache's /status is not to be had: {type(error).__name__}") from error
    if not found:
        raise BridgeError("no engine has registered a layout for that model")
    return dict(found[0])
