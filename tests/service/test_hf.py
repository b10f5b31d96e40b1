"""transformers in one line, proven by what the target then writes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Cache, Qwen3Config, Qwen3ForCausalLM

from mappers import hf_compat
from mappers.cache import KVCache, from_hf
from mappers.errors import LayoutError
from mappers.identity import IdentityClaim, ModelIdentity, check
from mappers.layouts import Layout
from mappers.rope import Rope
from mappers.translate import Translator
from service.client import Client, NotTranslated, Reprefill, Translated
from service.hf import cache_from, claim_of, request_for, translate_cache, unread
from service.schemas import Receipt
from tests.service.live import Live
from tests.service.pair import PREFIX_IDS, SOURCE, TARGET, mapper

TOKENS = 48
NEW_TOKENS = 24


def model(identity: ModelIdentity, seed: int) -> Qwen3ForCausalLM:
    """Random weights of this identity's geometry, large enough for the context to matter."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=identity.num_layers,
        num_attention_heads=4,
        num_key_value_heads=identity.num_kv_heads,
        head_dim=identity.head_dim,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": identity.rope.theta},
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    made: Qwen3ForCausalLM = Qwen3ForCausalLM(config).train(False)
    return made


@pytest.fixture(scope="module")
def source() -> Qwen3ForCausalLM:
    return model(SOURCE, 1)


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    return model(TARGET, 2)


@pytest.fixture(scope="module")
def prompt_ids() -> torch.Tensor:
    ids = torch.randint(1, 64, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    ids[0, : len(PREFIX_IDS)] = torch.tensor(PREFIX_IDS)
    return ids


@pytest.fixture
def client(live: Live) -> Iterator[Client]:
    with Client(f"http://127.0.0.1:{live.port}") as running:
        yield running


def written(target: Qwen3ForCausalLM, ids: torch.Tensor, **cache: Any) -> list[int]:
    """Greedy continuation."""
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        **cache,
    )
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def read_by(model: Qwen3ForCausalLM, ids: torch.Tensor) -> Cache:
    return hf_compat.read(model, ids)[1]


def native_answer(target: Qwen3ForCausalLM, ids: torch.Tensor, tail: int) -> Translated:
    """What a perfect translation would answer: the target's own cache but for the tail."""
    tokens = ids.shape[1] - tail
    receipt = Receipt(
        mapper="perfect",
        digest="sha256:00",
        tokens=tokens,
        start_position=0,
        native_tail=tail,
        prefix_tokens=0,
        layout=Layout.NHD,
        block_tokens=None,
        dtype="float32",
        kl_bound=0.0,
        max_kl=0.05,
        risk="exceedance",
        alpha=0.1,
        delta=0.05,
        kl_clip=1.0,
        rows=60,
        guarantee="exact",
        unproven=False,
        token_ids_sha256=None,
    )
    return Translated(from_hf(read_by(target, ids[:, :tokens])), receipt)


class TestHandOver:
    @pytest.mark.parametrize("tail", [1, 7, 32])
    @pytest.mark.parametrize("spelling", ["cache", "past_key_values"])
    @pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
    def test_generate_reads_the_tail_and_goes_on_as_natively(
        self, target: Qwen3ForCausalLM, prompt_ids: torch.Tensor, tail: int, spelling: str
    ) -> None:
        cache = cache_from(native_answer(target, prompt_ids, tail), prompt_ids)
        assert cache is not None
        assert cache.get_seq_length() == TOKENS - tail
        assert written(target, prompt_ids, **{spelling: cache}) == written(target, prompt_ids)

    def test_the_context_matters_to_this_target(
        self, target: Qwen3ForCausalLM, prompt_ids: torch.Tensor
    ) -> None:
        other = prompt_ids.roll(1)
        cache = cache_from(native_answer(target, other, 1), prompt_ids)
        given = hf_compat.cache_arguments(target, cache)
        assert written(target, prompt_ids, **given) != written(target, prompt_ids)

    @pytest.mark.parametrize("tail", [1, 7])
    def test_forward_over_what_is_unread(
        self, target: Qwen3ForCausalLM, prompt_ids: torch.Tensor, tail: int
    ) -> None:
        cache = cache_from(native_answer(target, prompt_ids, tail), prompt_ids)
        rest = unread(cache, prompt_ids)
        assert rest.shape == (1, tail)
        given = hf_compat.cache_arguments(target, cache)
        logits = target(input_ids=rest, **given).logits
        plain = target(input_ids=prompt_ids).logits[:, -tail:]
        torch.testing.assert_close(logits, plain, atol=1e-4, rtol=1e-4)

    def test_one_token_is_always_left_to_read(
        self, target: Qwen3ForCausalLM, prompt_ids: torch.Tensor
    ) -> None:
        cache = cache_from(native_answer(target, prompt_ids, 0), prompt_ids)
        assert cache is not None
        assert cache.get_seq_length() == TOKENS - 1
        given = hf_compat.cache_arguments(target, cache)
        assert written(target, prompt_ids, **given) == written(target, prompt_ids)

    def test_the_service_may_know_less_than_the_prompt(
        self, target: Qwen3ForCausalLM, prompt_ids: torch.Tensor
    ) -> None:
        """A turn was added after the source's cache: all of it is left to the target."""
        known = native_answer(target, prompt_ids[:, :20], 4)
        cache = cache_from(known, prompt_ids)
        assert unread(cache, prompt_ids).shape == (1, TOKENS - 16)
        given = hf_compat.cache_arguments(target, cache)
        assert written(target, prompt_ids, **given) == written(target, prompt_ids)

    def test_without_a_translation_everything_is_unread(self, prompt_ids: torch.Tensor) -> None:
        assert cache_from(Reprefill("no_evidence", "none"), prompt_ids) is None
        assert torch.equal(unread(None, prompt_ids), prompt_ids)


