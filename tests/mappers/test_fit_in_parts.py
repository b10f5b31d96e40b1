"""Fits whose sums may not be held at once: the same maps where pools are whole, and then less."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mappers import artifact, sums_memory
from mappers import collect as collecting
from mappers.collect import aligned
from mappers.corpus import calibration, read
from mappers.errors import LayoutError, TooLittleMemory
from mappers.fit import fit_pair
from mappers.fit_in_parts import parts_of
from mappers.mapper import Mapper
from mappers.models import LoadedModel
from mappers.recipes import RECIPES
from mappers.sums_memory import Shares, sums_bytes
from mappers.translate import Translator
from tests.mappers.test_fit import no_forward_pass, plan

__all__ = ["no_forward_pass"]

RECIPE = {"recipe": "top_heads", "k": 3}


def memory_for(source_layers: int, target_layers: int, mapper: Mapper, lags: int = 1) -> int:
    return sums_bytes(mapper.geometry, "joint", lags, Shares(source_layers, target_layers))


def fitted(folder: Path) -> Mapper:
    return artifact.load(folder).mapper


@pytest.fixture
def whole(source: LoadedModel, target: LoadedModel, texts: Path, tmp_path: Path) -> Mapper:
    return fitted(
        fit_pair(plan(texts, tmp_path / "whole", **RECIPE), source, target, progress=False)
    )


def unexplained(mapper: Mapper, source: LoadedModel, target: LoadedModel, texts: Path) -> float:
    """Mean squared error of the mapped text over its variance, mean over layers and kinds."""
    windows = calibration(read([texts]), target.tokenizer, window_tokens=128, windows=12).windows
    ours, own = [], []
    for ids in windows:
        given, native = aligned(source, target, ids)
        mapped = Translator(mapper).translate(given, dtype=torch.float32)
        ours.append(torch.stack([*mapped.keys, *mapped.values])[:, 4:])
        own.append(torch.stack([*native.keys, *native.values])[:, 4:])
    expected = torch.cat(own, 1)
    missed = (torch.cat(ours, 1) - expected).square().mean((1, 2, 3))
    return float((missed / expected.var(1).mean((1, 2))).mean())


@pytest.mark.parametrize("recipe", [RECIPE, {**RECIPE, "share": "head"}, {"recipe": "full_head"}])
def test_with_a_full_pool_the_maps_are_those_of_one_pass(
    recipe: dict[str, Any],
    source: LoadedModel,
    target: LoadedModel,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sums_memory, "TARGET_LAYERS_A_PASS", 2)
    one_pass = fitted(
        fit_pair(plan(texts, tmp_path / "a", **recipe), source, target, progress=False)
    )
    structure = RECIPES[one_pass.recipe].structure
    lags = 1 if structure == "joint" else 0
    memory = sums_bytes(one_pass.geometry, structure, lags, Shares(2, 2))
    asked = plan(texts, tmp_path / "b", sums_memory=memory, **recipe)
    folder = fit_pair(asked, source, target, progress=False)
    for ours, expected in zip(fitted(folder).layers, one_pass.layers, strict=True):
        assert (ours.sources, ours.heads) == (expected.sources, expected.heads)
        for one, other in ((ours.keys, expected.keys), (ours.values, expected.values)):
            torch.testing.assert_close(one.weight, other.weight, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(one.bias, other.bias, rtol=1e-5, atol=1e-6)
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == [folder.name]


def test_with_a_smaller_pool_the_error_is_larger_but_not_much(
    whole: Mapper, source: LoadedModel, target: LoadedModel, texts: Path, tmp_path: Path
) -> None:
    asked = {**RECIPE, "k": 8, "key_norm": False}
    large, small = (
        fitted(fit_pair(plan(texts, tmp_path, **given), source, target, progress=False))
        for given in (asked, {**asked, "sums_memory": memory_for(1, 1, whole)})
    )
    assert all(len(layer.sources) == 1 for layer in small.layers)
    best, worse = (unexplained(one, source, target, texts) for one in (large, small))
    assert best < worse < 1.0


def test_a_pool_holds_the_best_of_every_layer_of_its_run() -> None:
    r2 = torch.tensor([[0.9, 0.1, 0.3], [0.5, 0.2, 0.1], [0.1, 0.8, 0.2], [0.7, 0.3, 0.9]])
    first, second = parts_of(r2, Shares(source_layers=2, target_layers=2))
    assert (first.sources, first.targets) == ((0, 2), (0, 1))
    assert (second.sources, second.targets) == ((0, 3), (2,))
    assert parts_of(r2, Shares(3, 2))[0].sources == (0, 2, 3)


def test_a_stopped_fit_goes_on_with_the_part_that_it_was_at(
    whole: Mapper,
    source: LoadedModel,
    target: LoadedModel,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = memory_for(1, 1, whole)
    asked = plan(texts, tmp_path / "a", sums_memory=memory, **RECIPE)
    expected = fit_pair(asked, source, target, progress=False)
    original, calls = collecting.aligned, []

    def stop_once(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 30:  # 12 windows to rank, 12 of the first part, 5 of the second
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(collecting, "aligned", stop_once)
    asked = plan(texts, tmp_path / "b", sums_memory=memory, **RECIPE)
    with pytest.raises(KeyboardInterrupt):
        fit_pair(asked, source, target, progress=False)
    calls[:] = [1] * 100
    resumed = fit_pair(asked, source, target, progress=False)
    assert len(calls) == 100 + 24
    name = "weights.safetensors"
    assert (resumed / name).read_bytes() == (expected / name).read_bytes()


def test_a_memory_that_holds_not_one_target_layer_is_refused_before_a_model_runs(
    source: LoadedModel,
    target: LoadedModel,
    texts: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    request.getfixturevalue("no_forward_pass")
    asked = plan(texts, tmp_path, sums_memory=1_000, **RECIPE)
    with pytest.raises(TooLittleMemory, match="bytes, of 1,000 that may be used"):
        fit_pair(asked, source, target, progress=False)


def test_what_needs_all_sums_together_is_refused_in_parts(
    whole: Mapper, source: LoadedModel, target: LoadedModel, texts: Path, tmp_path: Path
) -> None:
    given = {**RECIPE, "spread": 2, "sums_memory": memory_for(1, 1, whole)}
    with pytest.raises(LayoutError, match="fitted in parts"):
        fit_pair(plan(texts, tmp_path, **given), source, target, progress=False)
