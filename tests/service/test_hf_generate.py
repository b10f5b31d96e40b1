"""What ``generate`` does over a translated cache: the same as one step at a time with positions and
mask spelled out, and, where the mapper is exact, the same as without a translation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, Qwen3ForCausalLM

from mappers import hf_compat
from mappers.cache import from_hf
from mappers.identity import ModelIdentity
from mappers.mapper import AffineMap, LayerMap, Mapper
from mappers.prefixes import ExactPrefixes
from service.client import Client
from service.hf import translate_cache, unread
from service.settings import Settings
from tests.service.pair import SOURCE, TARGET, identity, publish
from tests.service.test_hf import NEW_TOKENS, model, read_by, written
from tests.service.threaded import serving

TOKENS = 48
# Two names for one model: what maps between them exactly is the identity.
TWINS = tuple(identity(name, layers=4, theta=500_000.0) for name in ("twin-a", "twin-b"))


def identity_mapper() -> Mapper:
    """Every target layer is the source layer of its number."""
    width = TWINS[0].num_kv_heads * TWINS[0].head_dim
    same = AffineMap(torch.eye(width), torch.zeros(width))
    layers = tuple(LayerMap((index,), same, same) for index in range(TWINS[0].num_layers))
    return Mapper(*TWINS, "full_head", layers, ExactPrefixes(), 0)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of a service with the identity between the twins, and the random maps of the tiny pair."""
    root = tmp_path_factory.mktemp("artifacts")
    publish(root)
    publish(root, identity_mapper())
    with serving(Settings(artifacts=(root,), shadow_rate=0)) as running:
        with Client(running.url) as found:
            yield found


@pytest.fixture(scope="module")
def prompt_ids() -> Tensor:
    return torch.randint(10, 64, (1, TOKENS), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def twin() -> Qwen3ForCausalLM:
    """Random weights, under both names."""
    return model(TWINS[0], 2)


def step_by_step(target: Qwen3ForCausalLM, ids: Tensor, cache: Cache) -> list[int]:
    """Greedy decoding without ``generate``: every position and the whole mask are given."""
    known, step, tokens = cache.get_seq_length(), unread(cache, ids), list[int]()
    for _ in range(NEW_TOKENS):
        seen = known + step.shape[1]
        with torch.inference_mode():
            out: Any = target(
                input_ids=step,
                position_ids=torch.arange(known, seen)[None],
                attention_mask=torch.ones(1, seen, dtype=torch.int64),
                **hf_compat.cache_arguments(target, cache),
            )
        known, step = seen, out.logits[:, -1:].argmax(-1)
        tokens.append(int(step))
    return tokens


def over(target: Qwen3ForCausalLM, ids: Tensor, cache: Cache) -> list[int]:
    """What ``generate`` writes."""
    return written(target, ids, **hf_compat.cache_arguments(target, cache))


def translated(
    client: Client, cache: Cache, sides: tuple[ModelIdentity, ModelIdentity], ids: Tensor
) -> DynamicCache:
    found = translate_cache(cache, client, source=sides[0], target=sides[1], prompt_ids=ids)
    assert found is not None
    return found


class TestAnExactMapper:
    def test_the_cache_is_the_targets_own(
        self, client: Client, twin: Qwen3ForCausalLM, prompt_ids: Tensor
    ) -> None:
        own = read_by(twin, prompt_ids)
        found = from_hf(translated(client, own, TWINS, prompt_ids))
        assert found.tokens == TOKENS - 8
        for ours, theirs in zip(
            found.keys + found.values, from_hf(own).keys + from_hf(own).values, strict=True
        ):
            torch.testing.assert_close(ours, theirs[: found.tokens], atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("known", [16, 40, TOKENS])
    def test_generate_goes_on_as_natively(
        self, client: Client, twin: Qwen3ForCausalLM, prompt_ids: Tensor, known: int
    ) -> None:
        """Whatever part of the prompt the source has read."""
        own = read_by(twin, prompt_ids[:, :known])
        cache = translated(client, own, TWINS, prompt_ids)
        assert unread(cache, prompt_ids).shape[1] == TOKENS - known + 8
        assert over(twin, prompt_ids, cache) == written(twin, prompt_ids)

    def test_a_conversation_goes_back_and_forth(
        self, client: Client, twin: Qwen3ForCausalLM, prompt_ids: Tensor
    ) -> None:
        """The cache that ``generate`` leaves, with what it has written, is translated again."""
        turn = twin.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=NEW_TOKENS // 2,
            do_sample=False,
            return_dict_in_generate=True,
            **hf_compat.cache_arguments(
                twin, translated(client, read_by(twin, prompt_ids), TWINS, prompt_ids)
            ),
        )
        ids = torch.cat((turn.sequences, prompt_ids[:, :5]), dim=1)
        cache = translated(client, hf_compat.cache_of(turn), TWINS, ids)
        assert cache.get_seq_length() == TOKENS + NEW_TOKENS // 2 - 1 - 8
        assert over(twin, ids, cache) == written(twin, ids)


class TestAnApproximateMapper:
    def test_generate_is_decoding_step_by_step(self, client: Client, prompt_ids: Tensor) -> None:
        source, target = model(SOURCE, 1), model(TARGET, 2)
        theirs = read_by(source, prompt_ids)
        caches = [translated(client, theirs, (SOURCE, TARGET), prompt_ids) for _ in range(2)]
        at_once, stepwise = (
            over(target, prompt_ids, caches[0]),
            step_by_step(target, prompt_ids, caches[1]),
        )
        assert at_once == stepwise
        # Random maps: had the translated tokens not been read, it would have written the same.
        assert at_once != written(target, prompt_ids)
        assert caches[0].get_seq_length() == TOKENS + NEW_TOKENS - 1
