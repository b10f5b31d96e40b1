"""What benchmarks are made of: rounds, random mappers, sizes that are refused."""

import math

import pytest
import torch

from mappers.bench_hardware import check_room, free_bytes
from mappers.bench_pairs import PAIRS, random_cache, random_mapper
from mappers.bench_room import artifact_bytes, check_sizes
from mappers.bench_rounds import take_turns
from mappers.bench_speed import Conditions, Prefill, measure
from mappers.errors import TooLittleMemory
from mappers.recipes import RECIPES, check_shapes
from mappers.translate import Translator

DEMO = PAIRS["demo"]
CONDITIONS = Conditions(device="cpu", dtype=torch.float32, rounds=1)


def test_steps_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    own = iter([90.0, 1.0, 5.0, 2.0])

    def first() -> float:
        order.append("first")
        return next(own)

    seconds = take_turns({"first": first, "second": lambda: order.append("second")}, 3)
    assert order == ["first", "second"] * 4
    assert seconds["first"] == 2.0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_random_mapper_is_one_and_has_the_bytes_that_are_predicted(
    recipe: str, dtype: torch.dtype
) -> None:
    mapper = random_mapper(DEMO, recipe=recipe, k=3, dtype=dtype)
    check_shapes(mapper)
    stored = sum(affine.weight.nbytes for _, affine in mapper.affine_maps())
    assert stored == artifact_bytes(DEMO, recipe, 3, dtype)
    cache = random_cache(DEMO, 5, torch.float32, "cpu")
    answer = Translator(mapper).translate(cache, dtype=torch.float32)
    assert 0.3 < float(answer.values[0].std()) < 3


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_speed_has_what_was_measured_and_none_for_what_was_not(recipe: str) -> None:
    translator = Translator(random_mapper(DEMO, recipe=recipe, k=2))
    prefill = Prefill(DEMO, "cpu")
    prefill.note(8, seconds=2.0)
    speed = measure(DEMO, translator, 8, CONDITIONS, prefill=prefill)
    assert speed.prefill_tokens_per_second == 4.0
    assert speed.peer_tokens_per_second is None
    expected = speed.translate_tokens_per_second / 4.0
    assert speed.translate_over_prefill == pytest.approx(expected, rel=0.05, abs=0.05)


def test_what_does_not_fit_in_memory_or_on_disk_is_refused() -> None:
    free = free_bytes("cpu")
    if free is not None:
        check_room(free // 2, "cpu", "half of it")
        with pytest.raises(TooLittleMemory, match="twice as much take"):
            check_room(2 * free, "cpu", "twice as much")
    where = {"device": "cpu", "dtype": torch.float32}
    with pytest.raises(TooLittleMemory, match="the artifact's files"):
        check_sizes(DEMO, "full_head", 2, torch.float32, 8, **where, disk_bytes=1000)  # type: ignore[arg-type]


def test_shapes_are_those_of_the_published_configs() -> None:
    pair = PAIRS["qwen3-14b:qwen3-32b"]
    source, target = pair.identities()
    assert (source.num_layers, target.num_layers) == (40, 64)
    assert math.prod((target.num_kv_heads, target.head_dim)) == 1024
    # 2 GFLOP a token with 8 layers by full_head: what the issue of the paper's pair says.
    flops = 2 * artifact_bytes(pair, "full_head", 8, torch.float32) // 4
    assert flops == pytest.approx(2.1e9, rel=0.05)
