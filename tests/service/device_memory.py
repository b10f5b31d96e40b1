"""A device whose memory is ours: a pool that can be exported and opened without a GPU."""

import secrets
from typing import Any

import numpy as np
import torch
from torch import Tensor

from service.device_pool import Export
from service.memfd import BadMemory

DIRT = 0xA5


class FakePool:
    """Full of what others have left; it counts how often somebody waited for the device."""

    opened: dict[str, Tensor] = {}

    def __init__(self, nbytes: int) -> None:
        self.data = torch.full((nbytes,), DIRT, dtype=torch.uint8)
        self.waited = 0
        self._handle = secrets.token_hex(64)
        self.opened[self._handle] = self.data

    def export(self, offset: int, nbytes: int) -> Export:
        return Export(
            device_uuid="fa4e",
            handle=self._handle,
            pool_bytes=self.data.nbytes,
            offset=offset,
            nbytes=nbytes,
        )

    def wait(self) -> None:
        self.waited += 1


class _Owner:
    """As the CUDA array interface has it: a tensor over it keeps it, and it keeps the page."""

    def __init__(self, data: Tensor, keep: object) -> None:
        self.keep = keep
        self.__array_interface__: dict[str, Any] = {
            "shape": (data.nbytes,),
            "typestr": "|u1",
            "data": (data.data_ptr(), False),
            "version": 3,
        }


def open_slice(export: Export, keep: object) -> Tensor:
    """The client's end of any FakePool."""
    if export.handle not in FakePool.opened:
        raise BadMemory("no such pool")
    part = FakePool.opened[export.handle][export.offset : export.offset + export.nbytes]
    return torch.from_numpy(np.asarray(_Owner(part, keep)))
