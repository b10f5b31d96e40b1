"""Moments against sums written out in numpy, whatever the chunks, offsets and order of merging."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from mappers.checkpoint import read_checkpoint, write_checkpoint
from mappers.errors import ArtifactError, LayoutError, NonFinite
from mappers.geometry import Geometry, Structure, head_groups
from mappers.moments import FIELDS, Moments, PairMoments
from tests.mappers.pairs import random_cache, stacked

GROUPS, INPUTS, OUTPUTS = 2, 3, 4
GEOMETRY = Geometry(3, 2, 4, 2, 4, 6)


def rows(count: int, *, seed: int, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Correlated float64 x ``[G, n, F]`` and y ``[G, n, O]`` of standard deviation about 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(GROUPS, count, INPUTS, generator=generator, dtype=torch.float64)
    mixing = torch.randn(INPUTS, OUTPUTS, generator=generator, dtype=torch.float64)
    noise = torch.randn(GROUPS, count, OUTPUTS, generator=generator, dtype=torch.float64)
    return x + offset, x @ mixing + noise - 3 * offset


def reference(x: Tensor, y: Tensor) -> dict[str, np.ndarray]:
    """Two passes over the data in extended precision."""
    wide_x, wide_y = (tensor.numpy().astype(np.longdouble) for tensor in (x, y))
    mean_x, mean_y = wide_x.mean(axis=1), wide_y.mean(axis=1)
    from_mean_x, from_mean_y = wide_x - mean_x[:, None], wide_y - mean_y[:, None]
    return {
        "weight": np.full(GROUPS, x.shape[1]),
        "mean_x": mean_x,
        "mean_y": mean_y,
        "gram": np.einsum("gnf,gnh->gfh", from_mean_x, from_mean_x),
        "cross": np.einsum("gnf,gno->gfo", from_mean_x, from_mean_y),
        "squares_y": (from_mean_y**2).sum(axis=1),
    }


def streamed(x: Tensor, y: Tensor, cuts: list[int]) -> Moments:
    moments = Moments(GROUPS, INPUTS, OUTPUTS)
    for start, stop in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        moments.add(x[:, start:stop], y[:, start:stop])
    return moments


def assert_close(moments: Moments, expected: dict[str, np.ndarray], relative: float) -> None:
    for name in FIELDS:
        given = getattr(moments, name).numpy()
        scale = np.abs(expected[name]).max()
        error = np.abs(given - expected[name]).max()
        assert error <= relative * scale, f"{name}: {error} of {scale}"


def assert_same_bits(first: Moments, second: Moments) -> None:
    assert first.count == second.count
    for name in FIELDS:
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@given(cuts=st.lists(st.integers(0, 60), max_size=8).map(sorted), seed=st.integers(0, 1000))
def test_any_chunking_gives_the_reference(cuts: list[int], seed: int) -> None:
    x, y = rows(60, seed=seed)
    moments = streamed(x, y, cuts)
    assert moments.count == 60
    assert_close(moments, reference(x, y), 1e-12)


@pytest.mark.parametrize("cuts", [[], [1], [30], list(range(7, 300, 7))], ids=len)
def test_an_offset_of_a_million_costs_nothing(cuts: list[int]) -> None:
    """Uncentred sums keep 16 - 2 * 6 digits here; these keep what the data themselves have."""
    x, y = rows(300, seed=1, offset=1e6)
    moments = streamed(x, y, cuts)
    assert_close(moments, reference(x, y), 1e-9)
    naive = x.mT @ x - 300 * x.mean(1)[:, :, None] * x.mean(1)[:, None, :]
    assert (naive - moments.gram).abs().max() > 1e-6 * moments.gram.abs().max()


@given(cuts=st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted))
def test_merging_is_associative_and_commutative(cuts: list[int]) -> None:
    x, y = rows(50, seed=2, offset=100.0)
    expected = reference(x, y)
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        left, right = parts(x, y, cuts), parts(x, y, cuts)
        first, second, third = (left[index] for index in order)
        first.merge(second)
        first.merge(third)
        assert_close(first, expected, 1e-12)
        first, second, third = (right[index] for index in order)
        second.merge(third)
        first.merge(second)
        assert_close(first, expected, 1e-12)


def parts(x: Tensor, y: Tensor, cuts: list[int]) -> list[Moments]:
    edges = [0, *cuts, x.shape[1]]
    pieces = zip(edges, edges[1:], strict=False)
    return [streamed(x[:, start:stop], y[:, start:stop], []) for start, stop in pieces]


def test_merging_leaves_the_other_as_it_was() -> None:
    x, y = rows(20, seed=3)
    first, second = parts(x, y, [8])[:2]
    kept = {name: getattr(second, name).clone() for name in FIELDS}
    first.merge(second)
    first.add(x, y)
    assert all(torch.equal(getattr(second, name), kept[name]) for name in FIELDS)


def test_float32_and_bfloat16_rows_are_summed_in_float64() -> None:
    x, y = rows(500, seed=4)
    for dtype in (torch.float32, torch.bfloat16):
        rounded = x.to(dtype), y.to(dtype)
        moments = streamed(*rounded, [123, 400])
        assert_close(moments, reference(rounded[0].double(), rounded[1].double()), 1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_a_non_finite_row_is_refused_and_changes_nothing(bad: float, side: int) -> None:
    x, y = rows(20, seed=5)
    moments, untouched = streamed(x, y, []), streamed(x, y, [])
    spoiled = [x.clone(), y.clone()]
    spoiled[side][1, 7, 2] = bad
    with pytest.raises(NonFinite, match="20 rows"):
        moments.add(*spoiled)
    assert_same_bits(moments, untouched)


@pytest.mark.parametrize(
    ("x_shape", "y_shape"),
    [
        ((GROUPS, 5, INPUTS + 1), (GROUPS, 5, OUTPUTS)),
        ((GROUPS, 5, INPUTS), (GROUPS, 5, OUTPUTS + 1)),
        ((GROUPS, 5, INPUTS), (GROUPS, 6, OUTPUTS)),
        ((GROUPS + 1, 5, INPUTS), (GROUPS + 1, 5, OUTPUTS)),
        ((5, INPUTS), (5, OUTPUTS)),
    ],
)
def test_misshapen_rows_are_refused(x_shape: tuple[int, ...], y_shape: tuple[int, ...]) -> None:
    moments = Moments(GROUPS, INPUTS, OUTPUTS)
    with pytest.raises(LayoutError, match=r"expected x \[2, n, 3\] and y \[2, n, 4\]"):
        moments.add(torch.zeros(x_shape), torch.zeros(y_shape))
    assert moments.count == 0


def test_moments_of_another_shape_do_not_merge() -> None:
    with pytest.raises(LayoutError, match="do not belong together"):
        Moments(GROUPS, INPUTS, OUTPUTS).merge(Moments(GROUPS, INPUTS, OUTPUTS + 1))


def test_a_checkpoint_is_bit_exact_and_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    x, y = rows(40, seed=6, offset=5.0)
    moments = streamed(x[:, :25], y[:, :25], [9])
    moments.save(tmp_path / "moments.safetensors")
    loaded = Moments.load(tmp_path / "moments.safetensors")
    assert_same_bits(loaded, moments)
    for resumed in (loaded, moments):
        resumed.add(x[:, 25:], y[:, 25:])
    assert_same_bits(loaded, moments)


def test_an_interrupted_save_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "moments.safetensors"
    old = streamed(*rows(10, seed=7), [])
    old.save(path)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        streamed(*rows(20, seed=8), []).save(path)
    assert_same_bits(Moments.load(path), old)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "moments.safetensors"
    streamed(*rows(10, seed=9), []).save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="damaged"):
        Moments.load(path)
    save_file({"count": torch.tensor(1)}, path)
    with pytest.raises(ArtifactError, match="schema"):
        Moments.load(path)
    with pytest.raises(FileNotFoundError):
        Moments.load(tmp_path / "absent")


def test_a_checkpoint_with_a_wrong_tensor_is_refused() -> None:
    tensors = streamed(*rows(10, seed=10), []).tensors()
    with pytest.raises(ArtifactError, match="gram"):
        Moments.from_tensors({**tensors, "gram": tensors["gram"].float()})
    with pytest.raises(ArtifactError, match="other than"):
        Moments.from_tensors({name: tensors[name] for name in FIELDS})


@pytest.mark.parametrize(
    ("source_heads", "target_heads", "groups"), [(2, 2, 2), (2, 8, 2), (8, 2, 2), (1, 4, 1)]
)
def test_heads_are_matched_in_the_smaller_count_of_groups(
    source_heads: int, target_heads: int, groups: int
) -> None:
    geometry = Geometry(3, source_heads, 4, 2, target_heads, 6)
    assert head_groups(geometry, "per_head") == groups
    assert head_groups(geometry, "all_heads") == 1


def test_heads_that_do_not_divide_cannot_be_matched_but_can_be_read_together() -> None:
    geometry = Geometry(3, 4, 8, 2, 6, 8)
    with pytest.raises(LayoutError, match="4 source and 6 target"):
        PairMoments(geometry, "per_head")
    assert PairMoments(geometry, "all_heads").groups == 1


@pytest.mark.parametrize("structure", ["all_heads", "per_head"])
def test_windows_of_caches_become_rows_of_their_groups(structure: Structure) -> None:
    g = GEOMETRY
    source = random_cache(g.source_layers, 40, g.source_heads, g.source_dim, seed=1)
    target = random_cache(g.target_layers, 40, g.target_heads, g.target_dim, seed=2)
    moments = PairMoments(g, structure)
    for start in (0, 16, 29):
        stop = {0: 16, 16: 29, 29: 40}[start]
        moments.add_window(source.slice(start, stop), target.slice(start, stop))
    assert (moments.windows, moments.count) == (3, 40)
    for group in range(moments.groups):
        read = slice(group * 2 // moments.groups, (group + 1) * 2 // moments.groups)
        written = slice(group * 4 // moments.groups, (group + 1) * 4 // moments.groups)
        for kind, inputs, outputs in (
            (moments.keys, source.keys, target.keys),
            (moments.values, source.values, target.values),
        ):
            x, y = stacked(inputs, read).numpy(), stacked(outputs, written).numpy()
            covariance = np.cov(x, y, rowvar=False) * 39
            split = x.shape[1]
            np.testing.assert_allclose(kind.gram[group], covariance[:split, :split], atol=1e-10)
            np.testing.assert_allclose(kind.cross[group], covariance[:split, split:], atol=1e-10)


def test_pairs_merge_and_resume_bit_for_bit(tmp_path: Path) -> None:
    g = GEOMETRY
    source = random_cache(g.source_layers, 30, g.source_heads, g.source_dim, seed=3)
    target = random_cache(g.target_layers, 30, g.target_heads, g.target_dim, seed=4)
    whole, first, second = (PairMoments(g, "per_head") for _ in range(3))
    for moments, start, stop in ((whole, 0, 12), (first, 0, 12), (second, 12, 30)):
        moments.add_window(source.slice(start, stop), target.slice(start, stop))
    first.save(tmp_path / "pair")
    loaded = PairMoments.load(tmp_path / "pair")
    assert (loaded.geometry, loaded.structure, loaded.windows) == (g, "per_head", 1)
    assert_same_bits(loaded.keys, first.keys)
    assert_same_bits(loaded.values, first.values)
    for resumed in (whole, loaded):
        resumed.add_window(source.slice(12, 30), target.slice(12, 30))
    assert_same_bits(loaded.keys, whole.keys)
    first.merge(second)
    assert (first.windows, first.count) == (2, 30)
    torch.testing.assert_close(first.values.cross, whole.values.cross, rtol=1e-12, atol=1e-12)


def test_windows_that_do_not_fit_leave_a_pair_as_it_was() -> None:
    g = GEOMETRY
    source = random_cache(g.source_layers, 8, g.source_heads, g.source_dim)
    target = random_cache(g.target_layers, 8, g.target_heads, g.target_dim)
    moved = random_cache(g.target_layers, 8, g.target_heads, g.target_dim, start_position=1)
    target.values[1][3, 2, 1] = float("nan")
    moments = PairMoments(g, "all_heads")
    with pytest.raises(NonFinite, match="target layer 1"):
        moments.add_window(source, target)
    with pytest.raises(LayoutError, match="same positions"):
        moments.add_window(source, moved)
    with pytest.raises(LayoutError, match="source has"):
        moments.add_window(moved, moved)
    assert (moments.keys.count, moments.values.count, moments.windows) == (0, 0, 0)


def test_lags_are_kept_and_are_none_where_a_checkpoint_does_not_name_them(tmp_path: Path) -> None:
    g, path = GEOMETRY, tmp_path / "pair"
    source = random_cache(g.source_layers, 9, g.source_heads, g.source_dim)
    target = random_cache(g.target_layers, 9, g.target_heads, g.target_dim)
    for lags in (2, 0):
        moments = PairMoments(g, "joint", lags)
        moments.add_window(source, target, [source] * lags)
        moments.save(path)
        loaded = PairMoments.load(path)
        assert loaded.lags == lags
        assert_same_bits(loaded.keys, moments.keys)
        with pytest.raises(LayoutError, match="do not belong together"):
            loaded.merge(PairMoments(g, "joint", lags + 1))
    tensors, facts = read_checkpoint(path, "kvt-moments-2")
    write_checkpoint(path, tensors, {name: fact for name, fact in facts.items() if name != "lags"})
    assert PairMoments.load(path).lags == 0


@pytest.mark.parametrize(
    "fault",
    [
        {"structure": "some_heads"},
        {"source_heads": "x"},
        {"target_layers": "3"},
        {"lags": "x"},
    ],
)
def test_a_pair_checkpoint_must_fit_its_own_facts(tmp_path: Path, fault: dict[str, str]) -> None:
    path = tmp_path / "pair"
    PairMoments(GEOMETRY, "per_head").save(path)
    tensors, facts = read_checkpoint(path, "kvt-moments-2")
    write_checkpoint(path, tensors, {**facts, **fault})
    with pytest.raises(ArtifactError, match="geometry"):
        PairMoments.load(path)


def test_different_pairs_do_not_merge() -> None:
    with pytest.raises(LayoutError, match="do not belong together"):
        PairMoments(GEOMETRY, "per_head").merge(PairMoments(GEOMETRY, "all_heads"))


def test_sums_that_nothing_was_added_to_take_no_memory() -> None:
    before = resident_bytes()
    empty = Moments(1, 8_000, 100)
    assert empty.gram.nbytes > 500_000_000
    assert resident_bytes() - before < 50_000_000


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
