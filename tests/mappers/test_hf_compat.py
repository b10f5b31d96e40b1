"""Both spellings of the cache argument give the same numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from mappers import hf_compat
from mappers.cache import from_hf
from mappers.models import LoadedModel

IDS = torch.arange(100, 124)[None]


class OldSpelling(nn.Module):
    """As before transformers 5.24: ``past_key_values`` in and out; no ``logits_to_keep``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.device = model.device

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        use_cache: bool,
        past_key_values: Cache | None = None,
    ) -> SimpleNamespace:
        cache = past_key_values if past_key_values is not None else DynamicCache()
        name = hf_compat.cache_keyword(self.model)
        new = self.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, **{name: cache}
        )
        return SimpleNamespace(logits=new.logits, past_key_values=cache)


class NewSpelling(OldSpelling):
    """The same with ``cache``."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        use_cache: bool,
        cache: Cache | None = None,
    ) -> SimpleNamespace:
        old = super().forward(input_ids, position_ids, use_cache, cache)
        return SimpleNamespace(logits=old.logits, cache=old.past_key_values)


@pytest.mark.parametrize(
    ("spelling", "word"), [(OldSpelling, "past_key_values"), (NewSpelling, "cache")]
)
def test_either_spelling_reads_in_two_parts_what_one_pass_reads(
    target: LoadedModel, spelling: type[OldSpelling], word: str
) -> None:
    model: Any = spelling(target.model)
    assert hf_compat.cache_keyword(model) == word
    whole, whole_cache = hf_compat.read(target.model, IDS)
    _, first = hf_compat.read(model, IDS[:, :15])
    at = torch.tensor([0, 8])
    logits, cache = hf_compat.read(model, IDS[:, 15:], cache=first, start_position=15, logits_at=at)
    torch.testing.assert_close(logits, whole[:, [15, 23]], rtol=1e-4, atol=1e-4)
    for a, b in zip(from_hf(cache).keys, from_hf(whole_cache).keys, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_installed_transformers_is_called_without_a_deprecation(target: LoadedModel) -> None:
    # Warnings are errors here, so the wrong word would not get through.
    logits, cache = hf_compat.read(target.model, IDS, logits_at=torch.tensor([23]))
    assert logits.shape == (1, 1, 4096)
    assert from_hf(cache).tokens == 24


def test_outputs_without_a_cache_are_an_error() -> None:
    with pytest.raises(ValueError, match="no KV cache"):
        hf_compat.cache_of(SimpleNamespace(logits=None))


def test_stacked_caches_answer_as_each_alone(target: LoadedModel) -> None:
    other = IDS + 50
    caches = [from_hf(hf_compat.read(target.model, ids)[1]) for ids in (IDS, other)]
    last = torch.tensor([[7]])
    model = target.model
    batch = hf_compat.stacked(caches, model.dtype, model.device)
    together, _ = hf_compat.read(model, last.expand(2, -1), cache=batch, start_position=24)
    for row, cache in enumerate(caches):
        single = hf_compat.stacked([cache], model.dtype, model.device)
        alone, _ = hf_compat.read(model, last, cache=single, start_position=24)
        torch.testing.assert_close(together[row], alone[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(together[0], together[1], atol=1e-2)
    assert [cache.tokens for cache in caches] == [24, 24], "the caches themselves must not grow"
