"""How fast a mapper translates, beside yardsticks of the same machine: multiplies and prefill.

``gemm`` is the bare matrix multiplies: the same weights, shapes and floating point operations, over
inputs that lie ready in memory, into a ready output. ``prefill`` is the target's own by
transformers (sdpa, the last token's logits only), with random weights. ``copy`` moves as many
bytes as a translation reads and writes of both caches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mappers.bench_pairs import Pair, random_cache
from mappers.bench_profile import shares
from mappers.bench_rounds import Step, take_turns
from mappers.cache import KVCache
from mappers.content_memory import Layer
from mappers.translate import Translator


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tokens a second of one length, medians of one run; None: not measured.

    ``translate_shares`` says where a translation's time goes (``bench_profile.shares``).
    """

    tokens: int
    translate_tokens_per_second: float
    gemm_tokens_per_second: float
    prefill_tokens_per_second: float | None
    peer_tokens_per_second: float | None
    translate_over_gemm: float
    translate_over_prefill: float | None
    translate_over_copy: float
    translate_shares: dict[str, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Where and how a speed is measured; ``dtype`` of both caches; ``shares``: say where the time
    goes; ``least_seconds`` as ``take_turns`` has them."""

    device: str
    dtype: torch.dtype
    rounds: int
    least_seconds: float = 0.0
    shares: bool = False
    progress: Callable[[str], None] = lambda text: None


def measure(
    pair: Pair,
    translator: Translator,
    tokens: int,
    conditions: Conditions,
    *,
    prefill: "Prefill | None" = None,
    peer: Callable[[KVCache], Step] | None = None,
) -> Speed:
    """One length of one mapper; what is left out is None in the result."""
    cache = random_cache(pair, tokens, conditions.dtype, conditions.device)
    answer = _answer(translator, tokens, conditions.dtype)
    steps: dict[str, Step] = {
        "translate": translation(translator, cache, answer),
        **multiplies(list(translator.weights()), tokens),
        "copy": _copies(cache, answer),
    }
    steps |= {"prefill": prefill.step(tokens)} if prefill else {}
    steps |= {"peer": peer(cache)} if peer else {}
    seconds = take_turns(
        steps,
        conditions.rounds,
        device=conditions.device,
        least_seconds=conditions.least_seconds,
        progress=conditions.progress,
    )
    if prefill:
        prefill.note(tokens, seconds["prefill"])
    gemm = min(spent for name, spent in seconds.items() if name.startswith("gemm"))
    spent = seconds["translate"]
    return Speed(
        tokens=tokens,
        translate_tokens_per_second=round(tokens / spent, 1),
        gemm_tokens_per_second=round(tokens / gemm, 1),
        prefill_tokens_per_second=_rate(tokens, seconds.get("prefill")),
        peer_tokens_per_second=_rate(tokens, seconds.get("peer")),
        translate_over_gemm=round(gemm / spent, 3),
        translate_over_prefill=round(seconds["prefill"] / spent, 2) if prefill else None,
        translate_over_copy=round(seconds["copy"] / spent, 3),
        translate_shares=(
            shares(steps["translate"], conditions.device) if conditions.shares else None
        ),
    )


def translation(translator: Translator, cache: KVCache, answer: list[Layer]) -> Step:
    """A whole cache, into memory that is there."""

    def step() -> None:
        for _ in translator.layers(cache, dtype=cache.dtype, answer=answer):
            pass

    return step


def multiplies(weights: list[Tensor], tokens: int) -> dict[str, Step]:
    """The products of a translation and nothing else, in two ways.

    One product a map and head group, or one batched product a map: which of them is faster depends
    on shapes and machine, and only the faster is a yardstick.
    """
    ready = {weight.shape: _ready(weight, tokens) for weight in weights}

    def single() -> None:
        for weight in weights:
            x, y = ready[weight.shape]
            for group in range(len(weight)):
                torch.mm(x[group], weight[group], out=y[group])

    def batched() -> None:
        for weight in weights:
            x, y = ready[weight.shape]
            torch.bmm(x, weight, out=y)

    return {"gemm single": single, "gemm batched": batched}


class Prefill:
    """The target's own prefill, with random weights: measured beside the first mapper of a length,
    and that figure taken for the next ones, for it costs more than all the rest."""

    def __init__(self, pair: Pair, device: str) -> None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            pair.target, attn_implementation="sdpa", dtype=dtype
        )
        self._model, self._device = model.eval().to(device), device
        self._vocabulary = pair.target.vocab_size
        self._seconds: dict[int, float] = {}

    def step(self, tokens: int) -> Step:
        """The prefill of a prompt of so many tokens."""
        if tokens in self._seconds:
            return lambda: self._seconds[tokens]
        ids = torch.randint(0, self._vocabulary, (1, tokens), device=self._device)

        def step() -> None:
            with torch.inference_mode():
                self._model(ids, use_cache=True, logits_to_keep=1)

        return step

    def note(self, tokens: int, seconds: float) -> None:
        """What was measured."""
        self._seconds[tokens] = seconds


def _ready(weight: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Inputs and outputs of a weight's product."""
    groups, inputs, outputs = weight.shape
    where: Any = {"device": weight.device, "dtype": weight.dtype}
    x = torch.empty(groups, tokens, inputs, **where).normal_()
    return x, torch.empty(groups, tokens, outputs, **where)


def _answer(translator: Translator, tokens: int, dtype: torch.dtype) -> list[Layer]:
    geometry = translator.geometry
    shape = (tokens, geometry.target_heads, geometry.target_dim)
    where: Any = {"dtype": dtype, "device": translator.device}
    layers = range(geometry.target_layers)
    return [(torch.empty(shape, **where), torch.empty(shape, **where)) for _ in layers]


def _copies(cache: KVCache, answer: list[Layer]) -> Step:
    """Read the source and write the answer once, nothing computed."""
    read, written = (*cache.keys, *cache.values), [t for layer in answer for t in layer]
    room = torch.empty_like(read[0])

    def step() -> None:
        for tensor in read:
            room.copy_(tensor)
        for tensor in written:
            tensor.fill_(0)

    return step


def _rate(tokens: int, seconds: float | None) -> float | None:
    return None if seconds is None else round(tokens / seconds, 1)
