"""Chains of translations against chains of forward passes."""

from dataclasses import replace

import pytest
import torch

from mappers.collect import cache_of_text
from mappers.hops import Pair, drift, handed_over, sides
from mappers.models import LoadedModel
from tests.mappers.identities import broken_mapper, identity_mapper

IDS = torch.randint(1, 4_000, (130,), generator=torch.manual_seed(4))


@pytest.fixture
def same(target: LoadedModel) -> Pair:
    mapper = identity_mapper(target)
    return sides(target, target, mapper, mapper)


@pytest.mark.parametrize("hops", [0, 1, 2, 3])
def test_hops_between_equal_models_change_nothing(
    same: Pair, target: LoadedModel, hops: int
) -> None:
    got, expected = handed_over(same, IDS[:60], hops), cache_of_text(target, IDS[:60])
    assert torch.equal(got.positions, torch.arange(60))
    for one, other in zip(
        (*got.keys, *got.values), (*expected.keys, *expected.values), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_the_last_turn_is_always_read_by_the_source(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = sides(target, target, identity_mapper(target), identity_mapper(target))
    read: list[tuple[str, int, int]] = []
    translated: list[tuple[str, int]] = []
    append, translate = type(pair[0]).appended, type(pair[0]).translated

    def appended(self, cache, ids):  # type: ignore[no-untyped-def]
        read.append((self.name, cache.tokens, len(ids)))
        return append(self, cache, ids)

    def noting(self, cache, ids, *, known=True):  # type: ignore[no-untyped-def]
        translated.append((self.name, cache.tokens))
        return translate(self, cache, ids, known=known)

    monkeypatch.setattr(type(pair[0]), "appended", appended)
    monkeypatch.setattr(type(pair[0]), "translated", noting)
    handed_over(pair, IDS[:60], 2)
    assert translated == [("target", 20), ("source", 40)]
    assert read == [("target", 20, 40), ("source", 40, 60)]
    handed_over(pair, IDS[:60], 1)
    assert translated[2:] == [("source", 30)]
    with pytest.raises(ValueError, match="turns"):
        handed_over(pair, IDS[:2], 2)


def test_a_conversation_between_equal_models_does_not_drift(same: Pair) -> None:
    rows = list(drift(same, IDS, document="d", domain="a", turn_tokens=24, turns=6))
    assert [(row.turn, row.hops, row.length, row.side) for row in rows] == [
        (1, 0, 24, "target"),
        (2, 1, 48, "source"),
        (3, 2, 72, "target"),
        (4, 3, 96, "source"),
    ]
    assert max(max(row.kl, row.kl_fresh) for row in rows) < 1e-6
    assert list(drift(same, IDS[:40], document="d", domain="a", turn_tokens=24, turns=6)) == []


def test_errors_of_a_broken_direction_are_carried_on(target: LoadedModel) -> None:
    pair = sides(target, target, identity_mapper(target), broken_mapper(target))
    rows = list(drift(pair, IDS, document="d", domain="a", turn_tokens=24, turns=4))
    forward, back, again = rows[:3]
    assert forward.kl == pytest.approx(forward.kl_fresh, abs=1e-9)
    assert forward.kl < 1e-6
    assert back.kl == pytest.approx(back.kl_fresh, rel=0.2)
    assert back.kl > 1e-3
    # What came back broken is handed on, though this direction is right.
    assert again.kl > 1e-3
    assert again.kl_fresh < 1e-6


def test_first_tokens_of_both_sides_are_their_own(source: LoadedModel, target: LoadedModel) -> None:
    back = identity_mapper(source)
    pair = sides(source, source, back, replace(back, prefixes=type(back.prefixes)()))
    cache = cache_of_text(source, IDS[:10])
    doubled = replace(cache, keys=tuple(keys * 2 for keys in cache.keys))
    got = pair[0].translated(doubled, IDS[:10])
    torch.testing.assert_close(got.keys[0][0], cache.keys[0][0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got.keys[0][1], cache.keys[0][1], atol=1e-2)
    unknown = pair[0].translated(doubled, IDS[:10], known=False)
    torch.testing.assert_close(unknown.keys[0], doubled.keys[0], rtol=1e-3, atol=1e-4)
