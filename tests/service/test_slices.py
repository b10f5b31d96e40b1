"""The free list of a pool: no two slices overlap, and no byte is ever lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.slices import ALIGNED_BYTES, Slices, aligned

TOTAL = 64 * ALIGNED_BYTES


def test_sizes_are_rounded_up() -> None:
    assert [aligned(n) for n in (1, 512, 513)] == [512, 512, 1024]
    slices = Slices(2 * ALIGNED_BYTES)
    assert [slices.take(1), slices.take(1)] == [0, ALIGNED_BYTES]
    with pytest.raises(OSError, match="no free part of the pool has 512 bytes"):
        slices.take(1)


def test_neighbours_are_one_again_in_any_order() -> None:
    slices = Slices(3 * ALIGNED_BYTES)
    offsets = [slices.take(1) for _ in range(3)]
    for index in (0, 2, 1):
        slices.give(offsets[index])
    assert slices.take(3 * ALIGNED_BYTES) == 0


def test_a_hole_between_others_is_used_again() -> None:
    slices = Slices(4 * ALIGNED_BYTES)
    _, hole, _ = (slices.take(1) for _ in range(3))
    slices.give(hole)
    with pytest.raises(OSError, match="no free part"):
        slices.take(3 * ALIGNED_BYTES)
    assert slices.take(ALIGNED_BYTES) == hole


@given(st.lists(st.tuples(st.booleans(), st.integers(1, TOTAL // 4)), max_size=60))
def test_whatever_is_taken_and_given(steps: list[tuple[bool, int]]) -> None:
    slices, taken = Slices(TOTAL), dict[int, int]()
    for give, number in steps:
        if give and taken:
            offset = list(taken)[number % len(taken)]
            slices.give(offset)
            del taken[offset]
            continue
        try:
            offset = slices.take(number)
        except OSError:
            continue
        end = offset + aligned(number)
        assert end <= TOTAL
        assert offset % ALIGNED_BYTES == 0
        assert all(end <= other or offset >= other + size for other, size in taken.items())
        taken[offset] = aligned(number)
    for offset in taken:
        slices.give(offset)
    assert slices.take(TOTAL) == 0
