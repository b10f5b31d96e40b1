"""Timing of several ways to do a thing: they take turns, round after round, and medians count.

What else the machine does then meets all of them alike, so that their ratios hold where their
seconds do not.
"""

import time
from collections.abc import Callable, Mapping
from itertools import count
from statistics import median

import torch

Step = Callable[[], float | None]
"""Does the work once; what measures itself (another process) returns its seconds."""


def take_turns(
    steps: Mapping[str, Step],
    rounds: int,
    *,
    device: str = "cpu",
    least_seconds: float = 0.0,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, float]:
    """Median seconds of each step over ``rounds``, after one round that does not count.

    There are more rounds until ``least_seconds`` have passed: what takes milliseconds would else be
    measured in a moment, which may be a bad one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    until = time.perf_counter() + least_seconds
    for turn in count():
        if turn > rounds and time.perf_counter() >= until:
            break
        for name, step in steps.items():
            progress(f"{name}, round {turn} of {rounds}")
            elapsed = _timed(step, device)
            if turn:
                seconds[name].append(elapsed)
    progress("")
    return {name: median(values) for name, values in seconds.items()}


def _timed(step: Step, device: str) -> float:
    started = time.perf_counter()
    own_seconds = step()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started if own_seconds is None else own_seconds
