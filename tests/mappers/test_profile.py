"""What a profile sees, what it cannot see, and what is refused as one."""

import dataclasses

import pytest
import torch

from mappers.cache import KVCache
from mappers.errors import LayoutError, NonFinite
from mappers.profile import CalibrationProfile, Finding, bytes_at_most
from mappers.profile_fit import TEXTS_AT_LEAST, ProfileBuilder, deviations_of
from mappers.row_sums import RowSums
from mappers.sample import SAMPLED_ROWS, largest, sample, sample_rows
from tests.bench.corruptions import CORRUPTIONS, Context
from tests.mappers.texts import AUTHOR, SKIPPED, builder, profile

TEXTS = 50
FALSE_REFUSALS = 0.02
UNSEEN = {
    "another_documents_cache",
    "exponent_bit_cleared",
    "exponent_bit_flipped",
    "theta_off_by_2_percent",
}
HELD_OUT = [AUTHOR.ids(seed, 120 + seed % 80) for seed in range(5000, 5000 + TEXTS)]


@pytest.fixture(scope="module")
def known() -> CalibrationProfile:
    return profile()


@pytest.fixture(scope="module")
def held_out() -> list[KVCache]:
    return [AUTHOR.cache(ids) for ids in HELD_OUT]


def examine(known: CalibrationProfile, cache: KVCache) -> Finding:
    found = known.examine(cache, AUTHOR.source, skip_positions=SKIPPED, peaks=largest(cache))
    assert found is not None
    return found


def refused(known: CalibrationProfile, cache: KVCache) -> bool:
    """As the content gate does it."""
    if not bool(largest(cache).isfinite().all()):
        return True
    return not examine(known, cache).deviation <= known.limit(0.01)


def test_good_caches_pass(known: CalibrationProfile, held_out: list[KVCache]) -> None:
    assert sum(refused(known, cache) for cache in held_out) <= FALSE_REFUSALS * TEXTS


@pytest.mark.parametrize("name", sorted(CORRUPTIONS.keys() - UNSEEN))
def test_corruptions_are_seen(
    name: str, known: CalibrationProfile, held_out: list[KVCache]
) -> None:
    spoiled = [
        CORRUPTIONS[name](cache, Context(AUTHOR.source.rope, held_out[0], seed))
        for seed, cache in enumerate(held_out)
    ]
    assert sum(refused(known, cache) for cache in spoiled) >= 0.99 * TEXTS


def test_another_texts_cache_is_as_good_as_any(
    known: CalibrationProfile, held_out: list[KVCache]
) -> None:
    context = Context(AUTHOR.source.rope, held_out[0])
    given = [CORRUPTIONS["another_documents_cache"](cache, context) for cache in held_out[1:20]]
    assert not any(refused(known, cache) for cache in given)


def test_a_token_table_sees_another_texts_cache(
    known: CalibrationProfile, held_out: list[KVCache]
) -> None:
    ids, cache = HELD_OUT[1], held_out[1]
    rows = sample_rows(len(ids))
    assert known.tokens.strangers(cache, rows, ids[rows]) == 0
    stranger = known.tokens.strangers(held_out[2], rows[rows < held_out[2].tokens], ids[:0])
    assert stranger is None
    other = AUTHOR.cache(AUTHOR.ids(1, len(ids)))
    found = known.tokens.strangers(other, rows, ids[rows])
    assert found is not None
    assert found > 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_token_table_bears_storage_in_fewer_bits(
    dtype: torch.dtype, known: CalibrationProfile
) -> None:
    cache, ids = AUTHOR.cache(HELD_OUT[0]), HELD_OUT[0]
    stored = KVCache(
        tuple(k.to(dtype) for k in cache.keys),
        tuple(v.to(dtype) for v in cache.values),
        cache.positions,
    )
    assert known.tokens.strangers(stored, torch.arange(len(ids)), ids) == 0


