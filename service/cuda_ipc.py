"""A pool of GPU memory that other processes can open: CUDA IPC, through the driver's own functions.

The pool is allocated past torch's caching allocator: that may use virtual memory (expandable
segments), which IPC cannot export, and would place other tensors into what is exported. Functions
and the 64-byte handle: CUDA driver API, "Memory Management".
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from mappers.errors import KVTranslatorError
from service.device_pool import Export
from service.memfd import BadMemory

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class CudaError(KVTranslatorError):
    """The driver is not there, or refuses."""

    code = "cuda_error"


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class _Owner:
    """Device memory as tensors see it (CUDA array interface); closed when the last one is gone."""

    def __init__(self, pointer: int, nbytes: int, close: str, keep: object = None) -> None:
        self._pointer, self._close, self._keep = pointer, close, keep
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }

    def __del__(self) -> None:
        # Its result is of no use any more: what cannot be closed ends with the process.
        getattr(_driver(), self._close)(ctypes.c_uint64(self._pointer))


class CudaPool:
    """``nbytes`` of one GPU (``service.device_pool.Pool``). Raises CudaError."""

    def __init__(self, device: str, nbytes: int) -> None:
        self._device = torch.device(device)
        self._uuid = _uuid(self._device)
        self._handle, pointer = _Handle(), ctypes.c_uint64()
        with _context(self._device):
            _check(_driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes)))
            owner = _Owner(pointer.value, nbytes, "cuMemFree_v2")
            _check(_driver().cuIpcGetMemHandle(ctypes.byref(self._handle), pointer))
            self.data: Tensor = torch.as_tensor(owner, device=self._device)

    def export(self, offset: int, nbytes: int) -> Export:
        """The pool is an allocation of its own, so offsets count from its beginning."""
        return Export(
            device_uuid=self._uuid,
            handle=bytes(self._handle.bytes).hex(),
            pool_bytes=self.data.nbytes,
            offset=offset,
            nbytes=nbytes,
        )

    def wait(self) -> None:
        """Until all streams are idle."""
        torch.cuda.synchronize(self._device)


def open_slice(export: Export, keep: object) -> Tensor:
    """A slice of another process's pool, uint8 ``[nbytes]``; ``keep`` lives as long as its views.

    Raises BadMemory where there is no such GPU, or the driver refuses. A process cannot open its
    own pool.
    """
    devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    device = next((d for d in devices if _uuid(d) == export.device_uuid), None)
    if device is None:
        raise BadMemory("the GPU of the lease is not visible to this process")
    handle = _Handle.from_buffer_copy(bytes.fromhex(export.handle))
    pointer = ctypes.c_uint64()
    try:
        with _context(device):
            opened = _driver().cuIpcOpenMemHandle_v2(
                ctypes.byref(pointer), handle, ctypes.c_uint(_LAZY_PEER_ACCESS)
            )
            _check(opened)
            owner = _Owner(pointer.value, export.pool_bytes, "cuIpcCloseMemHandle", keep)
            pool = torch.as_tensor(owner, device=device)
    except CudaError as error:
        raise BadMemory(f"the lease cannot be opened: {error}") from error
    return pool[export.offset : export.offset + export.nbytes]


def _context(device: torch.device) -> torch.cuda.device:
    """The device's primary context, current in this thread, which the driver's functions need."""
    torch.cuda.synchronize(device)
    return torch.cuda.device(device)


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid).lower()


def _check(code: int) -> None:
    if code != 0:
        raise CudaError(f"memory for buffers: the CUDA driver answers {code}")


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError("memory for buffers: there is no CUDA driver") from error
    driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
    return driver
