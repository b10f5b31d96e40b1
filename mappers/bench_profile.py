"""Where the time of a translation goes, by kind of operation."""

from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from mappers.bench_rounds import Step

KINDS = {
    "multiply": ("mm", "bmm", "addmm", "baddbmm"),
    "rotate": ("mul", "addcmul_"),
    "move": ("copy_", "add", "add_", "fill_", "cat"),
    "check": ("sum", "isfinite"),
}
_KIND_OF = {f"aten::{name}": kind for kind, names in KINDS.items() for name in names}


def shares(step: Step, device: str) -> dict[str, float]:
    """What part of its time a step spends in each of ``KINDS`` of PyTorch's operations, and in
    ``other``: views, allocations, kernels of our own. On a GPU the time of its kernels.

    The first run of a profiler prepares it and does not count. PyTorch says on stderr that it runs.
    """
    on_cpu = device == "cpu"
    activity = ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA
    for _ in range(2):
        with profile(activities=[activity]) as profiler:
            step()
            if not on_cpu:
                torch.cuda.synchronize(device)
    spent: Counter[str] = Counter()
    for event in profiler.key_averages():
        own = event.self_cpu_time_total if on_cpu else event.self_device_time_total
        spent[_KIND_OF.get(event.key, "other")] += round(own)
    total = max(1, spent.total())
    return {kind: round(spent[kind] / total, 3) for kind in (*KINDS, "other")}
