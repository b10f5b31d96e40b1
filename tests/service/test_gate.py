"""The cheap gate alone: evidence, first tokens, time."""

import json
import math
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from mappers.accept import Verdict
from mappers.evidence import Evidence
from service import gate
from service.entry import Entry
from service.gate import DETAILS, Ruling, rule
from service.guards import Standing
from service.policy import Policy
from service.schemas import REASONS, TranslateRequest, read_request
from service.settings import Settings
from service.store import Store
from tests.service.pair import KLS, ROWS, document


@pytest.fixture(scope="module")
def entry(artifacts: Path) -> Entry:
    store = Store(Settings(artifacts=(artifacts,)), lambda prepare: prepare())
    store.load_all()
    return store.entries[0]


def request(tokens: int = 40, **changes: Any) -> TranslateRequest:
    return read_request(json.dumps(document(tokens, **changes)))


def ruling(entry: Entry, asked: TranslateRequest, pending: float = 0.0, **changes: Any) -> Ruling:
    settings = Settings(**changes)
    standing = Standing(settings, ("pair", "chat", 64), "closed", probe_free=True, spent=0.0)
    return rule(
        entry,
        asked,
        standing,
        allow_unproven=settings.allow_unproven,
        pending_seconds=pending,
    )


def test_every_reason_that_the_gate_gives_is_in_the_closed_list() -> None:
    assert set(DETAILS) <= set(REASONS)


def test_the_certified_kl_comes_with_the_tail(entry: Entry) -> None:
    found = ruling(entry, request())
    assert (found.reason, found.native_tail, found.tokens) == (None, 1, 39)
    assert (found.kl_bound, found.rows) == (KLS[True, 1], 60)


@pytest.mark.parametrize(
    ("max_kl", "reason"),
    [(0.0041, None), (0.004, None), (0.0039, "certified_kl_exceeds_threshold")],
)
def test_just_under_and_just_over(entry: Entry, max_kl: float, reason: str | None) -> None:
    assert ruling(entry, request(max_kl=max_kl)).reason == reason
    assert ruling(entry, request(), max_kl=max_kl).reason == reason


@pytest.mark.parametrize("bound", [None, math.nan, math.inf, Settings().max_kl + 0.001])
def test_c16_a_bound_that_is_no_number_fails_closed(
    entry: Entry, monkeypatch: pytest.MonkeyPatch, bound: float | None
) -> None:
    monkeypatch.setattr(gate, "decide", lambda *_, **__: Verdict("translate", None, 1, bound, 60))
    assert ruling(entry, request()).reason == "certified_kl_exceeds_threshold"


def test_too_few_rows_for_the_confidence(entry: Entry) -> None:
    assert ruling(entry, request(), alpha=0.01).reason == "no_evidence"
    unproven = ruling(entry, request(), alpha=0.01, allow_unproven=True)
    assert (unproven.reason, unproven.unproven, unproven.native_tail) == (None, True, 1)


def test_a_domain_that_is_not_trusted_chooses_no_evidence(entry: Entry) -> None:
    usual, guarded = Policy(default_domain="chat"), Policy(trust_domain=False, domains=("chat",))
    assert [usual.evidence_domain(named) for named in ("law", None)] == ["law", "chat"]
    assert [guarded.evidence_domain(named) for named in ("chat", None)] == [None, None]
    asked = request(domain="elsewhere")
    assert ruling(entry, asked).reason == "no_evidence"
    assert ruling(entry, asked, trust_domain=False).reason is None
    # What a pair may be used for is still said by name.
    assert ruling(entry, asked, trust_domain=False, domains=("chat",)).reason == "no_evidence"


def test_too_few_rows_an_input_make_any_evidence_worthless(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "rows_an_input", 8.0)
    assert ruling(entry, request()).reason is None
    assert ruling(entry, request(), min_rows_an_input=8.1).reason == "no_evidence"
    assert ruling(entry, request(), min_rows_an_input=8.1, allow_unproven=True).unproven


def test_allow_unproven_does_not_excuse_bad_evidence(entry: Entry) -> None:
    found = ruling(entry, request(max_kl=0.001), allow_unproven=True)
    assert (found.reason, found.unproven) == ("certified_kl_exceeds_threshold", False)


def test_a_prefix_counts_only_from_position_0(entry: Entry) -> None:
    assert ruling(entry, request()).prefix is not None
    moved = ruling(entry, request(20, start_position=20))
    assert (moved.prefix, moved.kl_bound) == (None, KLS[False, 8])


def test_a_prefix_longer_than_the_answer_is_cut(entry: Entry) -> None:
    found = ruling(entry, request(33, max_kl=0.005))
    assert found.prefix is not None
    assert (found.tokens, found.prefix.tokens) == (1, 1)


def test_default_domain_stands_in_for_a_request_without(entry: Entry) -> None:
    assert ruling(entry, request(), default_domain="law").reason == "no_evidence"
    assert ruling(entry, request(domain="chat"), default_domain="law").reason is None


@pytest.fixture
def timed(entry: Entry) -> Iterator[Entry]:
    """One that takes a millisecond a token."""
    entry.timing.__init__()  # type: ignore[misc]
    for _ in range(300):
        entry.timing.add(39, 0.039)
    yield entry
    entry.timing.__init__()  # type: ignore[misc]


def test_what_cannot_be_worth_it_is_refused_before_the_evidence_is_asked(timed: Entry) -> None:
    nothing = {"domain": "law", "max_kl": 1e-6, "hops": 9}
    early = ruling(timed, request(reprefill_ms=40.0, **nothing))
    assert (early.reason, early.kl_bound, early.rows) == ("below_break_even", None, 0)
    assert ruling(timed, request(reprefill_ms=80.0, **nothing)).reason == "no_evidence"
    # 40 tokens: 39 ms to translate the 39 before the smallest tail, which reading must exceed.
    assert ruling(timed, request(reprefill_ms=40.1)).reason is None


