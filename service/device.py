"""Where translations run, as the store needs to know it: weights go there, and how much fits."""

import mmap
from typing import Any, Protocol

import torch
from torch import Tensor

from mappers.artifact import matrix_elements
from mappers.manifest import Manifest
from mappers.mapper import Mapper
from mappers.pages import LARGE_BYTES
from mappers.translate import Translator

# cudaHostRegisterPortable: pinned for every context of the process.
_PORTABLE = 1


class Device(Protocol):
    """A place for translators; ``weight_bytes`` is the size of one weight there."""

    weight_bytes: int

    def translator(self, mapper: Mapper) -> Translator:
        """The mapper's weights, on the device when this returns; from any thread."""

    def free_bytes(self) -> int | None:
        """Memory that nobody uses, other processes included; None where there is no such bound."""

    def reclaim(self) -> None:
        """Give memory that was freed back to the device."""

    def pin(self, address: int, nbytes: int) -> None:
        """Have copies from and to this host memory done by DMA. Raises OSError."""

    def unpin(self, address: int) -> None:
        """Before the memory goes."""


class Cpu:
    """The device is the host: weights that need no conversion stay where they are."""

    weight_bytes = 4

    def translator(self, mapper: Mapper) -> Translator:
        """Float32 weights."""
        return Translator(mapper)

    def free_bytes(self) -> int | None:
        """The host's memory is bounded by its budget alone."""
        return None

    def reclaim(self) -> None:
        """The allocator of the host needs no word."""

    def pin(self, address: int, nbytes: int) -> None:
        """The device reads host memory as it is."""

    def unpin(self, address: int) -> None:
        """Nothing was done."""


class Cuda:
    """One GPU, which other processes may share."""

    weight_bytes = 2

    def __init__(self, name: str) -> None:
        self._device = torch.device(name)
        self._stream: torch.cuda.Stream | None = None

    def translator(self, mapper: Mapper) -> Translator:
        """Bfloat16 weights, copied on a stream of their own: translations go on meanwhile."""
        self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            translator = Translator(mapper, device=self._device)
        self._stream.synchronize()
        return translator

    def free_bytes(self) -> int | None:
        """As the driver sees it; what torch keeps for reuse counts as used until ``reclaim``."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def reclaim(self) -> None:
        """Empty torch's cache of freed blocks."""
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()

    def pin(self, address: int, nbytes: int) -> None:
        """Page-locked, for as long as it is registered."""
        register = torch.cuda.cudart().cudaHostRegister  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            _check(register(address, nbytes, _PORTABLE))

    def unpin(self, address: int) -> None:
        """Waits for copies under way."""
        unregister = torch.cuda.cudart().cudaHostUnregister  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            unregister(address)


def _check(code: Any) -> None:
    if int(code) != 0:
        raise OSError(f"host memory cannot be registered with the device: CUDA error {int(code)}")


def device_of(name: str) -> Device:
    """The device that the settings name."""
    return Cpu() if name == "cpu" else Cuda(name)


class Pinned:
    """A mapper's large weights in host memory, registered with the device for as long as this
    lives. Raises OSError when they cannot be."""

    def __init__(self, mapper: Mapper, device: Device) -> None:
        self._mapper, self._device, self._addresses = mapper, device, list[int]()
        for begin, end in _regions(mapper):
            if end - begin >= LARGE_BYTES:  # what is smaller may share a page with another's
                device.pin(begin, end - begin)
                self._addresses.append(begin)

    def __del__(self) -> None:
        for address in self._addresses:
            self._device.unpin(address)


def _regions(mapper: Mapper) -> list[tuple[int, int]]:
    """Where weights and biases lie: one region for a file, since no page can be pinned twice."""
    tensors = [t for _, affine in mapper.affine_maps() for t in (affine.weight, affine.bias)]
    found: list[tuple[int, int]] = []
    for begin, end in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors):
        if found and begin - found[-1][1] < mmap.PAGESIZE:
            begin, end = found[-1][0], max(found.pop()[1], end)
        found.append((begin, end))
    return found


def declared_bytes(manifest: Manifest, device: Device) -> int:
    """At most what a translator of the manifest's mapper will occupy."""
    stored = {"float32": 4, "bfloat16": 2}[manifest.weights_dtype]
    return manifest.weight_bytes + matrix_elements(manifest) * (device.weight_bytes - stored)


def bytes_there(mapper: Mapper, device: Device) -> int:
    """At most what a translator of this mapper occupies: weights converted, the rest as it is."""
    weights = sum(affine.weight.numel() for _, affine in mapper.affine_maps())
    stored = sum(affine.weight.nbytes for _, affine in mapper.affine_maps())
    return mapper.nbytes - stored + weights * device.weight_bytes


def bytes_beside(translator: Translator, mapper: Mapper) -> int:
    """What a translator occupies beside the mapper's own tensors, which it may use as they are."""
    shared = {_memory(affine.weight) for _, affine in mapper.affine_maps()}
    return sum(t.nbytes for t in translator.tensors() if _memory(t) not in shared)


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
