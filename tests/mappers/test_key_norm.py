"""The norm is found in keys that passed one, and nowhere else; predictions are put back on it."""

from pathlib import Path

import pytest
import torch

from mappers import artifact
from mappers.collect import cache_of_text, content
from mappers.errors import ArtifactError
from mappers.fit import fit_pair
from mappers.key_norm import norm_weights, restore
from mappers.models import LoadedModel
from mappers.translate import Translator
from mappers.vsr import export_vsr
from tests.mappers.test_fit import plan


@pytest.fixture
def weights() -> torch.Tensor:
    return 0.2 + 3 * torch.rand(8, generator=torch.Generator().manual_seed(0))


def normed(weights: torch.Tensor, tokens: int = 50) -> torch.Tensor:
    keys = torch.randn(tokens, 3, 8, generator=torch.Generator().manual_seed(1))
    return weights * keys / keys.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_found_in_the_keys(weights: torch.Tensor, dtype: torch.dtype) -> None:
    found = norm_weights(normed(weights).to(dtype))
    assert found is not None
    torch.testing.assert_close(
        found, weights, rtol=0.05 if dtype == torch.bfloat16 else 1e-4, atol=0
    )


def test_keys_without_a_norm_or_too_few_of_them_show_none(weights: torch.Tensor) -> None:
    assert norm_weights(torch.randn(50, 3, 8)) is None
    assert norm_weights(normed(weights, tokens=5)) is None
    one_off = normed(weights)
    one_off[7, 1] *= 1.1
    assert norm_weights(one_off) is None


def test_whatever_was_shrunk_is_put_back(weights: torch.Tensor) -> None:
    keys = normed(weights)
    shrunk = keys * torch.rand(50, 3, 1)
    torch.testing.assert_close(restore(shrunk, weights), keys, rtol=1e-4, atol=1e-5)
    assert bool(restore(torch.zeros(2, 3, 8), weights).isfinite().all())


def test_a_fit_finds_the_targets_norm_and_its_translations_have_it(
    source: LoadedModel, target: LoadedModel, texts: Path, tmp_path: Path
) -> None:
    """The tiny models' norms have weights of 1."""
    loaded = artifact.load(fit_pair(plan(texts, tmp_path), source, target, progress=False))
    assert loaded.manifest.key_norm
    ids = torch.arange(5, 100)
    given = Translator(loaded.mapper, chunk_tokens=40).translate(
        cache_of_text(source, ids), dtype=torch.float32
    )
    mapped = content(given, target.identity.rope, length=len(ids))
    for layer, keys in zip(loaded.mapper.layers, mapped.keys, strict=True):
        assert layer.key_norm is not None
        torch.testing.assert_close(layer.key_norm, torch.ones(16), rtol=1e-3, atol=0)
        torch.testing.assert_close(keys.square().mean(-1), torch.ones(95, 2), rtol=1e-2, atol=0)
    with pytest.raises(ArtifactError, match="norm"):
        export_vsr(loaded, tmp_path / "vsr", without_prefixes=True)
    asked = plan(texts, tmp_path / "b", key_norm=False)
    assert not artifact.load(fit_pair(asked, source, target, progress=False)).manifest.key_norm
