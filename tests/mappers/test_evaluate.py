"""Every arm that was promised, and the two whose answer is known beforehand."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from mappers.arms import read_document, read_tail
from mappers.corpus import Corpus, evaluation, read
from mappers.errors import TooFewData
from mappers.evaluate import evaluate, evaluation_texts
from mappers.evidence import Arm, Evidence, EvidenceRow
from mappers.first_tokens import exact_prefixes
from mappers.mapper import AffineMap, LayerMap, Mapper
from mappers.metrics import Reference
from mappers.models import LoadedModel
from mappers.translate import Translator

LENGTHS, TAILS = (96, 160), (1, 32, 128)


def identity_mapper(model: LoadedModel) -> Mapper:
    """Between a model and itself: each layer reads itself, unchanged."""
    width = model.identity.num_kv_heads * model.identity.head_dim
    same = AffineMap(torch.eye(width), torch.zeros(width))
    return Mapper(
        source=model.identity,
        target=model.identity,
        recipe="full_head",
        layers=tuple(LayerMap((n,), same, same) for n in range(model.identity.num_layers)),
        prefixes=exact_prefixes(model, [(0,)]),
        skipped_positions=0,
    )


def broken_mapper(model: LoadedModel) -> Mapper:
    mapper = identity_mapper(model)
    weight = torch.eye(32)
    weight[:, :8] *= -1
    layer = replace(mapper.layers[1], values=AffineMap(weight, torch.ones(32)))
    return replace(mapper, layers=(mapper.layers[0], layer, *mapper.layers[2:]))


@pytest.fixture
def corpus(texts: Path, tokenizer: PreTrainedTokenizerFast) -> Corpus:
    found = evaluation(
        read([texts]), tokenizer, minimum_tokens=128, window_tokens=192, documents_at_most=3
    )
    # The last document is too short for the longer prompt.
    return replace(found, windows=(*found.windows[:2], found.windows[2][:150]))


@pytest.fixture
def same(target: LoadedModel, corpus: Corpus) -> Evidence:
    mapper = identity_mapper(target)
    return evaluate(
        mapper, target, target, {"a": corpus}, lengths=LENGTHS, native_tails=TAILS, progress=False
    )


def of(record: Evidence, arm: Arm) -> list[EvidenceRow]:
    return [row for row in record.rows if row.arm is arm]


def test_every_arm_length_and_tail_is_there_once_a_document(same: Evidence) -> None:
    def key(row: EvidenceRow) -> tuple[Arm, int, bool]:
        return row.arm, row.native_tail, row.prefix_known

    expected = {
        (Arm.NATIVE, 160, False),
        (Arm.SOURCE_ALONE, 0, False),
        (Arm.NO_CONTEXT, 1, False),
        *((Arm.LAST_TOKENS, tail, False) for tail in (32, 64, 128)),
        *((Arm.TRANSLATED, tail, known) for tail in TAILS for known in (True, False)),
        *((Arm.WRONG_DOCUMENT, tail, True) for tail in TAILS),
        *((arm, tail, False) for arm in (Arm.RAW_SOURCE, Arm.ZERO_CACHE) for tail in TAILS),
        (Arm.QUANTIZED, 160, False),
    }
    assert Counter(key(row) for row in same.rows if row.length == 160) == dict.fromkeys(expected, 2)
    shorter = {k for k in expected if k[1] not in (128, 160)}
    shorter |= {(arm, 96, False) for arm in (Arm.NATIVE, Arm.QUANTIZED)}
    assert Counter(key(row) for row in same.rows if row.length == 96) == dict.fromkeys(shorter, 3)
    assert same.continuation_tokens == 32
    assert all(row.domain == "a" and row.hops == 0 for row in same.rows)


def test_native_has_no_kl_and_an_identity_between_equal_models_none_to_speak_of(
    same: Evidence,
) -> None:
    assert {(row.kl, row.kl_max, row.top1) for row in of(same, Arm.NATIVE)} == {(0.0, 0.0, 1.0)}
    assert max(row.kl for row in of(same, Arm.SOURCE_ALONE)) == 0.0
    assert max(row.kl_max for row in of(same, Arm.TRANSLATED)) < 1e-6
    assert max(row.kl_max for row in of(same, Arm.RAW_SOURCE)) < 1e-6
    for arm in (Arm.WRONG_DOCUMENT, Arm.NO_CONTEXT, Arm.LAST_TOKENS, Arm.ZERO_CACHE):
        assert min(row.kl for row in of(same, arm)) > 1e-2, arm


def test_a_broken_map_shows(target: LoadedModel, corpus: Corpus) -> None:
    mapper = broken_mapper(target)
    record = evaluate(
        mapper, target, target, {"a": corpus}, lengths=LENGTHS, native_tails=(1,), progress=False
    )
    assert min(row.kl for row in of(record, Arm.TRANSLATED)) > 1e-2


def test_the_wrong_document_is_the_one_before(target: LoadedModel, corpus: Corpus) -> None:
    mapper = identity_mapper(target)
    record = evaluate(
        mapper, target, target, {"a": corpus}, lengths=(96,), native_tails=(32,), progress=False
    )
    translator = Translator(mapper)
    readings = [
        read_document(target, target, translator, mapper.prefixes, ids, (96,))
        for ids in corpus.windows
    ]
    got = [row.kl for row in of(record, Arm.WRONG_DOCUMENT)]
    for number, (own, wrong) in enumerate([(0, 1), (1, 0), (2, 1)]):
        reading, other = readings[own], readings[wrong]
        logits = read_tail(target, [other.prefix_known], reading.ids, length=96, tail=32)[0]
        expected = Reference(reading.native_logits[0], reading.next_ids(96)).compare(logits)
        assert got[number] == pytest.approx(expected.kl, rel=1e-3)


def test_one_document_alone_has_no_wrong_document(target: LoadedModel, corpus: Corpus) -> None:
    alone = Corpus(corpus.windows[:1], corpus.names[:1], corpus.document_digests)
    record = evaluate(
        identity_mapper(target), target, target, {"a": alone},
        lengths=(96,), native_tails=(1,), progress=False,
    )  # fmt: skip
    assert of(record, Arm.WRONG_DOCUMENT) == []
    assert len(of(record, Arm.TRANSLATED)) == 2


def test_evaluation_texts_are_cut_to_what_both_models_hold(
    source: LoadedModel, target: LoadedModel, texts: Path
) -> None:
    found = evaluation_texts({"a": [texts]}, source, target, lengths=(96, 160, 512), documents=5)
    assert len(found["a"].windows) == 5
    assert {len(ids) for ids in found["a"].windows} == {192}, "512 + 32 exceeds 512 positions"
    with pytest.raises(TooFewData, match="512"):
        evaluation_texts({"a": [texts]}, source, target, lengths=(512,), documents=5)