def test_unknown_tokens_do_not_count(known: CalibrationProfile) -> None:
    cache = AUTHOR.cache(HELD_OUT[0])
    unknown = torch.full((5,), 10_000)
    assert known.tokens.strangers(cache, torch.arange(5), unknown) is None


def test_unfamiliar_text_has_a_high_score(known: CalibrationProfile) -> None:
    usual = [examine(known, AUTHOR.cache(ids)).score for ids in HELD_OUT[:30]]
    few = [AUTHOR.cache(AUTHOR.ids(seed, 150, words=30)) for seed in range(30)]
    strange = [examine(known, cache).score for cache in few]
    assert min(strange) > max(usual)


def test_rows_are_spread_evenly_and_hold_both_ends() -> None:
    rows = sample_rows(1000, skip_positions=4)
    assert (int(rows[0]), int(rows[-1]), len(rows)) == (4, 999, SAMPLED_ROWS)
    assert rows.diff().min() >= 10
    assert sample_rows(1000, start_position=4, skip_positions=4)[0] == 0
    assert sample_rows(6, skip_positions=4).tolist() == [4, 5]
    assert sample_rows(5, skip_positions=4).tolist() == [4]
    assert sample_rows(3, skip_positions=4).tolist() == []


def test_a_prompt_of_first_tokens_only_is_not_judged(known: CalibrationProfile) -> None:
    cache = AUTHOR.cache(HELD_OUT[0][:SKIPPED])
    assert known.examine(cache, AUTHOR.source, skip_positions=SKIPPED, peaks=largest(cache)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_largest_shows_what_is_not_finite(dtype: torch.dtype, bad: float) -> None:
    cache = AUTHOR.cache(HELD_OUT[0])
    values = [v.to(dtype) for v in cache.values]
    keys = [k.to(dtype) for k in cache.keys]
    found = largest(KVCache(tuple(keys), tuple(values), cache.positions))
    assert torch.equal(found[1, 2], values[2].abs().amax(0).float())
    values[2][7, 1, 3] = bad
    found = largest(KVCache(tuple(keys), tuple(values), cache.positions))
    assert (~found.isfinite()).nonzero().tolist() == [[1, 2, 1, 3]]


def test_a_cache_that_starts_later_is_stripped_at_its_own_positions(
    known: CalibrationProfile,
) -> None:
    assert not refused(known, AUTHOR.cache(HELD_OUT[0], start_position=777))


def test_an_interrupted_pass_gives_the_same_profile() -> None:
    whole, part = builder(24), ProfileBuilder(AUTHOR.source, windows=24, skip_positions=SKIPPED)
    for stop in (5, 20):
        saved = dict(sorted(part.tensors().items()))
        part = ProfileBuilder(AUTHOR.source, windows=24, skip_positions=SKIPPED)
        part.restore(saved)
        for seed in range({5: 0, 20: 5}[stop], stop):
            ids = AUTHOR.ids(seed, 160)
            part.add(ids, AUTHOR.cache(ids))
    saved = part.tensors()
    part = ProfileBuilder(AUTHOR.source, windows=24, skip_positions=SKIPPED)
    part.restore(saved)
    for seed in range(20, 24):
        ids = AUTHOR.ids(seed, 160)
        part.add(ids, AUTHOR.cache(ids))
    first, second = whole.profile(), part.profile()
    assert first is not None
    assert second is not None
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[name]), name


def test_sums_of_two_passes_add_up() -> None:
    sums = [RowSums(3, 2, 16) for _ in range(3)]
    for seed in range(10):
        cache = AUTHOR.cache(AUTHOR.ids(seed, 50))
        rows, peaks = sample(cache, AUTHOR.source.rope, sample_rows(50)), largest(cache)
        sums[0].add(rows, peaks)
        sums[1 + seed % 2].add(rows, peaks)
    sums[1].merge(sums[2])
    for name, tensor in sums[0].tensors().items():
        torch.testing.assert_close(sums[1].tensors()[name], tensor, rtol=1e-12, atol=1e-12)


