"""The KV of one model in a folder of SGLang's ``file`` backend (HiCacheFile of 0.5.23).

Each file is a page of tokens, numbers and nothing else. Its name is a hash of all tokens up to its
end and of the request's ``cache_salt``, then the model and the rank: so pages under a salt are
never found by a request that has another, or none. The hash is SHA-256 over the hash of the page
before and the page's token ids as little-endian uint32; before the first page is the salt's seed.
"""

import contextlib
import hashlib
import os
import struct
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mappers.cache import DTYPES, KVCache, consecutive
from mappers.errors import KVTranslatorError, LayoutError
from service.schemas import SideInfo

PageLayout = Literal["layer_first", "page_first"]
_NAMESPACE = b"sglang-cache-namespace-v1"
_ABSENT, _PRESENT = b"\x00", b"\x01"


class PagesError(KVTranslatorError):
    """The folder, or a page in it, cannot be read or written."""

    code = "pages_error"


class Pages:
    """Of a model that runs on one rank; ``layout`` is what ``--hicache-mem-layout`` says.

    A page is ``[2, L, P, H, D]`` (layer_first, and page_first_direct) or ``[2, P, L, H, D]``
    (page_first): P tokens, keys then values, keys as cached.
    """

    def __init__(
        self, folder: Path, name: str, side: SideInfo, *, page_tokens: int, layout: PageLayout
    ) -> None:
        if side.kv_scales != "none":
            raise LayoutError("a page has no place for the scales of an 8-bit cache")
        self._folder, self._side, self._layout = folder, side, layout
        self._suffix = f"_{name.replace('/', '-')}_0_1.bin"
        self.chunk_tokens = page_tokens

    def read(self, token_ids: Sequence[int], salt: str) -> KVCache | None:
        """What is there of the first of these tokens; None for less than a page. Raises
        LayoutError for a page of another size than the model's, PagesError."""
        pages: list[Tensor] = []
        for digest in page_hashes(token_ids, salt, self.chunk_tokens):
            try:
                raw = bytearray((self._folder / f"{digest}{self._suffix}").read_bytes())
            except FileNotFoundError:
                break
            except OSError as error:
                raise PagesError(f"a page cannot be read: {type(error).__name__}") from error
            pages.append(self._page(raw))
        if not pages:
            return None
        keys, values = torch.cat(pages, dim=2)
        return KVCache(tuple(keys), tuple(values), consecutive(keys.shape[1]))

    def write(self, cache: KVCache, token_ids: Sequence[int], salt: str) -> None:
        """Whole pages, each complete before its name is there. Raises PagesError."""
        states = torch.stack((torch.stack(cache.keys), torch.stack(cache.values)))
        for index, digest in enumerate(page_hashes(token_ids, salt, self.chunk_tokens)):
            start = index * self.chunk_tokens
            page = states[:, :, start : start + self.chunk_tokens]
            ordered = page.transpose(1, 2) if self._layout == "page_first" else page
            raw = ordered.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            write_whole(self._folder / f"{digest}{self._suffix}", raw)

    def _page(self, raw: bytearray) -> Tensor:
        """``[2, L, P, H, D]``."""
        side, dtype = self._side, DTYPES[self._side.kv_dtype]
        inner = (side.num_kv_heads, side.head_dim)
        shape = (2, side.num_layers, self.chunk_tokens, *inner)
        if len(raw) != torch.Size(shape).numel() * dtype.itemsize:
            raise LayoutError(f"a page has {len(raw)} bytes: expected {dtype} {list(shape)}")
        numbers = torch.frombuffer(raw, dtype=dtype)
        if self._layout == "page_first":
            return numbers.view(2, self.chunk_tokens, side.num_layers, *inner).transpose(1, 2)
        return numbers.view(shape)


def write_whole(path: Path, raw: bytes) -> None:
    """A file that is complete before its name is there. Raises PagesError."""
    part = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        part.write_bytes(raw)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise PagesError(f"a file cannot be written: {type(error).__name__}") from error


def page_hashes(token_ids: Sequence[int], salt: str, page_tokens: int) -> list[str]:
    """The hashes of the whole pages of these tokens."""
    whole = len(token_ids) - len(token_ids) % page_tokens
    found, before = list[str](), _seed(salt)
    for start in range(0, whole, page_tokens):
        page = struct.pack(f"<{page_tokens}I", *token_ids[start : start + page_tokens])
        before = hashlib.sha256(before + page).digest()
        found.append(before.hex())
    return found


def _seed(salt: str) -> bytes:
    """Of a request with this ``cache_salt`` and no other key of its own."""
    if not salt:
        return b""
    encoded = salt.encode()
    length = struct.pack("<Q", len(encoded))
    return hashlib.sha256(_NAMESPACE + _ABSENT + _PRESENT + length + encoded).digest()
