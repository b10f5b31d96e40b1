"""Mappers that must never serve, and the line that says why; real fits of a tiny pair."""

from pathlib import Path

import pytest
import torch

from mappers import artifact, passes
from mappers.accept import Rule, decide
from mappers.cache import KVCache
from mappers.collect import aligned
from mappers.evidence import Arm, Evidence, EvidenceRow
from mappers.fit import fit_pair
from mappers.models import LoadedModel, ModelSpec
from mappers.plan import FitPlan
from mappers.servable import why_not_servable

USUAL = Rule(max_kl=0.05, alpha=0.5, delta=0.2)
GENEROUS = USUAL._replace(max_kl=1e6)


def row(arm: Arm, kl: float, document: int, *, tail: int = 32) -> EvidenceRow:
    return EvidenceRow(
        document=f"{document}", domain="chat", length=128, native_tail=tail,
        prefix_known=arm is not Arm.LAST_TOKENS, arm=arm, kl=kl, kl_max=kl, top1=1.0, nll=1.0,
    )  # fmt: skip


def record(translated: float, alone: float, wrong: float, *, documents: int = 40) -> Evidence:
    """KLs that differ from document to document, as in life, and by a constant between arms."""
    rows = []
    for number in range(documents):
        noise = 0.01 * (number % 7)
        for arm, kl in (
            (Arm.TRANSLATED, translated),
            (Arm.LAST_TOKENS, alone),
            (Arm.WRONG_DOCUMENT, wrong),
        ):
            rows.append(row(arm, kl + noise, number))
    return Evidence(continuation_tokens=32, corpora={}, rows=tuple(rows))


@pytest.mark.parametrize(
    ("evidence", "line"),
    [
        (None, "no evidence"),
        (record(0.2, 0.5, 0.9), None),
        (record(0.2, 0.5, 0.9, documents=5), "5 documents of a length were measured, 29 are"),
        (record(0.8, 0.9, 1.5), "lowest certified KL is 0.86, above 0.3 (chat, 128 tokens)"),
        (record(0.8, 0.9, 0.8), "with another document's cache (0.829)"),
        (record(0.8, 0.7, 0.9), "no better than with no cache at all (0.729)"),
        (record(0.2, 0.2, 0.9), "translating is not seen to help anywhere: a KL of 0.2"),
    ],
)
def test_the_line(evidence: Evidence | None, line: str | None) -> None:
    got = why_not_servable(evidence, Rule(max_kl=0.3, alpha=0.1, delta=0.05))
    if line is None:
        assert got is None
    else:
        assert got is not None
        assert line in got
        assert "\n" not in got


def test_the_line_follows_the_risk() -> None:
    rule = Rule(max_kl=0.3, alpha=0.1, delta=0.05, risk="mean", kl_clip=2.0)
    assert why_not_servable(record(0.05, 0.5, 0.9), rule) is None
    few = why_not_servable(record(0.2, 0.5, 0.9, documents=5), rule) or ""
    assert f"5 documents of a length were measured, {rule.documents_needed()} are needed" in few
    assert "lowest certified KL is" in (why_not_servable(record(0.8, 0.9, 1.5), rule) or "")


def test_a_tail_that_does_the_work_alone_is_tested_but_never_chosen() -> None:
    rows = [
        row(arm, kl + 0.01 * (n % 7), n, tail=tail)
        for n in range(40)
        for arm, tail, kl in (
            (Arm.TRANSLATED, 64, 0.1),
            (Arm.LAST_TOKENS, 64, 0.1),
            (Arm.TRANSLATED, 32, 0.2),
            (Arm.LAST_TOKENS, 32, 0.4),
        )
    ]
    evidence = Evidence(continuation_tokens=32, corpora={}, rows=tuple(rows))

    def verdict(max_kl: float) -> tuple[object, ...]:
        return decide(
            evidence, tokens=128, domain="chat", prefix_known=True,
            rule=Rule(max_kl, 0.1, 0.05),
        )[:3]  # fmt: skip

    assert verdict(0.3) == ("translate", None, 32)
    assert verdict(0.18) == ("reprefill", "certified_kl_exceeds_threshold", 0)
    assert verdict(0.05) == ("reprefill", "certified_kl_exceeds_threshold", 0)


@pytest.fixture
def plan(texts: Path, tmp_path: Path) -> FitPlan:
    """Eight texts to fit on and four to measure on."""
    held_out = tmp_path / "held_out"
    held_out.mkdir()
    for file in sorted(texts.iterdir())[:4]:
        file.rename(held_out / file.name)
    nowhere = ModelSpec(path="nowhere")
    return FitPlan(
        source=nowhere, target=nowhere, calibration=(texts,), root=tmp_path / "root",
        evaluation={"a": (held_out,)}, k=1, ridge=1e-6, windows=24, window_tokens=128,
        lengths=(96,), native_tails=(1, 32), stride=2, alpha=None,
    )  # fmt: skip


def test_pairs_that_belong_together_are_servable(
    target: LoadedModel, plan: FitPlan, renamed: LoadedModel
) -> None:
    evidence = artifact.load(fit_pair(plan, target, renamed, progress=False)).evidence
    assert why_not_servable(evidence, USUAL) is None


def test_shuffled_pairs_are_never_servable(
    target: LoadedModel, renamed: LoadedModel, plan: FitPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mappers import collect

    def shuffled(
        source: LoadedModel, target: LoadedModel, ids: torch.Tensor
    ) -> tuple[KVCache, KVCache]:
        own, _ = aligned(source, target, ids)
        order = torch.randperm(len(ids), generator=torch.manual_seed(len(ids)))
        _, other = aligned(source, target, ids[order])
        return own, other

    monkeypatch.setattr(collect, "aligned", shuffled)
    loaded = artifact.load(fit_pair(plan, target, renamed, progress=False))
    assert "above 0.05" in (why_not_servable(loaded.evidence, USUAL) or "")
    # Exact first tokens alone beat nothing at all; but any document's translation is as good.
    why = why_not_servable(loaded.evidence, GENEROUS)
    assert why is not None
    assert "translating is not seen to help" in why


def test_too_little_calibration_text_is_never_servable(
    source: LoadedModel, target: LoadedModel, plan: FitPlan
) -> None:
    few = plan.model_copy(
        update={"windows": 10, "window_tokens": 16, "stride": 1, "skip_positions": 0}
    )
    loaded = artifact.load(fit_pair(few, source, target, progress=False))
    assert "above 0.05" in (why_not_servable(loaded.evidence, USUAL) or "")


@pytest.fixture
def renamed(target: LoadedModel) -> LoadedModel:
    """The target as another version, so that a fit from itself is exact."""
    from dataclasses import replace

    identity = target.identity.model_copy(update={"version": "copy"})
    return replace(target, identity=identity)


def test_a_fit_that_asks_for_a_level_fails_before_any_model_runs(
    source: LoadedModel, target: LoadedModel, plan: FitPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mappers.errors import TooFewData

    monkeypatch.setattr(passes, "collect", lambda *_, **__: pytest.fail("a model was run"))
    asked = FitPlan(**plan.model_dump(exclude={"alpha"}, exclude_unset=True))
    with pytest.raises(TooFewData, match="a: 4 documents .* need 30"):
        fit_pair(asked, source, target, progress=False)
