"""Heads are chosen where the data say so: targets that read exactly two known source heads."""

import pytest
import torch
from torch import Tensor

from mappers import head_selection
from mappers.cache import KVCache
from mappers.errors import LayoutError
from mappers.geometry import Geometry
from mappers.head_selection import HeadSearch, Share
from mappers.mapper import HeadReads, Mapper, layers_of
from mappers.moments import PairMoments
from mappers.prefixes import ExactPrefixes
from mappers.recipes import RECIPES, check_shapes, fit_layer, flops_per_token
from mappers.selection import select
from mappers.translate import Translator
from tests.mappers.pairs import identity, random_cache, rotate

GEOMETRY = Geometry(3, 2, 4, 2, 2, 6)
TOKENS = 300
# Numbers below 6 are keys, the others values: of source layer 0 head 0, layer 0 head 1, ...
READS = (
    HeadReads(keys=((1, 4), (3, 9)), values=((0, 11), (7, 8))),
    HeadReads(keys=((2, 6), (0, 5)), values=((1, 2), (10, 11))),
)


def heads_of(source: KVCache) -> Tensor:
    """All source heads by number, ``[12, T, D]``."""
    sides = torch.stack([torch.stack(side) for side in (source.keys, source.values)])
    return sides.transpose(2, 3).flatten(0, 2)


def target_of(source: KVCache, *, noise: float = 0.0) -> KVCache:
    generator = torch.Generator().manual_seed(5)
    heads, kinds = heads_of(source), []
    for kind in ("keys", "values"):
        layers = []
        for reads in READS:
            outputs = []
            for a, b in getattr(reads, kind):
                weights = torch.randn(2, 4, 6, generator=generator)
                outputs.append(heads[a] @ weights[0] + heads[b] @ weights[1] + 1.5)
            layer = torch.stack(outputs, 1)
            layers.append(layer + noise * torch.randn(layer.shape, generator=generator))
        kinds.append(tuple(layers))
    return KVCache(kinds[0], kinds[1], source.positions)


def test_each_target_head_finds_the_two_heads_that_it_is_made_of() -> None:
    moments = PairMoments(GEOMETRY, "joint")
    source = random_cache(3, TOKENS, 2, 4, seed=1)
    moments.add_window(source, target_of(source, noise=0.5))
    assert select(moments, 2, 1e-4, share="head").reads == READS
    (three, *_) = select(moments, 3, 1e-4, share="head").reads
    assert isinstance(three, HeadReads)
    assert set(READS[0].keys[0]) < set(three.keys[0])


