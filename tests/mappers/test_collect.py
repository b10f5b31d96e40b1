"""The same tokens through both models, sampled, stripped, summed; stopped and resumed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from mappers import collect as module
from mappers.cache import KVCache
from mappers.collect import (
    Checkpoints,
    aligned,
    collect,
    content,
    sampled_positions,
    sampled_rows,
)
from mappers.corpus import Corpus, calibration, read
from mappers.errors import CorpusError, UnsupportedModel
from mappers.geometry import Geometry
from mappers.models import LoadedModel
from mappers.moments import PairMoments


@pytest.fixture
def corpus(texts: Path, tokenizer: PreTrainedTokenizerFast) -> Corpus:
    return calibration(read([texts]), tokenizer, window_tokens=100, windows=10)


def empty(source: LoadedModel, target: LoadedModel) -> PairMoments:
    return PairMoments(Geometry.of(source.identity, target.identity), "all_heads")


def same_bits(a: PairMoments, b: PairMoments) -> bool:
    pairs = [(a.keys, b.keys), (a.values, b.values)]
    return a.windows == b.windows and all(
        torch.equal(tensor, other.tensors()[name])
        for one, other in pairs
        for name, tensor in one.tensors().items()
    )


def test_content_keys_are_the_normed_projections_before_rotation(target: LoadedModel) -> None:
    ids = torch.arange(30, 60)
    cache, _ = aligned(target, target, ids)
    stripped = content(cache, target.identity.rope, length=30)
    layer = target.model.model.layers[0]
    with torch.no_grad():
        hidden = layer.input_layernorm(target.model.model.embed_tokens(ids))
        keys = layer.self_attn.k_norm(layer.self_attn.k_proj(hidden).view(30, 2, 16))
        values = layer.self_attn.v_proj(hidden).view(30, 2, 16)
    torch.testing.assert_close(stripped.keys[0], keys, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stripped.values[0], values, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(cache.keys[0], keys, atol=1e-2), "the cached keys are rotated"


def test_sampled_positions_skip_the_first_and_rotate() -> None:
    def taken(window: int, tokens: int = 16) -> list[int]:
        return sampled_positions(tokens, window, stride=4, skip_positions=3).tolist()

    assert [taken(w) for w in (0, 1, 4)] == [[3, 7, 11, 15], [4, 8, 12], [3, 7, 11, 15]]
    assert sorted(p for w in range(4) for p in taken(w)) == list(range(3, 16))
    assert taken(0, tokens=3) == []


def test_the_sums_are_those_of_the_rows_taken(
    source: LoadedModel, target: LoadedModel, corpus: Corpus
) -> None:
    moments = collect(source, target, corpus, empty(source, target), progress=False)
    x, y = [], []
    for index, ids in enumerate(corpus.windows):
        rows = torch.arange(4 + index % 4, len(ids), 4)
        for cache, model, found in zip(
            aligned(source, target, ids), (source, target), (x, y), strict=True
        ):
            picked = content(cache.take(rows), model.identity.rope, length=len(ids))
            found.append(torch.cat([keys.flatten(1) for keys in picked.keys], dim=1).double())
    inputs, outputs = torch.cat(x), torch.cat(y)
    assert moments.count == len(inputs) == sampled_rows(corpus, stride=4, skip_positions=4)
    centred = inputs - inputs.mean(0)
    torch.testing.assert_close(moments.keys.gram[0], centred.T @ centred, rtol=1e-9, atol=1e-6)
    cross = centred.T @ (outputs - outputs.mean(0))
    torch.testing.assert_close(moments.keys.cross[0], cross, rtol=1e-9, atol=1e-6)


def test_rows_before_are_those_of_the_whole_window(
    source: LoadedModel, target: LoadedModel, corpus: Corpus
) -> None:
    """With a stride, what is before a row is not the row that was taken before it."""
    moments = PairMoments(Geometry.of(source.identity, target.identity), "joint", 2)
    moments = collect(source, target, corpus, moments, skip_positions=1, progress=False)
    taken = []
    for index, ids in enumerate(corpus.windows):
        whole, _ = aligned(source, target, ids)
        whole = content(whole, source.identity.rope, length=len(ids))
        own = torch.cat([side.flatten(1) for side in (*whole.keys, *whole.values)], 1).double()
        before = torch.cat([own[:1], own[:-1]])
        earlier = torch.cat([own[:1], own[:1], own[:-2]])
        rows = slice(1 + index % 4, None, 4)
        taken.append(torch.cat([own, before, earlier], 1)[rows])
    inputs = torch.cat(taken)
    centred = inputs - inputs.mean(0)
    torch.testing.assert_close(moments.keys.gram[0], centred.T @ centred, rtol=1e-9, atol=1e-5)


def test_a_stopped_pass_resumes_to_the_same_bits(
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = collect(source, target, corpus, empty(source, target), progress=False)
    checkpoints = Checkpoints(tmp_path / "work", "plan", every_windows=3)
    read_windows: list[int] = []
    stop_at = 8
    original = module.aligned

    def counted(a: LoadedModel, b: LoadedModel, ids: torch.Tensor) -> tuple[KVCache, KVCache]:
        if len(read_windows) == stop_at:
            raise KeyboardInterrupt
        read_windows.append(len(ids))
        return original(a, b, ids)

    monkeypatch.setattr(module, "aligned", counted)
    options = {"checkpoints": checkpoints, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        collect(source, target, corpus, empty(source, target), **options)
    stop_at = -1
    resumed = collect(source, target, corpus, empty(source, target), **options)
    assert same_bits(resumed, whole)
    assert len(read_windows) == 8 + (10 - 6), "windows 7 to 10 are read once more, no other"
    assert len(list((tmp_path / "work").glob("moments-*"))) == 1
    again = collect(source, target, corpus, empty(source, target), **options)
    assert same_bits(again, whole)
    assert len(read_windows) == 12, "a finished pass is not made again"


def test_a_checkpoint_of_another_plan_or_text_is_refused(
    source: LoadedModel, target: LoadedModel, corpus: Corpus, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, "plan", every_windows=3)
    few = Corpus(corpus.windows[:3], corpus.names[:3], corpus.document_digests)
    collect(source, target, few, empty(source, target), checkpoints=checkpoints, progress=False)
    for other, text, said in [
        (replace(checkpoints, plan_digest="other"), few, "another plan"),
        (checkpoints, corpus, "another corpus"),
    ]:
        with pytest.raises(CorpusError, match=said):
            collect(source, target, text, empty(source, target), checkpoints=other, progress=False)


def test_different_tokenizers_are_refused(
    source: LoadedModel, target: LoadedModel, corpus: Corpus
) -> None:
    identity = target.identity.model_copy(update={"tokenizer_digest": "sha256:other"})
    other = replace(target, identity=identity)
    with pytest.raises(UnsupportedModel) as caught:
        collect(source, other, corpus, empty(source, target), progress=False)
    assert caught.value.reason == "different_tokenizers"


def test_a_window_without_rows_does_not_reach_the_models(
    source: LoadedModel, target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Corpus((torch.arange(4),), ("a",), frozenset("a"))
    monkeypatch.setattr(module, "aligned", None)
    moments = collect(source, target, short, empty(source, target), progress=False)
    assert moments.count == 0