def test_a_pairs_own_prefill_rate_stands_in_for_reprefill_ms(timed: Entry) -> None:
    assert ruling(timed, request()).reason is None
    assert ruling(timed, request(), reprefill_tokens_per_second=900.0).reason is None
    slow = ruling(timed, request(), reprefill_tokens_per_second=1100.0)
    assert slow.reason == "below_break_even"
    said = ruling(timed, request(reprefill_ms=80.0), reprefill_tokens_per_second=1100.0)
    assert said.reason is None
    # It is no deadline: nobody is known to wait.
    assert ruling(timed, request(), 9.0, reprefill_tokens_per_second=900.0).reason is None


def test_reasons_in_their_order(timed: Entry) -> None:
    """Each step mends what the one before was refused for."""
    open_breaker = Standing(
        Settings(drift_budget=0.05), ("pair", "chat", 64), "open", probe_free=True, spent=0.04
    )
    steps: list[tuple[str, dict[str, Any], Standing]] = [
        ("below_break_even", {"reprefill_ms": 1.0, "max_kl": 1e-6}, open_breaker),
        ("certified_kl_exceeds_threshold", {"max_kl": 1e-6}, open_breaker),
        ("drift_budget_exhausted", {}, open_breaker),
        ("breaker_open", {}, open_breaker._replace(spent=0.0)),
        ("would_miss_deadline", {}, open_breaker._replace(spent=0.0, phase="closed")),
    ]
    for reason, changes, standing in steps:
        asked = request(**{"reprefill_ms": 80.0, **changes})
        found = rule(timed, asked, standing, allow_unproven=False, pending_seconds=9.0)
        assert found.reason == reason


def test_time_decides_last(timed: Entry) -> None:
    entry = timed
    assert ruling(entry, request(reprefill_ms=30.0)).reason == "below_break_even"
    assert ruling(entry, request(reprefill_ms=80.0)).reason is None
    late = ruling(entry, request(reprefill_ms=80.0), pending=0.05)
    assert late.reason == "would_miss_deadline"
    assert late.expected_seconds == pytest.approx(0.089)
    # The 32 tokens that the target reads itself are paid in any case: 8 of 40 are what is saved.
    tight = {"max_kl": 0.005, "reprefill_ms": 80.0}
    assert ruling(entry, request(**tight)).reason is None
    entry.timing.add(8, 10.0)
    assert ruling(entry, request(**tight)).reason == "below_break_even"


def doubted(entry: Entry, asked: TranslateRequest, **times: float) -> Ruling:
    standing = Standing(Settings(), ("pair", "chat", 64), "closed", probe_free=True, spent=0.0)
    given = {"pending_seconds": 0.0, **times}
    return rule(entry, asked, standing, allow_unproven=False, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "times"),
    [
        ({"reprefill_ms": 20.0}, {}),
        ({"reprefill_ms": 42.0}, {"pending_seconds": 0.01}),
        ({}, {"left_seconds": 0.02}),
    ],
)
def test_a_prediction_that_is_trusted_less_lets_a_request_through(
    timed: Entry, said: dict[str, float], times: dict[str, float]
) -> None:
    refused = doubted(timed, request(**said), **times)
    assert (refused.reason is None, refused.doubtful, refused.trust) == (False, True, 1.0)
    tried = doubted(timed, request(**said), trust=0.4, **times)
    assert (tried.reason, tried.too_slow, tried.doubtful) == (None, True, False)
    # What a plan says is what is expected all the same.
    assert tried.expected_seconds == pytest.approx(0.039 + times.get("pending_seconds", 0.0))


@pytest.mark.parametrize(
    ("said", "times"),
    [
        ({}, {"left_seconds": 0.02, "pending_seconds": 0.03}),  # it waits too long as it is
        ({}, {"left_seconds": 0.0}),
        ({"domain": "law"}, {"left_seconds": 0.02}),
        ({"max_kl": 1e-6}, {"left_seconds": 0.02}),
        ({}, {"left_seconds": 1.0}),
        ({"tokens": 1, "reprefill_ms": 1e6}, {}),  # no longer than the smallest tail
        ({"tokens": 1, "reprefill_ms": 1e6}, {"left_seconds": 1e-9}),
    ],
)
def test_only_a_refusal_that_the_prediction_alone_makes_is_a_doubt(
    timed: Entry, said: dict[str, Any], times: dict[str, float]
) -> None:
    found = doubted(timed, request(**said), **times)
    assert not found.doubtful
    if found.reason is None:
        assert not found.too_slow


@pytest.mark.parametrize(
    ("changes", "score", "expected"),
    [
        ({}, 10.0, 0.01),
        ({}, 50.0, 0.03),
        ({}, None, None),
        ({"domain": "law"}, 10.0, None),
        ({"tokens": 200}, 10.0, None),
    ],
)
def test_the_expected_kl_is_that_of_measured_prompts_with_such_a_score(
    entry: Entry, changes: dict[str, Any], score: float | None, expected: float | None
) -> None:
    assert entry.evidence is not None
    rows = [
        row.model_copy(update={"score": float(n % ROWS), "kl": 0.01 if n % ROWS < 30 else 0.03})
        for n, row in enumerate(entry.evidence.rows)
    ]
    scored = copy(entry)
    scored.evidence = Evidence(continuation_tokens=32, corpora={}, rows=tuple(rows))
    asked = request(**changes)
    found = ruling(entry, request())
    told = gate.expected_kl(scored, asked, Settings(), found, score)
    assert told == (None if expected is None else pytest.approx(expected))
    assert gate.expected_kl(entry, asked, Settings(), found, score) is None