def test_deviations_leave_each_text_out_of_its_own_measure() -> None:
    seen = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    expected = []
    for i in range(12):
        others = torch.cat((seen[:i], seen[i + 1 :]))
        expected.append(((seen[i] - others.mean(0)) / others.std(0)).abs().max())
    torch.testing.assert_close(
        deviations_of(seen, torch.full((5,), 1e-3)), torch.stack(expected), rtol=1e-4, atol=1e-4
    )


def test_too_few_texts_give_no_profile() -> None:
    assert builder(2 * TEXTS_AT_LEAST - 2, tokens=40).profile() is None
    assert builder(2 * TEXTS_AT_LEAST, tokens=40).profile() is not None


def test_a_calibration_cache_that_is_not_finite_is_refused() -> None:
    cache = AUTHOR.cache(HELD_OUT[0])
    cache.values[1][0, 0, 0] = float("nan")
    with pytest.raises(NonFinite):
        builder(2).add(HELD_OUT[0], cache)


def test_tensors_and_back(known: CalibrationProfile) -> None:
    again = CalibrationProfile.from_tensors(known.tensors(), AUTHOR.source)
    cache = AUTHOR.cache(HELD_OUT[3])
    assert examine(again, cache) == examine(known, cache)
    assert known.nbytes <= bytes_at_most(AUTHOR.source)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("rows.mean", lambda t: t[:1]),
        ("rows.mean", lambda t: t.double()),
        ("rows.mean", lambda t: t.fill_(float("nan"))),
        ("rows.within", lambda t: t.zero_()),
        ("rows.between", lambda t: t.fill_(-1)),
        ("rows.scale", lambda t: -t),
        ("spread", lambda t: t.zero_()),
        ("center", lambda t: t[:-1]),
        ("deviations", lambda t: t.flip(0)),
        ("deviations", lambda t: t[:0]),
        ("tokens.ids", lambda t: t.flip(0)),
        ("tokens.ids", lambda t: -t.flip(0) - 1),
        ("tokens.ids", lambda t: t[:1]),
        ("tokens.values", lambda t: t[:-1]),
        ("tokens.values", lambda t: t.fill_(float("inf"))),
        ("tokens.directions", lambda t: t.half()),
    ],
)
def test_what_is_no_profile_is_refused(name: str, spoil: object, known: CalibrationProfile) -> None:
    tensors = {n: t.clone() for n, t in known.tensors().items()}
    tensors[name] = spoil(tensors[name])  # type: ignore[operator]
    with pytest.raises(LayoutError):
        CalibrationProfile.from_tensors(tensors, AUTHOR.source)


@pytest.mark.parametrize("name", ["rows.mean", "deviations", "tokens.ids"])
def test_missing_and_surplus_tensors_are_refused(name: str, known: CalibrationProfile) -> None:
    missing = {n: t for n, t in known.tensors().items() if n != name}
    for tensors in (missing, {**known.tensors(), f"{name}.more": torch.zeros(1)}):
        with pytest.raises(LayoutError):
            CalibrationProfile.from_tensors(tensors, AUTHOR.source)


def test_a_profile_of_another_geometry_is_refused(known: CalibrationProfile) -> None:
    other = AUTHOR.source.model_copy(update={"num_kv_heads": 4})
    with pytest.raises(LayoutError):
        CalibrationProfile.from_tensors(known.tensors(), other)


def test_a_finding_names_the_place(known: CalibrationProfile) -> None:
    cache = AUTHOR.cache(HELD_OUT[0])
    values = list(cache.values)
    values[2] = values[2].clone()
    values[2][:, 1] *= 1000
    found = examine(known, dataclasses.replace(cache, values=tuple(values)))
    assert found.at == "coupling[2, 1]"
