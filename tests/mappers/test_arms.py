"""What the target reads, against forward passes written by hand."""

import pytest
import torch

from mappers import hf_compat
from mappers.arms import CONTINUATION_TOKENS, read_document, read_tail
from mappers.cache import KVCache, from_hf
from mappers.models import LoadedModel
from mappers.prefixes import ExactPrefixes
from mappers.scored import read_scored
from mappers.translate import Translator

LENGTH = 80
IDS = torch.randint(1, 4_000, (LENGTH + CONTINUATION_TOKENS,), generator=torch.manual_seed(5))


def forward_with_mask(model: LoadedModel, ids: torch.Tensor, hidden: int) -> torch.Tensor:
    """One pass over all ids in which tokens from ``hidden`` on cannot see those before it."""
    tokens = len(ids)
    seen = torch.ones(tokens, tokens).tril().bool()
    seen[hidden:, :hidden] = False
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        return model.model(input_ids=ids[None], attention_mask=mask).logits[0]


@pytest.mark.parametrize("tail", [1, 32, 79])
def test_a_tail_over_the_native_cache_is_the_native_forward_pass(
    target: LoadedModel, tail: int
) -> None:
    logits, cache = hf_compat.read(target.model, IDS[None, :-1])
    got = read_tail(target, [from_hf(cache)], IDS, length=LENGTH, tail=tail)
    torch.testing.assert_close(got[0], logits[0, LENGTH - 1 :], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("tail", [1, 32, 64])
def test_a_tail_over_nothing_is_a_forward_pass_that_cannot_see_the_rest(
    target: LoadedModel, tail: int
) -> None:
    expected = forward_with_mask(target, IDS[:-1], LENGTH - tail)[LENGTH - 1 :]
    got = read_tail(target, [], IDS, length=LENGTH, tail=tail)
    torch.testing.assert_close(got[0], expected, rtol=1e-4, atol=2e-4)
    native = forward_with_mask(target, IDS[:-1], 0)[LENGTH - 1 :]
    assert not torch.allclose(native, expected, atol=0.1), "the rest of the prompt must matter"


def test_each_cache_of_a_batch_is_answered_on_its_own(target: LoadedModel) -> None:
    own = from_hf(hf_compat.read(target.model, IDS[None, :-1])[1])
    other = from_hf(hf_compat.read(target.model, IDS.flip(0)[None, :-1])[1])
    both = read_tail(target, [own, other], IDS, length=LENGTH, tail=3)
    for row, cache in enumerate((own, other)):
        alone = read_tail(target, [cache], IDS, length=LENGTH, tail=3)[0]
        torch.testing.assert_close(both[row], alone, rtol=1e-4, atol=2e-4)
    assert not torch.allclose(both[0], both[1], atol=0.1)


class Doubling:
    """In place of a Translator: an answer that shows what it was given."""

    def translate(
        self, source: KVCache, *, dtype: torch.dtype, prefix: KVCache | None = None
    ) -> KVCache:
        keys = [keys.to(dtype) * 2 for keys in (*source.keys, source.keys[0])]
        if prefix is not None:
            for layer, exact in enumerate(prefix.keys):
                keys[layer][: prefix.tokens] = exact
        return KVCache(tuple(keys), tuple(keys), source.positions)


def doubling() -> Translator:
    return Doubling()  # type: ignore[return-value]


def test_a_reading_holds_both_models_own_predictions_at_every_length_that_fits(
    source: LoadedModel, target: LoadedModel
) -> None:
    reading = read_document(source, target, doubling(), ExactPrefixes(), IDS, (40, 80, 81))
    assert reading.lengths == (40, 80)
    for model, found in ((target, reading.native_logits), (source, reading.source_logits)):
        whole = hf_compat.read(model.model, IDS[None])[0][0]
        for at, length in enumerate(reading.lengths):
            expected = whole[length - 1 : length + 31]
            torch.testing.assert_close(found[at], expected, rtol=1e-4, atol=2e-4)
    assert torch.equal(reading.next_ids(40), IDS[40:72])


def test_the_prefix_is_the_tables_or_else_the_targets_own_first_token(
    source: LoadedModel, target: LoadedModel
) -> None:
    native = from_hf(hf_compat.read(target.model, IDS[None])[1])
    known = ExactPrefixes.of({tuple(IDS[:3].tolist()): native.slice(0, 3)})
    for table, tokens in ((known, 3), (ExactPrefixes(), 1)):
        reading = read_document(source, target, doubling(), table, IDS, (40,))
        exact, mapped = reading.prefix_known.keys[1], reading.prefix_unknown.keys[1]
        torch.testing.assert_close(exact[:tokens], native.keys[1][:tokens], rtol=1e-4, atol=1e-4)
        assert torch.equal(exact[tokens:], mapped[tokens:])
        assert not torch.allclose(exact[:tokens], mapped[:tokens], atol=0.1)


def test_scores_in_stretches_are_those_of_one_pass(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = torch.tensor([60, 3, 60, 110])
    ids = torch.stack([IDS, IDS.flip(0)])
    whole = read_scored(target.model, ids, logits_at=at)
    logits, _ = hf_compat.read(target.model, ids)
    monkeypatch.setattr("mappers.scored.LOGITS_AT_MOST", 2 * 4_096 * 25)
    parts = read_scored(target.model, ids, logits_at=at)
    expected = -logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    for found in (whole, parts):
        torch.testing.assert_close(found.logits, logits[:, at], rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(found.nll, expected, rtol=1e-4, atol=2e-4)
        assert found.cache.get_seq_length() == ids.shape[1]
