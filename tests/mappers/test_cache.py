"""KVCache: what it refuses, and transformers' DynamicCache both ways."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.models.qwen3 import Qwen3Config

from mappers.cache import KVCache, consecutive, describe, from_hf, to_hf
from mappers.errors import LayoutError, UnsupportedModel


def layers(count: int, shape: tuple[int, ...] = (5, 2, 3), first: int = 0) -> tuple[Tensor, ...]:
    size = torch.Size(shape).numel()
    return tuple(torch.arange(size).reshape(shape) + 1000.0 * (first + i) for i in range(count))


def cache(count: int = 2, start: int = 0) -> KVCache:
    return KVCache(layers(count), layers(count, first=count), consecutive(5, start))


def test_sizes() -> None:
    whole = cache(2)
    assert (whole.num_layers, whole.tokens, whole.num_kv_heads, whole.head_dim) == (2, 5, 2, 3)
    assert whole.nbytes == 2 * 2 * 5 * 2 * 3 * 4
    assert whole.dtype == torch.float32


def test_a_slice_shares_memory_and_keeps_positions() -> None:
    whole = cache(2, start=7)
    part = whole.slice(1, 4)
    assert part.positions.tolist() == [8, 9, 10]
    assert part.tokens == 3
    part.keys[1][0, 1, 2] = -1.0
    assert whole.keys[1][1, 1, 2] == -1.0
    assert torch.equal(part.values[0], whole.values[0][1:4])


@pytest.mark.parametrize(
    ("keys", "values", "positions"),
    [
        pytest.param((), (), consecutive(5), id="no layers"),
        pytest.param(layers(2), layers(1), consecutive(5), id="fewer values"),
        pytest.param(layers(1), layers(1, (5, 2, 4)), consecutive(5), id="other head dim"),
        pytest.param(layers(1), layers(1, (4, 2, 3)), consecutive(5), id="other tokens"),
        pytest.param(layers(1), (layers(1)[0].half(),), consecutive(5), id="other dtype"),
        pytest.param((layers(1)[0].long(),) * 1, (layers(1)[0].long(),), consecutive(5), id="int"),
        pytest.param(layers(1, (30,)), layers(1, (30,)), consecutive(30), id="one dimension"),
        pytest.param(layers(1), layers(1), consecutive(4), id="fewer positions"),
        pytest.param(layers(1), layers(1), consecutive(5).int(), id="int32 positions"),
        pytest.param(layers(1), layers(1), consecutive(5)[:, None], id="2-d positions"),
    ],
)
def test_refuses_parts_that_do_not_fit(
    keys: tuple[Tensor, ...], values: tuple[Tensor, ...], positions: Tensor
) -> None:
    with pytest.raises(LayoutError):
        KVCache(keys, values, positions)


def test_positions_start_at_zero_or_later() -> None:
    assert consecutive(3, 4).tolist() == [4, 5, 6]
    with pytest.raises(LayoutError, match="start_position -1"):
        consecutive(3, -1)


def test_describe_shows_shape_and_dtype_only() -> None:
    assert describe(torch.zeros(2, 3, dtype=torch.bfloat16)) == "bfloat16 [2, 3]"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_hf_round_trip(dtype: torch.dtype) -> None:
    whole = cache(3, start=2)
    typed = KVCache(
        tuple(keys.to(dtype) for keys in whole.keys),
        tuple(values.to(dtype) for values in whole.values),
        whole.positions,
    )
    back = from_hf(to_hf(typed), start_position=2)
    assert back.positions.tolist() == [2, 3, 4, 5, 6]
    for given, found in zip((*typed.keys, *typed.values), (*back.keys, *back.values), strict=True):
        assert torch.equal(given, found)


def test_hf_layers_have_heads_before_tokens() -> None:
    whole = cache(1)
    converted = to_hf(whole)
    assert converted.get_seq_length() == 5
    states = converted.layers[0].keys
    assert states is not None
    assert states.shape == (1, 2, 5, 3)
    assert torch.equal(states[0, 1, 4], whole.keys[0][4, 1])


def test_hf_cache_is_a_copy() -> None:
    whole = cache(1)
    converted = to_hf(whole)
    whole.keys[0].zero_()
    assert bool(converted.layers[0].keys.any())


def filled(made: DynamicCache, tokens: int = 5, batch: int = 1) -> DynamicCache:
    for layer in range(2):
        states = torch.ones(batch, 2, tokens, 4)
        made.update(states, states, layer)
    return made


def config(**changes: object) -> Qwen3Config:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 8}
    return Qwen3Config(num_hidden_layers=2, **sizes, **changes)


def test_a_cache_made_for_a_config_is_read_too() -> None:
    assert from_hf(filled(DynamicCache(config=config()))).tokens == 5


def test_refuses_sliding_layers() -> None:
    sliding = config(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(UnsupportedModel, match="layer 1 is a DynamicSlidingWindowLayer") as error:
        from_hf(filled(DynamicCache(config=sliding)))
    assert error.value.reason == "sliding_window"


def test_refuses_linear_attention_layers() -> None:
    linear = config(layer_types=["linear_attention", "full_attention"])
    with pytest.raises(UnsupportedModel) as error:
        from_hf(DynamicCache(config=linear))
    assert error.value.reason == "linear_attention"


def test_refuses_static_caches() -> None:
    with pytest.raises(UnsupportedModel) as error:
        from_hf(StaticCache(config=config(), max_cache_len=8))
    assert error.value.reason == "unsupported_cache"


def test_refuses_encoder_decoder_caches() -> None:
    with pytest.raises(UnsupportedModel) as error:
        from_hf(EncoderDecoderCache(filled(DynamicCache()), DynamicCache()))
    assert error.value.reason == "encoder_decoder"


def test_refuses_a_batch() -> None:
    with pytest.raises(LayoutError, match=r"layer 0: expected \[1, heads, tokens, dim\]"):
        from_hf(filled(DynamicCache(), batch=2))


def test_refuses_an_empty_cache() -> None:
    with pytest.raises(LayoutError, match="no layers"):
        from_hf(DynamicCache())
    with pytest.raises(LayoutError, match="got nothing"):
        from_hf(DynamicCache(config=config()))
