"""Sums are those of the rows they name, whether collected at once or in parts."""

from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from mappers.collect import aligned, content
from mappers.corpus import Corpus
from mappers.held_out import hold_out
from mappers.moments import Moments
from tests.bench.recipe_bench import sums as module
from tests.bench.recipe_bench.fitted import Models
from tests.bench.recipe_bench.sums import (
    HELD,
    SKIPPED,
    PairSums,
    Part,
    collect_sums,
    corpus_of,
    with_heads,
    with_sink,
)

PARTS = frozenset({*with_sink("all_heads"), *with_heads(lags=1), Part("per_head", "shuffled-0")})


@pytest.fixture(scope="module")
def sums(models: Models, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> PairSums:
    return collect_sums(models, corpus, tmp_path_factory.mktemp("sums"), PARTS, progress=False)


@pytest.fixture(scope="module")
def rows(models: Models, corpus: Corpus) -> list[tuple[Tensor, Tensor]]:
    """Each window's contents, float64 [tokens, numbers]: all keys, then all values."""
    return [(_flat(models, corpus, n, 0), _flat(models, corpus, n, 1)) for n in range(6)]


def _flat(models: Models, corpus: Corpus, window: int, side: int) -> Tensor:
    ids, both = corpus.windows[window], (models.source, models.target)
    cache = aligned(*both, ids)[side]
    found = content(cache, both[side].identity.rope, length=len(ids))
    return torch.cat([one.flatten(1) for one in (*found.keys, *found.values)], dim=1).double()


def _check(found: Moments, x: Tensor, y: Tensor) -> None:
    centred = x - x.mean(0)
    assert found.count == len(x)
    torch.testing.assert_close(found.mean_y[0], y.mean(0))
    torch.testing.assert_close(found.gram[0], centred.T @ centred)
    torch.testing.assert_close(found.cross[0], centred.T @ (y - y.mean(0)))


def test_first_and_later_rows_together_are_all_rows(
    sums: PairSums, rows: list[tuple[Tensor, Tensor]]
) -> None:
    x, y = (torch.cat(side) for side in zip(*rows, strict=True))
    keys = sums.moments(with_sink("all_heads")).keys
    _check(keys, x.chunk(2, dim=1)[0], y.chunk(2, dim=1)[0])


def test_a_lag_reads_the_row_before_also_where_that_is_left_out_itself(
    sums: PairSums, rows: list[tuple[Tensor, Tensor]]
) -> None:
    x = torch.cat([torch.cat([x[SKIPPED:], x[SKIPPED - 1 : -1]], dim=1) for x, _ in rows])
    y = torch.cat([y[SKIPPED:] for _, y in rows])
    _check(sums.moments(with_heads(lags=1)).keys, x, y.chunk(2, dim=1)[0])


def test_a_window_is_fitted_or_held_out(
    sums: PairSums, corpus: Corpus, rows: list[tuple[Tensor, Tensor]]
) -> None:
    _, held = hold_out(corpus)
    numbers = [n for n, ids in enumerate(corpus.windows) if any(ids is o for o in held.windows)]
    assert 0 < len(numbers) < len(rows)
    y = torch.cat([rows[n][1][SKIPPED:] for n in numbers]).chunk(2, dim=1)[0]
    found = sums.moments({Part("joint", HELD, lags=1)}).keys
    assert found.count == len(y)
    torch.testing.assert_close(found.mean_y[0], y.mean(0))


def test_shuffled_pairs_are_the_same_numbers_that_do_not_belong_together(
    sums: PairSums, rows: list[tuple[Tensor, Tensor]]
) -> None:
    found = sums.moments({Part("per_head", "shuffled-0")}).keys
    y = torch.cat([y[SKIPPED:] for _, y in rows]).chunk(2, dim=1)[0]
    by_head = y.view(len(y), 3, 2, 16)  # layers, heads, dim
    torch.testing.assert_close(found.mean_y[1], by_head[:, :, 1].flatten(1).mean(0))
    x = torch.cat([x[SKIPPED:] for x, _ in rows]).chunk(2, dim=1)[0]
    own = x.view(len(x), 4, 2, 16)[:, :, 1].flatten(1)
    target = by_head[:, :, 1].flatten(1)
    torch.testing.assert_close(found.squares_y[1], (target - target.mean(0)).square().sum(0))
    together = (own - own.mean(0)).T @ target
    assert float((found.cross[1] - together).norm()) > 0.5 * float(together.norm())


def test_a_stopped_pass_goes_on_to_the_same_bits(
    models: Models,
    corpus: Corpus,
    sums: PairSums,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(module, "_contents", _stopping(after=5))
        with pytest.raises(KeyboardInterrupt):
            collect_sums(models, corpus, tmp_path, PARTS, every_windows=2, progress=False)
    again = collect_sums(models, corpus, tmp_path, PARTS, every_windows=2, progress=False)
    for part in PARTS:
        one, other = (side.moments({part}).keys.tensors() for side in (sums, again))
        assert all(torch.equal(one[name], other[name]) for name in one)


def _stopping(after: int):  # type: ignore[no-untyped-def]
    calls = []
    contents = module._contents

    def stopping(models: Models, corpus: Corpus, window: int):  # type: ignore[no-untyped-def]
        calls.append(window)
        if len(calls) > after:
            raise KeyboardInterrupt
        return contents(models, corpus, window)

    return stopping


def test_what_is_there_is_not_collected_again(
    models: Models, corpus: Corpus, sums: PairSums, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_contents", _no_model)
    again = collect_sums(models, corpus, sums.folder.parent, PARTS, progress=False)
    assert again.seconds == sums.seconds
    assert again.collecting_seconds(PARTS) > 0


def _no_model(*_: object) -> NoReturn:
    raise AssertionError("the models were run again")


def test_only_what_is_asked_for_is_collected_and_another_text_takes_its_place(
    models: Models, corpus: Corpus, tmp_path: Path
) -> None:
    wanted = {Part("per_head")}
    first = collect_sums(models, corpus, tmp_path, wanted, progress=False)
    assert [file.stem for file in first.folder.glob("*.safetensors")] == ["per_head-later"]
    other = corpus_of(models.target, windows=2, window_tokens=64)
    second = collect_sums(models, other, tmp_path, wanted, progress=False)
    assert [*tmp_path.iterdir()] == [second.folder]
    assert second.moments(wanted).windows == 2
