"""A mapper that goes bad while it serves: real models, real answers, KLs measured and posted.

The embedded pair behind the whole application. The caller does what every caller should: the target
reads the text over its own cache and over the answer, and the KL between the two is posted. In
mid-stream noise is added to the loaded weights; a restart loads the good ones again.
"""

import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient
from torch import Tensor

from mappers import hf_compat
from mappers.arms import read_tail
from mappers.cache import KVCache
from mappers.mapper import AffineMap
from mappers.metrics import Reference
from mappers.translate import Translator
from service.client import Client, Outcome, Reprefill, Translated
from service.demo.family import EMBEDDED, Direction, directions, prompts
from service.entry import Entry
from service.eprocess import STAKES, reserve
from service.feedback import FeedbackReceipt
from service.schemas import TranslateRequest
from service.settings import Settings
from tests.service.reporting import Clock, served

TOKENS, PROMPTS = 128, 12
# Loose enough for a native tail of one token, so that what is measured is the mapper.
MAX_KL, EPS, DELTA = 0.6, 0.1, 0.01
NOISE = 0.5  # in standard deviations of each map's own weights: about half the KLs are too large


@cache
def direction() -> Direction:
    return directions(EMBEDDED)[0]


@cache
def texts() -> list[Tensor]:
    return prompts(EMBEDDED, direction(), tokens=TOKENS, count=PROMPTS)


@cache
def native(number: int) -> Reference:
    """What the target predicts after the prompt, on its own cache."""
    ids = texts()[number]
    at = torch.arange(TOKENS - 1, len(ids) - 1)
    logits, _ = hf_compat.read(direction().target.model, ids[None, :-1], logits_at=at)
    return Reference(logits[0], ids[TOKENS:])


@cache
def sent(number: int) -> tuple[KVCache, TranslateRequest]:
    """The source's cache of a prompt, and the request for the target's."""
    ids = texts()[number][None, :TOKENS]
    _, own = hf_compat.read(direction().source.model, ids, logits_at=torch.tensor([0]))
    return direction().request(own, ids)


class Caller:
    """Sends prompt after prompt, measures what it is given, and posts it."""

    def __init__(self, app: TestClient) -> None:
        self._client = Client("http://testserver")
        self._client._http = app
        self._turns = 0
        self.kls: list[float] = []

    def ask(self) -> tuple[int, Outcome]:
        """The next prompt's number, and its answer."""
        number, self._turns = self._turns % len(texts()), self._turns + 1
        return number, self._client.translate(*sent(number))

    def turn(self) -> FeedbackReceipt:
        """One answer, measured and posted."""
        number, outcome = self.ask()
        assert isinstance(outcome, Translated), outcome
        tail, ids = outcome.receipt.native_tail, texts()[number]
        over = direction().target, [outcome.cache], ids
        self.kls.append(native(number).compare(read_tail(*over, length=TOKENS, tail=tail)[0]).kl)
        return self._client.feedback(outcome.receipt, kl=self.kls[-1])

    def until(self, state: str, *, most: int) -> int:
        """Turns that the breaker takes to get there."""
        for count in range(1, most + 1):
            if self.turn().breaker == state:
                return count
        raise AssertionError(f"not {state} after {most} turns")


def degrade(entry: Entry) -> None:
    """Add noise to every loaded matrix."""
    generator = torch.Generator().manual_seed(0)

    def noisy(affine: AffineMap) -> AffineMap:
        noise = torch.randn(affine.weight.shape, generator=generator)
        return replace(affine, weight=affine.weight + NOISE * affine.weight.std() * noise)

    loaded = entry.loaded
    layers = tuple(
        replace(layer, keys=noisy(layer.keys), values=noisy(layer.values))
        for layer in loaded.mapper.layers
    )
    spoiled = replace(loaded.mapper, layers=layers)
    entry._loaded = replace(loaded, mapper=spoiled, translator=Translator(spoiled))


def predicted(rate: float, *, before: int) -> float:
    """Samples of violation rate ``rate`` that a test needs which has seen ``before`` good ones.

    ln(1 / delta) / kl(rate || eps) is for a bettor who knows both the rate and when it began. Ours
    knows neither and pays for it: it has only a share of its capital on the best stake, and of that
    only the share of the start after ``before``.
    """
    nats = math.log(1 / DELTA)
    price = math.log(len(STAKES) / (reserve(before) - reserve(before + 1)))
    both = ((rate, EPS), (1 - rate, 1 - EPS))
    divergence = sum(p * math.log(p / q) for p, q in both if p > 0)
    return (nats + price) / nats * (nats / divergence)


def gauge(client: TestClient, name: str) -> float:
    """That of the only breaker."""
    [value] = re.findall(rf"^{name}{{.*}} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(value)


def serving(client: TestClient) -> Entry:
    """The mapper of our direction."""
    entries = client.app.state.service.store.entries  # type: ignore[attr-defined]
    [entry] = [e for e in entries if e.source == direction().source.identity]
    assert isinstance(entry, Entry)
    return entry


def breaker(client: TestClient) -> dict[str, object]:
    """The only one, as an operator sees it."""
    [found] = client.get(f"/mappers/{serving(client).id}").json()["breakers"]
    assert isinstance(found, dict)
    return found


def refused(caller: Caller) -> bool:
    """Whether the next prompt is not translated for this reason."""
    _, outcome = caller.ask()
    return isinstance(outcome, Reprefill) and outcome.reason == "breaker_open"


def test_it_opens_in_time_stays_open_over_a_restart_and_closes_when_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    settings = Settings(
        state=tmp_path / "state.sqlite",
        max_kl=MAX_KL,
        alpha=EPS,
        breaker_delta=DELTA,
        breaker_close_delta=0.3,  # so that it takes fewer to close it
        drift_budget=None,
        shadow_rate=1,
    )
    with served(settings) as client:
        caller = Caller(client)
        assert {caller.turn().breaker for _ in range(PROMPTS)} == {"closed"}
        assert max(caller.kls) <= MAX_KL
        assert (breaker(client)["samples"], gauge(client, "kvt_breaker_state")) == (PROMPTS, 0)
        degrade(serving(client))
        taken = caller.until("open", most=100)
        bad = caller.kls[PROMPTS:]
        rate = sum(kl > MAX_KL for kl in bad) / len(bad)
        # One sample more: the last one carries it over the line.
        assert taken <= predicted(rate, before=PROMPTS) + 1
        assert (breaker(client)["state"], gauge(client, "kvt_breaker_state")) == ("open", 2)
        assert refused(caller)

    with served(settings) as client:  # the weights on disk are good
        caller = Caller(client)
        assert (breaker(client)["state"], gauge(client, "kvt_breaker_state")) == ("open", 2)
        assert refused(caller)
        clock.now += settings.breaker_cool_down_seconds + 1
        assert (breaker(client)["state"], gauge(client, "kvt_breaker_state")) == ("half_open", 1)
        caller.until("closed", most=60)
        assert max(caller.kls) <= MAX_KL
        assert (breaker(client)["samples"], gauge(client, "kvt_breaker_state")) == (0, 0)
