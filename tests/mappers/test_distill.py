"""Distilling maps that were exact and then spoiled: they are put right, and served as learned."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mappers import artifact
from mappers.collect import aligned
from mappers.corpus import Corpus, calibration, read
from mappers.distill import READ_TOKENS, Schedule, Student, distill
from mappers.errors import TooFewData
from mappers.fit import fit_pair
from mappers.mapper import AffineMap, LayerMap, Mapper
from mappers.models import LoadedModel
from mappers.translate import Translator
from tests.mappers.test_fit import plan

QUICK = Schedule(steps=40, rank=4, rate=1e-2, held_out=3, every=10)


@pytest.fixture
def corpus(target: LoadedModel, texts: Path) -> Corpus:
    return calibration(read([texts]), target.tokenizer, window_tokens=160, windows=12)


@pytest.fixture
def source(target: LoadedModel) -> LoadedModel:
    """The target itself under another name: exact maps exist."""
    return replace(target, identity=target.identity.model_copy(update={"version": "copy"}))


@pytest.fixture(params=["full_head", "head_local", "top_heads"])
def mapper(
    request: pytest.FixtureRequest,
    source: LoadedModel,
    target: LoadedModel,
    texts: Path,
    tmp_path: Path,
) -> Mapper:
    """The exact maps, each with something of rank 1 added to the weights and biases."""
    recipe = request.param
    k = 2 if recipe == "top_heads" else 1
    asked = plan(texts, tmp_path / "root", recipe=recipe, k=k, ridge=1e-9, skip_positions=2)
    exact = artifact.load(fit_pair(asked, source, target, progress=False)).mapper
    generator = torch.Generator().manual_seed(0)

    def spoiled(affine: AffineMap) -> AffineMap:
        inputs, outputs = affine.weight.shape
        column, row = (torch.randn(n, generator=generator) for n in (inputs, outputs))
        wrong = 0.5 * affine.weight.std() * torch.outer(column, row)
        return replace(affine, weight=affine.weight + wrong, bias=affine.bias + 0.1 * row)

    layers = [
        LayerMap(layer.sources, spoiled(layer.keys), spoiled(layer.values))
        for layer in exact.layers
    ]
    return replace(exact, layers=tuple(layers))


def loss_of(mapper: Mapper, source: LoadedModel, target: LoadedModel, corpus: Corpus) -> float:
    student = Student(mapper, source, target)
    student.begin(corpus.windows[0], QUICK)
    windows = corpus.windows[-QUICK.held_out :]
    losses = [student.loss(ids, len(ids) - READ_TOKENS).detach() for ids in windows]
    return float(torch.stack(losses).mean())


def test_what_was_spoiled_is_put_right_on_windows_that_were_held_out(
    mapper: Mapper, source: LoadedModel, target: LoadedModel, corpus: Corpus
) -> None:
    learned = distill(mapper, source, target, corpus, QUICK, progress=False)
    before, after = (loss_of(one, source, target, corpus) for one in (mapper, learned))
    assert before > 0.1
    assert after < 0.6 * before
    for old, new in zip(mapper.layers, learned.layers, strict=True):
        assert (old.sources, old.heads) == (new.sources, new.heads)
        assert old.keys.weight.shape == new.keys.weight.shape


def test_a_student_reads_what_a_translator_gives(
    mapper: Mapper, source: LoadedModel, target: LoadedModel, corpus: Corpus
) -> None:
    learned = distill(mapper, source, target, corpus, replace(QUICK, steps=5), progress=False)
    merged = Student(learned, source, target)
    merged.begin(corpus.windows[0], QUICK)
    ids = corpus.windows[1]
    given, native = aligned(source, target, ids)
    translated = Translator(learned).translate(
        given, dtype=torch.float32, prefix=native.slice(0, 2)
    )
    cache = merged.translated(given, native, len(ids))
    ours: Any
    for layer, ours in enumerate(cache.layers):
        keys, values = translated.keys[layer], translated.values[layer]
        torch.testing.assert_close(ours.keys[0].transpose(0, 1), keys, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(ours.values[0].transpose(0, 1), values, rtol=1e-3, atol=1e-3)


def test_a_stopped_run_goes_on_to_the_same_bits(
    mapper: Mapper,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = (mapper, source, target, corpus)
    whole = distill(*given, QUICK, progress=False)
    original = Student.loss

    def interrupted(student: Student, ids: Tensor, cut: int) -> Tensor:
        if (tmp_path / "saved").exists():
            raise KeyboardInterrupt
        return original(student, ids, cut)

    monkeypatch.setattr(Student, "loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        distill(*given, QUICK, checkpoint=tmp_path / "saved", progress=False)
    monkeypatch.setattr(Student, "loss", original)
    resumed = distill(*given, QUICK, checkpoint=tmp_path / "saved", progress=False)
    for first, second in zip(whole.layers, resumed.layers, strict=True):
        assert torch.equal(first.keys.weight, second.keys.weight)
        assert torch.equal(first.values.bias, second.values.bias)


def test_too_few_windows_are_refused(
    mapper: Mapper, source: LoadedModel, target: LoadedModel, corpus: Corpus
) -> None:
    few = Corpus(corpus.windows[:3], corpus.names[:3], corpus.document_digests)
    with pytest.raises(TooFewData, match="3 windows, of which 3"):
        distill(mapper, source, target, few, QUICK, progress=False)


def test_a_plan_can_ask_for_it_and_the_manifest_tells(
    source: LoadedModel, target: LoadedModel, texts: Path, tmp_path: Path
) -> None:
    asked = plan(texts, tmp_path, ridge=1.0, distill_steps=40, window_tokens=160)
    loaded = artifact.load(fit_pair(asked, source, target, progress=False))
    assert loaded.manifest.distill_steps == 40
    plain = artifact.load(
        fit_pair(asked.model_copy(update={"distill_steps": 0}), source, target, progress=False)
    )
    assert loaded.manifest.flops_per_token == plain.manifest.flops_per_token
    first, second = loaded.mapper.layers[0].keys.weight, plain.mapper.layers[0].keys.weight
    assert not torch.equal(first, second)
