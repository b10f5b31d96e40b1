"""The table of exact prefixes: what it finds, how it is stored, what it refuses."""

import dataclasses

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from mappers.cache import KVCache
from mappers.errors import LayoutError
from mappers.prefixes import ExactPrefixes, TokenIds
from tests.mappers.pairs import random_cache

LAYERS, HEADS, DIM = 2, 3, 4


def entry(tokens: int, seed: int) -> KVCache:
    return random_cache(LAYERS, tokens, HEADS, DIM, seed=seed)


ENTRIES: dict[TokenIds, KVCache] = {
    (5,): entry(1, 1),
    (6,): entry(1, 2),
    (0,): entry(1, 3),
    (5, 7, 9): entry(3, 4),
    (8, 5, 7): entry(3, 5),
}


def same(first: KVCache, second: KVCache) -> bool:
    pairs = zip((*first.keys, *first.values), (*second.keys, *second.values), strict=True)
    return all(torch.equal(a, b) for a, b in pairs) and torch.equal(
        first.positions, second.positions
    )


@pytest.fixture(params=["built", "stored"])
def table(request: pytest.FixtureRequest) -> ExactPrefixes:
    """As built, and after a way through safetensors bytes."""
    built = ExactPrefixes.of(ENTRIES)
    return (
        built
        if request.param == "built"
        else ExactPrefixes.from_tensors(load(save(built.tensors())))
    )


@pytest.mark.parametrize(
    ("ids", "known"),
    [
        ([5], (5,)),
        ([5, 1, 1], (5,)),
        ([5, 7, 9, 2, 2], (5, 7, 9)),
        ([6, 7, 9], (6,)),
        ([0], (0,)),
    ],
)
def test_the_longest_known_sequence_is_found(
    table: ExactPrefixes, ids: list[int], known: TokenIds
) -> None:
    found = table.longest_match(ids)
    assert found is not None
    assert found[0] == len(known)
    assert same(found[1], ENTRIES[known])


def test_the_head_of_a_known_sequence_is_known(table: ExactPrefixes) -> None:
    found = table.longest_match([8, 5, 1, 1])
    assert found is not None
    assert found[0] == 2
    assert same(found[1], ENTRIES[8, 5, 7].slice(0, 2))


@pytest.mark.parametrize("ids", [[], [7], [9, 5], [1]])
def test_what_is_not_known_is_not_found(table: ExactPrefixes, ids: list[int]) -> None:
    assert table.longest_match(ids) is None


def test_single_tokens_are_stored_in_one_tensor_a_layer_and_kind() -> None:
    table = ExactPrefixes.of(ENTRIES)
    tensors = table.tensors()
    assert set(tensors) == {
        f"prefix.{p}.{rest}" for p in (1, 3) for rest in ("ids", "0.k", "0.v", "1.k", "1.v")
    }
    assert tensors["prefix.1.ids"].tolist() == [[5], [6], [0]]
    assert tensors["prefix.3.1.v"].shape == (2, 3, HEADS, DIM)
    assert len(table) == 5
    assert table.nbytes == sum(tensor.nbytes for tensor in tensors.values())


def test_an_empty_table_is_a_table() -> None:
    table = ExactPrefixes.from_tensors(ExactPrefixes().tensors())
    assert table.longest_match([1, 2]) is None
    assert (len(table), table.nbytes) == (0, 0)
    table.check_geometry(1, 1, 1)


def test_the_geometry_is_checked() -> None:
    table = ExactPrefixes.of(ENTRIES)
    table.check_geometry(LAYERS, HEADS, DIM)
    with pytest.raises(LayoutError, match=r"\(2, 3, 4\), the target has \(2, 4, 3\)"):
        table.check_geometry(LAYERS, DIM, HEADS)


def broken(**changes: Tensor | None) -> dict[str, Tensor]:
    tensors = ExactPrefixes.of(ENTRIES).tensors() | {
        name.replace("_", "."): tensor for name, tensor in changes.items() if tensor is not None
    }
    gone = {name.replace("_", ".") for name, tensor in changes.items() if tensor is None}
    return {name: tensor for name, tensor in tensors.items() if name not in gone}


NAN = torch.full((3, 1, HEADS, DIM), float("nan"))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (broken(prefix_1_1_v=None), "exactly 10 tensors"),
        (broken(prefix_1_ids=None), "tensors"),
        (broken(prefix_1_2_k=torch.ones(3, 1, HEADS, DIM)), "exactly 14 tensors"),
        (broken(surplus=torch.ones(1)), "exactly 10 tensors"),
        (broken(prefix_01_ids=torch.ones(1, 1, dtype=torch.int64)), "tensors"),
        (broken(prefix_1_0_k=torch.ones(3, 1, DIM, HEADS)), "prefix KV of layer"),
        (broken(prefix_3_0_k=torch.ones(2, 2, HEADS, DIM)), "prefix KV of layer 0"),
        (broken(prefix_1_0_k=torch.ones(3, 1)), "prefix KV of layer 0"),
        (broken(prefix_1_1_v=NAN), "prefix KV of layer 1 must be finite"),
        (broken(prefix_1_1_v=torch.ones(3, 1, HEADS, DIM).int()), "finite floats"),
        (broken(prefix_1_ids=torch.tensor([[5], [6]])), "prefix KV of layer 0"),
        (broken(prefix_1_ids=torch.tensor([[5], [6], [-1]])), "non-negative"),
        (broken(prefix_1_ids=torch.tensor([[5.0], [6.0], [0.0]])), "int64"),
        (broken(prefix_1_ids=torch.tensor([[5], [6], [5]])), "twice"),
        (broken(prefix_1_ids=torch.tensor([[5, 6, 0]])), "ids of shape"),
        (broken(prefix_1_ids=torch.tensor([5, 6, 0])), "ids of shape"),
    ],
)
def test_a_table_that_is_not_whole_is_refused(tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ExactPrefixes.from_tensors(tensors)


@pytest.mark.parametrize(
    "entries",
    [
        {(): entry(1, 1)},
        {(1, 2): entry(1, 1)},
        {(1,): dataclasses.replace(entry(1, 1), positions=torch.tensor([1]))},
        {(1,): entry(1, 1), (2,): random_cache(LAYERS + 1, 1, HEADS, DIM)},
        {(1,): entry(1, 1), (2, 3): random_cache(LAYERS + 1, 2, HEADS, DIM)},
    ],
)
def test_caches_that_do_not_fit_their_ids_or_each_other_are_refused(
    entries: dict[TokenIds, KVCache],
) -> None:
    with pytest.raises(LayoutError):
        ExactPrefixes.of(entries)
