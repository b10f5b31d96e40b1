"""Which source layers share memory: by hand on small plans, by their promise on random ones."""

from hypothesis import given
from hypothesis import strategies as st

from mappers.slots import Slots

SOURCE_LAYERS = 9
PLANS = st.lists(
    st.sets(st.integers(0, SOURCE_LAYERS - 1), min_size=1).map(lambda read: tuple(sorted(read))),
    min_size=1,
    max_size=7,
)


def test_a_window_that_moves_on_is_one_run() -> None:
    window = [(layer, layer + 1, layer + 2) for layer in range(6)]
    slots = Slots.of(window)
    assert slots.count == 3
    assert all(slots.runs(sources) == [slice(0, 3)] for sources in window)
    assert slots.in_order((1, 2, 3)) == (3, 1, 2)


def test_layers_between_which_another_lies_are_two_runs() -> None:
    slots = Slots.of([(0, 1, 2, 3), (0, 2, 3), (1,)])
    assert slots.runs((0, 2, 3)) == [slice(0, 1), slice(2, 4)]


@given(PLANS)
def test_no_two_layers_that_are_needed_share_a_slot(plan: list[tuple[int, ...]]) -> None:
    slots = Slots.of(plan)
    for index in range(len(plan)):
        begun = {source for sources in plan[: index + 1] for source in sources}
        needed = begun & {source for sources in plan[index:] for source in sources}
        assert len({slots.of_source[source] for source in needed}) == len(needed)
    assert set(slots.of_source.values()) == set(range(slots.count))


@given(PLANS)
def test_runs_are_what_is_read_in_the_order_of_memory(plan: list[tuple[int, ...]]) -> None:
    slots = Slots.of(plan)
    for sources in plan:
        runs = slots.runs(sources)
        read = [slot for run in runs for slot in range(run.start, run.stop)]
        assert read == [slots.of_source[source] for source in slots.in_order(sources)]
        assert all(b.start > a.stop for a, b in zip(runs, runs[1:], strict=False))
