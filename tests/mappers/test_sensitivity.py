"""What a read is worth, on a target of which only the middle layer's attention does anything."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mappers.errors import NonFinite, TooFewData
from mappers.mapper import HeadReads
from mappers.models import LoadedModel
from mappers.passes import calibration_windows, empty_sums, first_pass
from mappers.plan import FitPlan
from mappers.profile_fit import ProfileBuilder
from mappers.selection import select
from mappers.sensitivity import weigher, worth_of_reads
from tests.mappers.test_fit import plan
from tests.mappers.test_held_out import copied

LAYERS, MIDDLE = 3, 1


@pytest.fixture
def deaf(target: LoadedModel) -> LoadedModel:
    """The target, of which the first and last layer's attention is multiplied by nothing."""
    model = copy.deepcopy(target.model)
    for number in (0, 2):
        torch.nn.init.zeros_(model.model.layers[number].self_attn.o_proj.weight)
    return replace(target, model=model)


@pytest.fixture
def asked(texts: Path, tmp_path: Path) -> FitPlan:
    return plan(texts, tmp_path / "root", recipe="top_heads", k=2, lags=0, stride=1)


def test_what_costs_no_kl_is_worth_nothing_and_is_read_least(
    source: LoadedModel, deaf: LoadedModel, asked: FitPlan
) -> None:
    corpus = calibration_windows(asked, deaf)
    builder = ProfileBuilder(source.identity, windows=12, skip_positions=4)
    empty = empty_sums(asked, source, deaf)
    sums = first_pass(asked, source, deaf, corpus, empty, builder, progress=False)
    weigh = weigher(asked, source, deaf, corpus, sums, progress=False)
    seen: list[Tensor] = []

    def looked_at(reads: tuple[HeadReads, ...], explained: Tensor) -> Tensor:
        assert [len(heads[0]) for layer in reads for heads in layer] == [2] * 2 * LAYERS
        seen.append(weigh(reads, explained))
        return seen[0]

    chosen = select(sums, 2, asked.ridge, share="layer", spread=2, weigh=looked_at).reads
    worth = seen[0].view(LAYERS, 2)
    assert worth[[0, 2]].abs().max() < 1e-5
    assert worth[MIDDLE].min() > 1e-2
    counts = [
        [len(heads[0]) for heads in layer] for layer in chosen if isinstance(layer, HeadReads)
    ]
    assert counts[MIDDLE] == [4, 4]
    assert counts[0] == counts[2] == [1, 1]


def test_worth_is_kl_for_each_unexplained_share(target: LoadedModel) -> None:
    mapper, windows = copied(target, 0.9), [torch.randint(300, (80,))]
    once, twice = (
        worth_of_reads(
            mapper, torch.full((2 * LAYERS,), r2), target, target, windows, progress=False
        )
        for r2 in (0.5, 0.75)
    )
    assert once.shape == (2 * LAYERS,)
    torch.testing.assert_close(2 * once, twice)
    assert once.min() > 0


def test_windows_that_leave_no_prompt_are_refused(target: LoadedModel) -> None:
    with pytest.raises(TooFewData, match="no window has 34 tokens"):
        worth_of_reads(
            copied(target, 1.0), torch.zeros(6), target, target, [torch.arange(33)], progress=False
        )


def test_what_is_not_finite_is_refused(target: LoadedModel) -> None:
    with pytest.raises(NonFinite):
        worth_of_reads(
            copied(target, float("nan")), torch.zeros(6), target, target, [torch.arange(80)]
        )
