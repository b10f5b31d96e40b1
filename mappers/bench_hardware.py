"""What a benchmark ran on, in words, and how much memory is there for it."""

import contextlib
import os
import platform
import re
from pathlib import Path

import torch

from mappers.errors import TooLittleMemory


def hardware(device: str) -> str:
    """``AMD EPYC ..., 2 cores, 1 thread`` or a GPU's name, with torch's version."""
    threads = torch.get_num_threads()
    if device != "cpu":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    cores = os.cpu_count()
    used = f"{threads} thread" if threads == 1 else f"{threads} threads"
    return f"{_processor()}, {cores} cores, {used}, torch {torch.__version__}"


def free_bytes(device: str) -> int | None:
    """Memory that could be taken now without others having to give any; None: not known."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    return _kib(Path("/proc/meminfo"), "MemAvailable")


def check_room(needed_bytes: int, device: str, what: str) -> None:
    """TooLittleMemory unless so much is free."""
    free = free_bytes(device)
    if free is not None and needed_bytes > free:
        raise TooLittleMemory(what, needed_bytes, free)


def peak_bytes() -> int | None:
    """The most memory of this process since ``forget_peak``; None: the system does not say."""
    return _kib(Path("/proc/self/status"), "VmHWM")


def forget_peak() -> None:
    """Let ``peak_bytes`` begin again at what is resident now, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def own_bytes(pid: int) -> int:
    """What a process has now that it does not share. Raises OSError: the system does not say."""
    own = _kib(Path(f"/proc/{pid}/status"), "RssAnon")
    if own is None:
        raise OSError("this system does not say what memory a process has")
    return own


def resident_bytes() -> int | None:
    """What this process has now."""
    return _kib(Path("/proc/self/status"), "VmRSS")


def _kib(file: Path, name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", file.read_text(), re.M) if file.exists() else None
    return int(found[1]) * 1024 if found else None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()
