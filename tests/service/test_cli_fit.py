"""``kvt fit`` under a budget, which is its default, and a recipe that is named instead."""

from pathlib import Path
from typing import get_args

import pytest

from mappers.artifact import load_manifest
from mappers.plan import FitPlan
from mappers.recipes import RECIPES
from service.commands import fit as command
from service.commands.exits import Code
from service.policy import Policy
from tests.service.test_cli import assert_one_line, kvt
from tests.service.tiny_family import save_models, save_texts

SHORT = ("--windows", 12, "--window-tokens", 128, "--stride", 1)


@pytest.fixture
def arguments(tmp_path: Path) -> tuple[object, ...]:
    save_models(tmp_path)
    save_texts(tmp_path / "text")
    sides = ("--source", tmp_path / "small", "--target", tmp_path / "large")
    text = ("--calibration", tmp_path / "text" / "calibration.jsonl")
    return ("fit", *sides, *text, "--root", tmp_path / "artifacts")


def test_without_a_recipe_the_best_of_the_papers_budget_is_fitted_and_the_others_are_shown(
    arguments: tuple[object, ...],
) -> None:
    result = kvt(*arguments, *SHORT, "--lags", 0, COLUMNS="200")
    assert result.exit_code == 0, result.output
    choice = load_manifest(Path(result.stdout.strip())).choice
    assert choice is not None
    assert choice.budget == "paper"
    shown = result.stderr
    assert "paper: at most 0.0655 MFLOP a token" in shown
    rows = [line for line in shown.splitlines() if "top_heads" in line]
    assert len(rows) == len(choice.candidates)
    for row, tried in zip(rows, choice.candidates, strict=True):
        assert tried.share in row
        assert f"{tried.kl_tail_1:.4f}" in row
        assert f"{tried.kl_tail_32:.4f}" in row
    inspected = kvt("inspect", result.stdout.strip(), COLUMNS="200").stdout
    assert all(row.strip() in inspected for row in rows)


def test_a_named_recipe_is_fitted_without_a_choice(arguments: tuple[object, ...]) -> None:
    result = kvt(*arguments, *SHORT, "--k", 2)
    assert result.exit_code == 0, result.output
    manifest = load_manifest(Path(result.stdout.strip()))
    assert (manifest.recipe, manifest.choice) == ("full_head", None)
    assert "MFLOP" not in result.stderr


@pytest.mark.parametrize("budget", [("--budget", "half"), ()], ids=["half", "the default"])
@pytest.mark.parametrize("named", [("--share", "head"), ("--spread", 2), ("--selection", "greedy")])
def test_what_the_budget_chooses_needs_a_recipe_instead(
    arguments: tuple[object, ...], named: tuple[object, ...], budget: tuple[object, ...]
) -> None:
    result = kvt(*arguments, *budget, *named)
    word = str(named[0]).removeprefix("--")
    message = f"the budget chooses {word}; to do so, name a recipe and no budget"
    assert_one_line(result, Code.USAGE, message)
    assert "Value error" not in result.stderr


def test_a_budget_and_a_recipe_are_not_given_together(arguments: tuple[object, ...]) -> None:
    result = kvt(*arguments, "--budget", "half", "--recipe", "top_heads")
    assert_one_line(result, Code.USAGE, "the budget chooses recipe; to do so, name a recipe")


def test_documents_that_are_too_few_for_the_services_alpha_are_found_at_once(
    arguments: tuple[object, ...], tmp_path: Path
) -> None:
    assert FitPlan.model_fields["alpha"].default == Policy.model_fields["alpha"].default
    held_out = f"chat={tmp_path / 'text' / 'held_out.jsonl'}"
    few = ("--held-out", held_out, "--documents", 4, "--lengths", 64)
    assert_one_line(kvt(*arguments, *few), Code.DATA, "chat: 4 documents", "need 30")


@pytest.mark.parametrize(
    ("recipe", "option", "what"),
    [
        ("full_head", ("--lags", 2), "lags: full_head does not choose heads"),
        ("head_local", ("--share", "head"), "share: head_local does not choose heads"),
        ("full_head", ("--spread", 1), "spread: full_head does not choose heads"),
        ("top_heads", ("--selection", "top"), "selection: top_heads does not choose layers"),
    ],
)
def test_an_option_of_another_recipe_is_refused(
    arguments: tuple[object, ...], recipe: str, option: tuple[object, ...], what: str
) -> None:
    assert_one_line(kvt(*arguments, "--recipe", recipe, *option), Code.USAGE, what)


def test_a_size_that_is_none_is_named_as_the_option_is(arguments: tuple[object, ...]) -> None:
    result = kvt(*arguments, "--sums-memory", "3xyz")
    assert_one_line(result, Code.USAGE, "sums-memory: could not interpret byte unit")


def test_a_budget_that_could_compare_nothing_says_so(arguments: tuple[object, ...]) -> None:
    result = kvt(*arguments, *SHORT, "--sums-memory", 300_000)
    assert result.exit_code == 0, result.output
    assert "budget paper: the sums are too large to hold at once" in result.stderr


def test_the_words_of_the_options_are_those_of_the_plan() -> None:
    words = {
        "budget": command.Budget,
        "selection": command.Method,
        "share": command.Share,
        "row_weights": command.RowWeights,
    }
    for name, literal in words.items():
        expected = get_args(FitPlan.model_fields[name].annotation)
        flat = [word for one in expected for word in get_args(one) or (one,)]
        assert [word for word in flat if word is not type(None)] == list(get_args(literal)), name
    assert set(get_args(command.Recipe)) == set(RECIPES)
