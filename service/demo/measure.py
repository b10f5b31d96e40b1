"""What a translation over HTTP is worth, for one prompt and for several."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from mappers import hf_compat
from mappers.arms import CONTINUATION_TOKENS, read_tail
from mappers.metrics import Measures, compare, context_recovered, gap_recovered
from mappers.models import LoadedModel
from service.client import Client, Outcome, Reprefill, Translated
from service.demo.family import Direction
from service.hf import cache_from, request_for

BARE_TAIL = 64
TEXT_TOKENS = 48
PREFILL_RUNS = 5


class Texts(NamedTuple):
    """The end of one prompt and three greedy continuations of it."""

    prompt: str
    native: str
    translated: str
    source: str


@dataclass(frozen=True)
class Reading:
    """One prompt: the answer, and each arm against the target's own predictions."""

    outcome: Outcome
    round_trip_ms: float
    native: Measures
    source: Measures
    no_context: Measures
    bare: Measures
    bare_same_tail: Measures | None
    translated: Measures | None


@dataclass(frozen=True)
class Result:
    """All prompts of one direction; times are medians, the rest are means."""

    direction: Direction
    readings: list[Reading]
    prompt_tokens: int
    prefill_ms: float
    server_ms: float
    texts: Texts

    @property
    def translated(self) -> list[Translated]:
        """The answers that hold a cache."""
        return [r.outcome for r in self.readings if isinstance(r.outcome, Translated)]

    @property
    def refused(self) -> list[Reprefill]:
        """The others."""
        return [r.outcome for r in self.readings if isinstance(r.outcome, Reprefill)]

    @property
    def round_trip_ms(self) -> float:
        """From the first byte sent to the last one read, by the client."""
        return statistics.median(r.round_trip_ms for r in self.readings)

    def mean(self, arm: str, measure: str = "kl") -> float:
        """Mean of a measure of an arm over the prompts that have it; NaN where none has."""
        arms = [getattr(r, arm) for r in self.readings]
        values = [float(getattr(a, measure)) for a in arms if a is not None]
        return statistics.fmean(values) if values else float("nan")

    @property
    def gap(self) -> float:
        """Gap recovered, of the mean NLLs."""
        return gap_recovered(*(self.mean(a, "nll") for a in ("source", "translated", "native")))

    @property
    def context(self) -> float:
        """Context recovered, of the mean KLs."""
        return context_recovered(self.mean("translated"), self.mean("no_context"))

    @property
    def good(self) -> bool:
        """Every prompt was translated, and better so than by reading only its end."""
        bare = [self.mean("bare"), self.mean("bare_same_tail")]
        return not self.refused and all(not self.mean("translated") >= kl for kl in bare)


def measure(client: Client, url: str, direction: Direction, prompts: Sequence[Tensor]) -> Result:
    """Translate and compare every prompt; the first also gives the texts and the prefill time."""
    tokens = len(prompts[0]) - CONTINUATION_TOKENS
    _read_prompt(client, direction, prompts[0])  # connection and kernels are warm after this
    before = _translate_seconds(url)
    readings = [_read_prompt(client, direction, ids) for ids in prompts]
    spent = _translate_seconds(url) - before
    return Result(
        direction=direction,
        readings=readings,
        prompt_tokens=tokens,
        prefill_ms=_prefill_ms(direction.target, prompts[0][:tokens]),
        server_ms=1000 * spent / len(prompts),
        texts=_texts(direction, readings[0].outcome, prompts[0][:tokens]),
    )


def _read_prompt(client: Client, direction: Direction, ids: Tensor) -> Reading:
    source, target = direction.source, direction.target
    tokens = len(ids) - CONTINUATION_TOKENS
    _, cache = hf_compat.read(source.model, ids[None, :tokens], logits_at=torch.tensor([0]))
    sent, request = request_for(
        cache, source=source.identity, target=target.identity, prompt_ids=ids[None, :tokens]
    )
    outcome, milliseconds = _timed(lambda: client.translate(sent, request))
    native = _whole(target, ids)
    following = ids[tokens:]

    def bare(tail: int) -> Measures:
        return compare(native, read_tail(target, [], ids, length=tokens, tail=tail)[0], following)

    translated = same_tail = None
    if isinstance(outcome, Translated):
        tail = outcome.receipt.native_tail
        logits = read_tail(target, [outcome.cache], ids, length=tokens, tail=tail)[0]
        translated, same_tail = compare(native, logits, following), bare(tail)
    return Reading(
        outcome=outcome,
        round_trip_ms=milliseconds,
        native=compare(native, native, following),
        source=compare(native, _whole(source, ids), following),
        no_context=bare(1),
        bare=bare(BARE_TAIL),
        bare_same_tail=same_tail,
        translated=translated,
    )


def _whole(model: LoadedModel, ids: Tensor) -> Tensor:
    """Logits [32, vocabulary] at the end of the prompt and over its continuation."""
    last = len(ids) - 1
    at = torch.arange(last - CONTINUATION_TOKENS, last)
    return hf_compat.read(model.model, ids[None, :last], logits_at=at)[0][0]


def _timed(work: Callable[[], Outcome]) -> tuple[Outcome, float]:
    started = time.perf_counter()
    outcome = work()
    return outcome, 1000 * (time.perf_counter() - started)


def _prefill_ms(target: LoadedModel, ids: Tensor) -> float:
    last = torch.tensor([len(ids) - 1])
    times = []
    for _ in range(PREFILL_RUNS + 1):
        started = time.perf_counter()
        hf_compat.read(target.model, ids[None], logits_at=last)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def _translate_seconds(url: str) -> float:
    """What the server says it has spent on translating, all requests together."""
    text = httpx.get(f"{url}/metrics").raise_for_status().text
    samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
    return sum(
        sample.value
        for sample in samples
        if sample.name == "kvt_stage_seconds_sum" and sample.labels.get("stage") == "translate"
    )


def _texts(direction: Direction, outcome: Outcome, ids: Tensor) -> Texts:
    decode = direction.target.tokenizer.decode
    prompt = ids[None]

    def continued(model: LoadedModel, outcome: Outcome | None = None) -> str:
        cache = None if outcome is None else cache_from(outcome, prompt)
        over = {} if cache is None else hf_compat.cache_arguments(model.model, cache)
        generate = cast(Callable[..., Tensor], model.model.generate)
        written = generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=TEXT_TOKENS,
            do_sample=False,
            **over,
        )
        return str(decode(written[0, prompt.shape[1] :], skip_special_tokens=True))

    return Texts(
        prompt=str(decode(ids[-TEXT_TOKENS:], skip_special_tokens=True)),
        native=continued(direction.target),
        translated=continued(direction.target, outcome),
        source=continued(direction.source),
    )
