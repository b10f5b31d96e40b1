"""What a budget allows, who competes for it and who wins; and that a stopped choice goes on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mappers import artifact
from mappers import collect as collecting
from mappers.budget import SPREADS, allowed_flops, as_reads
from mappers.errors import LayoutError, TooFewData
from mappers.fit import fit_pair
from mappers.geometry import Geometry
from mappers.models import LoadedModel
from mappers.plan import Budget
from mappers.recipes import flops_per_token
from tests.mappers.test_fit import every_third, no_forward_pass, plan

__all__ = ["no_forward_pass"]

GEOMETRY = Geometry(5, 4, 16, 3, 2, 8)


@pytest.fixture
def renamed(target: LoadedModel) -> LoadedModel:
    """The target itself under another name: exact maps exist."""
    return replace(target, identity=target.identity.model_copy(update={"version": "copy"}))


@pytest.mark.parametrize(
    ("budget", "heads"), [("paper", 12), ("half", 6), ("quarter", 3), ("eighth", 1)]
)
def test_a_budget_is_a_part_of_what_full_head_costs(
    budget: Budget, heads: int, tmp_path: Path
) -> None:
    asked = plan(tmp_path, tmp_path, budget=budget, k=3)
    full_head = 3 * 2 * (3 * 64 * 16) * 2
    divisor = {"paper": 1, "half": 2, "quarter": 4, "eighth": 8}[budget]
    assert allowed_flops(budget, GEOMETRY, 3) == full_head // divisor
    reading = as_reads(asked, GEOMETRY)
    assert (reading.recipe, reading.k) == ("top_heads", heads)
    assert 3 * 2 * (heads * 16 * 16) * 2 <= full_head // divisor


def test_no_more_heads_are_read_than_there_are(tmp_path: Path) -> None:
    asked = plan(tmp_path, tmp_path, budget="paper", k=30, lags=0)
    assert as_reads(asked, GEOMETRY).k == 2 * 5 * 4
    assert as_reads(asked.model_copy(update={"lags": 1}), GEOMETRY).k == 2 * 2 * 5 * 4


def test_a_budget_that_buys_no_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="eighth with k 1 buys less than one of 4"):
        as_reads(plan(tmp_path, tmp_path, budget="eighth", k=1), GEOMETRY)


@pytest.mark.parametrize(
    "named", [{"recipe": "full_head"}, {"selection": "greedy"}, {"share": "head"}, {"spread": 2}]
)
def test_a_budget_and_what_it_chooses_exclude_each_other(
    named: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match=f"the budget chooses {next(iter(named))}"):
        plan(tmp_path, tmp_path, budget="half", **named)


def test_what_is_judged_without_weights_is_not_published_with_them(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="a budget fits rows without weights"):
        plan(tmp_path, tmp_path, budget="half", row_weights="attention")


def test_only_heads_are_spread_unevenly(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="spread: full_head does not choose heads"):
        plan(tmp_path, tmp_path, spread=2)


def test_the_candidate_that_is_exact_wins(
    target: LoadedModel, renamed: LoadedModel, texts: Path, tmp_path: Path
) -> None:
    """One head a head is exact where each may choose its own, and not where two must share it."""
    asked = plan(texts, tmp_path / "root", budget="half", k=1, lags=0, ridge=1e-9)
    loaded = artifact.load(fit_pair(asked, target, renamed, progress=False))
    choice = loaded.manifest.choice
    assert choice is not None
    best, *others = choice.candidates
    assert (choice.budget, choice.held_out_windows, best.share) == ("half", 1, "head")
    assert max(best.kl_tail_1, best.kl_tail_32) < 1e-5
    shared = [tried for tried in others if tried.share == "layer"]
    assert len(others) == 5
    assert min(min(tried.kl_tail_1, tried.kl_tail_32) for tried in shared) > 1e-3
    assert {tried.flops_per_token for tried in choice.candidates} == {choice.flops_per_token}
    assert flops_per_token(loaded.mapper) == choice.flops_per_token
    heads = [layer.heads for layer in loaded.mapper.layers if layer.heads is not None]
    assert heads[0].keys == ((0,), (1,))
    assert heads[2].values == ((10,), (11,))
    calibration = loaded.manifest.calibration
    assert calibration is not None
    assert calibration.rows == 11 * 31 + 31


def test_what_is_published_is_the_best_fitted_on_all_windows(
    source: LoadedModel, target: LoadedModel, texts: Path, tmp_path: Path
) -> None:
    asked = plan(texts, tmp_path / "root", budget="half", stride=2)
    manifest = artifact.load(fit_pair(asked, source, target, progress=False)).manifest
    assert manifest.choice is not None
    best = manifest.choice.candidates[0]
    ranks = [tried.kl_tail_1 * tried.kl_tail_32 for tried in manifest.choice.candidates]
    assert ranks == sorted(ranks)
    assert {(tried.share, tried.spread) for tried in manifest.choice.candidates} == {
        (share, spread) for share in ("head", "layer") for spread in SPREADS
    }
    assert all(
        tried.flops_per_token <= manifest.choice.flops_per_token
        for tried in manifest.choice.candidates
    )
    named = plan(
        texts, tmp_path / "named", recipe="top_heads", k=best.k, share=best.share,
        spread=best.spread, stride=2,
    )  # fmt: skip
    again = artifact.load(fit_pair(named, source, target, progress=False)).manifest
    assert again.choice is None
    assert again.calibration is not None
    assert manifest.calibration is not None
    assert abs(again.calibration.rows - manifest.calibration.rows) <= 12
    assert again.flops_per_token == manifest.flops_per_token


def test_a_choice_that_was_stopped_goes_on_to_the_same_bits(
    source: LoadedModel,
    target: LoadedModel,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped in the windows that are fitted, then in those that are held out."""
    options = {"budget": "half", "lags": 0}
    whole = fit_pair(plan(texts, tmp_path / "a", **options), source, target, progress=False)
    monkeypatch.setattr(collecting.Checkpoints, "__init__", every_third(collecting.Checkpoints))
    original, calls = collecting.aligned, []

    def stop_twice(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) in (8, 14):
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(collecting, "aligned", stop_twice)
    asked = plan(texts, tmp_path / "b", **options)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fit_pair(asked, source, target, progress=False)
    resumed = fit_pair(asked, source, target, progress=False)
    # 6 of 11 windows were kept the first time, all 11 the second, and one was held out.
    assert len(calls) == 8 + 6 + 1
    for name in ("weights.safetensors", "prefixes.safetensors", "profile.safetensors"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    assert not list((tmp_path / "b").glob(".fit-*"))


def test_another_budget_needs_no_second_pass_over_the_text(
    source: LoadedModel,
    target: LoadedModel,
    texts: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    work = tmp_path / "work"
    asked = plan(texts, tmp_path / "a", work=work, budget="paper", lags=0)
    fit_pair(asked, source, target, progress=False)
    request.getfixturevalue("no_forward_pass")
    less = plan(texts, tmp_path / "b", work=work, budget="quarter", lags=0)
    manifest = artifact.load(fit_pair(less, source, target, progress=False)).manifest
    assert manifest.choice is not None
    assert manifest.choice.budget == "quarter"


@pytest.mark.usefixtures("no_forward_pass")
def test_too_little_to_hold_out_is_found_before_any_model_runs(
    source: LoadedModel, target: LoadedModel, texts: Path, tmp_path: Path
) -> None:
    asked = plan(texts, tmp_path, budget="paper", window_tokens=60, windows=40, stride=1)
    with pytest.raises(TooFewData, match="give more text, or name a recipe"):
        fit_pair(asked, source, target, progress=False)