def test_what_was_found_translates_unseen_text_exactly_and_costs_two_heads() -> None:
    moments = PairMoments(GEOMETRY, "joint")
    seen, unseen = (random_cache(3, TOKENS, 2, 4, seed=seed) for seed in (1, 2))
    moments.add_window(seen, target_of(seen))
    recipe = RECIPES["top_heads"]
    layers = tuple(
        fit_layer(recipe, moments, layer, reads, 0.0) for layer, reads in enumerate(READS)
    )
    mapper = Mapper(
        identity(3, 2, 4),
        identity(2, 2, 6),
        "top_heads",
        layers,
        ExactPrefixes(),
        skipped_positions=0,
    )
    check_shapes(mapper)
    assert flops_per_token(mapper) == 2 * 2 * 2 * (2 * 2 * 4 * 6)
    given = Translator(mapper, chunk_tokens=64).translate(
        KVCache(
            tuple(rotate(keys, unseen.positions, 10_000.0).float() for keys in unseen.keys),
            unseen.values,
            unseen.positions,
        ),
        dtype=torch.float32,
    )
    truth = target_of(unseen)
    for layer in range(2):
        expected = rotate(truth.keys[layer], unseen.positions, 10_000.0).float()
        torch.testing.assert_close(given.keys[layer], expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(given.values[layer], truth.values[layer], rtol=1e-3, atol=1e-3)


def test_where_one_more_head_explains_more_a_layer_gets_it_from_another() -> None:
    """Of the first layer each head reads two others, of the second only one."""
    moments = PairMoments(GEOMETRY, "joint")
    source = random_cache(3, TOKENS, 2, 4, seed=1)
    made, heads = target_of(source, noise=0.1), heads_of(source)
    single = torch.stack([heads[n][:, :1] @ torch.ones(1, 6) for n in (3, 8)], 1)
    noisy = [single + 0.1 * torch.randn(single.shape) for _ in range(2)]
    target = KVCache((made.keys[0], noisy[0]), (made.values[0], noisy[1]), source.positions)
    moments.add_window(source, target)
    alike = torch.ones(4)
    first, second = select(moments, 2, 1e-4, share="head", spread=2, weigh=lambda *_: alike).reads
    assert isinstance(first, HeadReads)
    assert isinstance(second, HeadReads)
    counts = [len(kind[0]) for reads in (first, second) for kind in reads]
    assert counts == [2, 2, 1, 1]
    assert 3 in second.keys[0]


def reads(keys: tuple[tuple[int, ...], ...]) -> HeadReads:
    return HeadReads(keys, ((0,), (0,)))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (reads(()), "as many source heads"),
        (reads(((0,), (0,), (0,))), "as many source heads"),
        (reads(((0,), (0, 1))), "as many source heads"),
        (reads(((0,), (60,))), "0..59"),
        (reads(((60,),)), "0..59"),
        (reads(((-1,), (0,))), "0..59"),
        (reads(((1, 1), (0, 1))), "each once"),
        (reads(((1, 0), (0, 1))), "ascending"),
        (reads(((), ())), "0..59"),
    ],
)
def test_heads_that_are_not_there_are_refused(wrong: HeadReads, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        RECIPES["top_heads"].columns(wrong, GEOMETRY)


def test_sources_are_the_layers_of_the_heads() -> None:
    assert layers_of(READS[0], GEOMETRY) == (0, 1, 2)
    assert layers_of(HeadReads(((0,), (7,)), ((1,), (6,))), GEOMETRY) == (0,)


@pytest.mark.parametrize("times", [2, 3, 4])
@pytest.mark.parametrize("share", ["head", "layer"])
def test_paths_that_are_followed_where_they_are_used_give_what_whole_paths_give(
    share: Share, times: int
) -> None:
    moments = PairMoments(GEOMETRY, "joint")
    source = random_cache(3, TOKENS, 2, 4, seed=1)
    generator = torch.Generator().manual_seed(2)
    mixed = torch.randn(8, 48, 6, generator=generator) * torch.rand(8, 48, 1, generator=generator)
    heads = (heads_of(source).transpose(0, 1).flatten(1) @ mixed).view(4, 2, TOKENS, 6)
    keys, values = heads.transpose(1, 2).chunk(2)
    moments.add_window(source, KVCache(tuple(keys), tuple(values), source.positions))
    whole = HeadSearch(moments, 3 * times, 1e-4).paths(share)
    search = HeadSearch(moments, 3, 1e-4)
    found = set()
    for seed in range(10):
        worth = torch.rand(4, generator=torch.Generator().manual_seed(seed)) ** 4
        paths, counts = search.spread(search.paths(share), share, worth, times=times)
        assert counts == whole.spread(3, worth, times=times)
        assert paths.reads(counts) == whole.reads(counts)
        assert sum(counts) == 3 * 4
        found.add(tuple(counts))
    # Some are followed to the end, and not all: some are read less than evenly.
    assert max(map(max, found)) > 3 * (times // 2)
    assert min(map(min, found)) < 3


def test_a_head_chooses_among_what_its_layer_would_read(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = PairMoments(GEOMETRY, "joint")
    source = random_cache(3, TOKENS, 2, 4, seed=1)
    moments.add_window(source, target_of(source, noise=0.5))
    free = HeadSearch(moments, 2, 1e-4).paths("head")
    monkeypatch.setattr(head_selection, "POOLED_FROM", 2)
    monkeypatch.setattr(head_selection, "POOL", 1)
    own, shared = (HeadSearch(moments, 2, 1e-4).paths(share) for share in ("head", "layer"))
    for place, ((whole,), paths) in enumerate(zip(shared.paths, own.paths, strict=True)):
        # Both heads of a layer are made of two of their own, which two for both cannot hold.
        assert {block for path in paths for block in path.blocks} == set(whole.blocks)
        found = [set(path.blocks) for path in free.paths[place]]
        assert found == [set(heads) for heads in READS[place // 2][place % 2]]
