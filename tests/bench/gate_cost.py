"""What the content gate costs beside the translation that it guards: one line a pair and length.

Side by side in one process: in every round the translation, the scan and the comparison, one after
the other; the medians are compared. ``scan_ratio``: every element is read for what is not finite
and for the largest values; whoever trusts its caches could do without it, the translation would
then find a NaN by itself. ``gate_ratio``: the score and the comparison with the profile.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from mappers.bench_pairs import PAIRS, random_cache, random_mapper
from mappers.cache import KVCache
from mappers.mapper import Mapper
from mappers.profile import CalibrationProfile
from mappers.profile_fit import ProfileBuilder
from mappers.sample import largest
from mappers.translate import Translator
from tests.bench.gate_data import Family

LARGE = "qwen3-0.6b:qwen3-1.7b"
RECIPES = (("full_head", 4), ("head_local", 8))
LARGE_TOKENS = 4096
DEMO_TOKENS = (128, 512, 2048)
TEXTS, TEXT_TOKENS = 12, 128
GIB = 1 << 30
Line = dict[str, Any]


def cost_lines(family: Family, *, rounds: int) -> Iterator[Line]:
    """The embedded pair, a large geometry with random weights, and a digest of a body."""
    for tokens in DEMO_TOKENS:
        cache = random_cache(PAIRS["demo"], tokens, torch.float32, "cpu")
        name = f"embedded, {family.artifact.mapper.recipe}"
        yield _compared(name, family.artifact.mapper, family.artifact.profile, cache, rounds)
    pair = PAIRS[LARGE]
    profile = _random_profile()
    cache = random_cache(pair, LARGE_TOKENS, torch.bfloat16, "cpu")
    for recipe, k in RECIPES:
        mapper = random_mapper(pair, recipe=recipe, k=k)
        yield _compared(f"{LARGE}, {recipe} k={k}", mapper, profile, cache, rounds)
    yield {"digest": "sha-256", "seconds_per_gib": round(_digest_seconds(rounds), 3)}


def _compared(
    name: str, mapper: Mapper, profile: CalibrationProfile | None, cache: KVCache, rounds: int
) -> Line:
    if profile is None:
        raise ValueError("the artifact has no profile")
    translator, peaks = Translator(mapper), largest(cache)
    dtype = torch.bfloat16 if cache.dtype is torch.bfloat16 else torch.float32
    steps: dict[str, Callable[[], object]] = {
        "translate": lambda: translator.translate(cache, dtype=dtype),
        "scan": lambda: largest(cache),
        "gate": partial(
            profile.examine,
            cache,
            mapper.source,
            skip_positions=mapper.skipped_positions,
            peaks=peaks,
        ),
    }
    taken = _medians(steps, rounds)
    return {
        "pair": name,
        "tokens": cache.tokens,
        "translate_ms": _ms(taken["translate"]),
        "scan_ms": _ms(taken["scan"]),
        "gate_ms": _ms(taken["gate"]),
        "scan_ratio": round(taken["scan"] / taken["translate"], 4),
        "gate_ratio": round(taken["gate"] / taken["translate"], 4),
        "threads": torch.get_num_threads(),
    }


def _medians(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each step; the first round is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - started)
    return {name: median(seconds[1:]) for name, seconds in taken.items()}


def _random_profile() -> CalibrationProfile | None:
    """Of the large geometry's source; what it costs does not depend on its numbers."""
    source, _ = PAIRS[LARGE].identities()
    builder = ProfileBuilder(source, windows=TEXTS, skip_positions=0)
    for seed in range(TEXTS):
        ids = torch.randint(1000, (TEXT_TOKENS,), generator=torch.Generator().manual_seed(seed))
        builder.add(ids, random_cache(PAIRS[LARGE], TEXT_TOKENS, torch.bfloat16, "cpu"))
    return builder.profile()


def _digest_seconds(rounds: int) -> float:
    """What Content-Digest costs for one GiB, in chunks as they come from a socket."""
    chunk, count = bytes(1 << 16), (GIB >> 16) // 16
    steps = {"digest": partial(_digest, chunk, count)}
    return 16 * _medians(steps, rounds)["digest"]


def _digest(chunk: bytes, count: int) -> bytes:
    running = hashlib.sha256()
    for _ in range(count):
        running.update(chunk)
    return running.digest()


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