class TestOverHttp:
    def test_one_line_from_cache_to_cache(
        self,
        client: Client,
        source: Qwen3ForCausalLM,
        target: Qwen3ForCausalLM,
        prompt_ids: torch.Tensor,
    ) -> None:
        theirs = read_by(source, prompt_ids)
        cache = translate_cache(theirs, client, source=SOURCE, target=TARGET, prompt_ids=prompt_ids)
        assert cache is not None
        built = mapper()
        match = built.prefixes.longest_match(PREFIX_IDS)
        assert match is not None
        expected: KVCache = Translator(built).translate(
            from_hf(theirs), tokens=TOKENS - 1, prefix=match[1], dtype=torch.float32
        )
        given = from_hf(cache)
        for ours, wanted in zip(
            given.keys + given.values, expected.keys + expected.values, strict=True
        ):
            assert torch.equal(ours, wanted)
        over = hf_compat.cache_arguments(target, cache)
        assert len(written(target, prompt_ids, **over)) == NEW_TOKENS

    def test_limits_are_passed_on_and_none_means_prefill(
        self, client: Client, source: Qwen3ForCausalLM, prompt_ids: torch.Tensor
    ) -> None:
        theirs = read_by(source, prompt_ids)
        sides: dict[str, Any] = {"source": SOURCE, "target": TARGET, "prompt_ids": prompt_ids}
        tailed = translate_cache(theirs, client, **sides, max_kl=0.015)
        assert tailed is not None
        assert unread(tailed, prompt_ids).shape == (1, 8)
        assert translate_cache(theirs, client, **sides, max_kl=1e-6) is None
        with pytest.raises(NotTranslated):
            translate_cache(theirs, client, **sides, max_kl=1e-6, strict=True)

    def test_a_cache_of_more_tokens_than_ids(
        self, source: Qwen3ForCausalLM, prompt_ids: torch.Tensor
    ) -> None:
        with pytest.raises(LayoutError, match=f"{TOKENS} tokens for 9 token ids"):
            request_for(
                read_by(source, prompt_ids),
                source=SOURCE,
                target=TARGET,
                prompt_ids=prompt_ids[:, :9],
            )


class TestClaim:
    @pytest.mark.parametrize(
        "rope",
        [
            SOURCE.rope,
            Rope(
                type="linear",
                theta=1e6,
                head_dim=8,
                max_position_embeddings=512,
                parameters={"factor": 4.0},
            ),
            Rope(
                type="yarn",
                theta=1e6,
                head_dim=8,
                max_position_embeddings=512,
                parameters={"factor": 4.0, "original_max_position_embeddings": 128},
            ),
        ],
    )
    def test_what_is_claimed_of_a_model_is_that_model(self, rope: Rope) -> None:
        identity = ModelIdentity.model_validate({**dict(SOURCE), "rope": rope})
        claim = claim_of(identity)
        check(identity, IdentityClaim.model_validate_json(claim.model_dump_json()), "source")
        assert claim.num_layers == identity.num_layers
        assert claim_of(claim) is claim
