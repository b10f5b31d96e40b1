"""The promise itself: the policy that serves breaks it in no more runs than delta, by simulation.

Each run draws documents, makes the rule of them, and holds it against a population so large that it
is the truth. Thresholds are those at which the truth is on the wrong side by a hair, so a rule that
is only right on average would fail every other time.
"""

import math
from typing import NamedTuple

import numpy as np
import pytest

from mappers.accept import Rule, Verdict, decide, probe_edges
from mappers.evidence import Evidence, EvidenceRow
from mappers.mondrian import group_of
from tests.mappers.records import evidence, varied

TAILS = (1, 32, 100)
RUNS, POPULATION, ALPHA, DELTA, CLIP = 100, 20_000, 0.1, 0.1, 1.0
MAY_FAIL = DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / RUNS)


class Drawn(NamedTuple):
    """Documents: ``kls[w]``, ``scores`` and ``errors`` are each ``[n]``."""

    kls: dict[int, np.ndarray]
    scores: np.ndarray
    errors: np.ndarray


def draw(rng: np.random.Generator, count: int) -> Drawn:
    """A document that is hard is so at all tails; what warns of it goes the wrong way for scores:
    the documents that are refused as unfamiliar are the easy ones, which flatters the rest."""
    hard = rng.normal(size=count)
    kls = {
        tail: np.exp(-1.5 - 0.4 * math.log(tail) + 0.5 * hard + 0.6 * rng.normal(size=count))
        for tail in TAILS
    }
    return Drawn(kls, -hard + rng.normal(size=count), np.exp(hard + rng.normal(size=count)))


def record(drawn: Drawn, probe_tokens: int) -> Evidence:
    scores, errors = drawn.scores.tolist(), drawn.errors.tolist()
    return evidence(
        *(
            varied(kls.tolist(), scores=scores, errors=errors, tail=tail, probe_tokens=probe_tokens)
            for tail, kls in drawn.kls.items()
        )
    )


def risk_of(kls: np.ndarray, rule: Rule) -> float:
    """What the rule promises to keep down, over its limit: 1 is just kept."""
    if rule.risk == "mean":
        return float(np.minimum(kls, rule.kl_clip).mean()) / rule.max_kl
    return float((kls > rule.max_kl).mean()) / rule.alpha


def a_hair_too_strict(truth: Drawn, tail: int, rule: Rule) -> Rule:
    """The rule at the threshold which the tail just misses."""
    kls = truth.kls[tail]
    kept = np.minimum(kls, rule.kl_clip).mean() if rule.risk == "mean" else None
    max_kl = np.quantile(kls, 1 - rule.alpha) if kept is None else kept
    return rule._replace(max_kl=float(max_kl) * 0.98)


def verdict(found: Evidence, rule: Rule, **probe: float) -> Verdict:
    asked = {"tokens": 128, "domain": "chat", "prefix_known": True, "rule": rule, **probe}
    return decide(found, **asked)  # type: ignore[arg-type]


def breaks(found: Evidence, truth: Drawn, rule: Rule) -> bool | None:
    """Whether what is served breaks the promise; None: nothing is served."""
    said = verdict(found, rule)
    served = truth.scores <= found.score_limit("chat")
    if said.decision == "reprefill":
        return None
    return risk_of(truth.kls[said.native_tail][served], rule) > 1


@pytest.mark.parametrize(("documents", "tail"), [(70, 1), (150, 32)])
@pytest.mark.parametrize("risk", ["exceedance", "mean"])
def test_the_tail_that_is_chosen_keeps_the_promise(risk: str, tail: int, documents: int) -> None:
    rng = np.random.default_rng([documents, tail])
    truth = draw(rng, POPULATION)
    rule = Rule(0.1, ALPHA, DELTA, risk, CLIP)  # type: ignore[arg-type]
    strict = a_hair_too_strict(truth, tail, rule)
    runs = [breaks(record(draw(rng, documents), 0), truth, strict) for _ in range(RUNS)]
    assert np.mean([broken is True for broken in runs]) <= MAY_FAIL
    # Not by serving nothing: a larger tail meets the threshold, and is mostly found.
    assert np.mean([broken is not None for broken in runs]) >= 0.5


@pytest.mark.parametrize("risk", ["exceedance", "mean"])
def test_with_probes_the_promise_holds_in_all_groups_at_once(risk: str) -> None:
    rng = np.random.default_rng(9)
    truth = draw(rng, POPULATION)
    rule = a_hair_too_strict(truth, 1, Rule(0.1, ALPHA, DELTA, risk, CLIP))  # type: ignore[arg-type]
    runs = [groups(record(draw(rng, 300), 64), truth, rule) for _ in range(RUNS)]
    assert np.mean([max(found) > 1 for found, _ in runs]) <= MAY_FAIL
    # The groups differ in what they are served, or there would be no point in them.
    assert np.mean([len(set(tails)) > 1 for _, tails in runs]) >= 0.5


def groups(found: Evidence, truth: Drawn, rule: Rule) -> tuple[list[float], list[int]]:
    """The true risk of each group of probe errors, 0 where nothing is served, and its tail."""
    limit = found.score_limit("chat")
    rows: list[EvidenceRow] = [
        row for row in found.rows if row.native_tail == 1 and (row.score or 0.0) < limit
    ]
    edges = probe_edges(rows, rule)
    risks, tails = [], []
    for edge in (0.0, *edges):
        low, high = group_of(edge, edges)
        inside = (truth.errors > low) & (truth.errors < high) & (truth.scores <= limit)
        said = verdict(found, rule, probe_tokens=64, probe_error=edge)
        served = said.decision == "translate"
        risks.append(risk_of(truth.kls[said.native_tail][inside], rule) if served else 0.0)
        tails.append(said.native_tail)
    return risks, tails
