"""Every arm that was promised, and the two whose answer is known beforehand."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from mappers import evaluate as evaluation_module
from mappers.accept import Rule, decide
from mappers.arms import read_document, read_tail
from mappers.bench import Depth
from mappers.cache import KVCache
from mappers.collect import cache_of_text
from mappers.corpus import Corpus, evaluation, read
from mappers.errors import TooFewData
from mappers.evaluate import digest_of, evaluate, evaluation_texts, require_documents
from mappers.evidence import Arm, Evidence, EvidenceRow
from mappers.mapper import Mapper
from mappers.metrics import Reference
from mappers.models import LoadedModel
from mappers.prefixes import ExactPrefixes
from mappers.probe import PROBE_TOKENS
from mappers.prompt_rows import Over, agreement
from mappers.queries import collect_probe_queries
from mappers.translate import Translator
from tests.mappers.identities import broken_mapper, identity_mapper

LENGTHS, TAILS = (96, 160), (1, 32, 128)


@pytest.fixture
def corpus(texts: Path, tokenizer: PreTrainedTokenizerFast) -> Corpus:
    found = evaluation(read([texts]), tokenizer, sizes=(128, 192), documents_at_most=3)
    # The last document is too short for the longer prompt.
    windows = (*found.windows[:2], found.windows[2][:150])
    return replace(found, windows=windows, chosen=())


@pytest.fixture
def same(target: LoadedModel, corpus: Corpus) -> Evidence:
    mapper = identity_mapper(target)
    return evaluate(
        mapper, target, target, {"a": corpus}, lengths=LENGTHS, native_tails=TAILS, progress=False
    )


@pytest.fixture
def with_probe(target: LoadedModel, corpus: Corpus) -> Evidence:
    """A broken translation and the target's queries of two windows."""
    return evaluate(
        broken_mapper(target), target, target, {"a": corpus}, lengths=LENGTHS, native_tails=TAILS,
        probe_queries=collect_probe_queries(target, corpus.windows[:2]), progress=False,
    )  # fmt: skip


def test_rows_with_a_probe_are_there_where_something_is_left_to_translate(
    with_probe: Evidence,
) -> None:
    found = [row for row in with_probe.rows if row.probe_tokens]
    assert {(row.arm, row.prefix_known, row.hops) for row in found} == {(Arm.TRANSLATED, True, 0)}
    assert Counter((row.length, row.native_tail) for row in found) == {
        (96, 1): 3, (160, 1): 2, (160, 32): 2
    }  # fmt: skip
    assert all((row.probe_error is not None) is (row.probe_tokens > 0) for row in with_probe.rows)
    assert {row.probe_tokens for row in found} == {PROBE_TOKENS}
    assert min(row.probe_error or 0 for row in found) > 1e-2


def test_behind_a_probe_the_rest_is_read_over_the_targets_own_first_tokens(
    with_probe: Evidence, target: LoadedModel, corpus: Corpus
) -> None:
    mapper, ids = broken_mapper(target), corpus.windows[0]
    reading = read_document(target, target, Translator(mapper), mapper.prefixes, ids, (160,))
    own, mapped = reading.native, reading.prefix_known
    spliced = KVCache(
        tuple(torch.cat([a[:64], b[64:]]) for a, b in zip(own.keys, mapped.keys, strict=True)),
        tuple(torch.cat([a[:64], b[64:]]) for a, b in zip(own.values, mapped.values, strict=True)),
        own.positions,
    )
    logits = read_tail(target, [spliced], reading.ids, length=160, tail=32)[0]
    expected = Reference(reading.native_logits[0], reading.next_ids(160)).compare(logits)
    (row,) = (
        row for row in with_probe.rows
        if row.probe_tokens and row.document == corpus.names[0] and row.native_tail == 32
    )  # fmt: skip
    assert row.kl == pytest.approx(expected.kl, rel=1e-3)


def test_the_tails_likelihood_is_that_of_its_own_tokens_for_both_models(
    same: Evidence, target: LoadedModel, corpus: Corpus
) -> None:
    ids, length, tail = corpus.windows[0], 160, 32
    with torch.inference_mode():
        log_p = target.model(ids[None]).logits[0].double().log_softmax(-1)
    expected = -log_p[:-1].gather(1, ids[1:, None])[length - tail : length - 1].mean().item()
    rows = [r for r in same.rows if (r.document, r.length) == (corpus.names[0], length)]
    translated = [r for r in rows if r.arm is Arm.TRANSLATED and r.native_tail == tail]
    for row in translated:
        assert row.tail_nll == pytest.approx(expected, rel=1e-4)
        assert row.source_tail_nll == pytest.approx(expected, rel=1e-4)
    (wrong,) = (r for r in rows if r.arm is Arm.WRONG_DOCUMENT and r.native_tail == tail)
    assert wrong.source_tail_nll == translated[0].source_tail_nll
    assert wrong.tail_nll != pytest.approx(expected, rel=1e-2)
    scored = {Arm.TRANSLATED, Arm.WRONG_DOCUMENT}
    for row in same.rows:
        both = row.tail_nll is not None, row.source_tail_nll is not None
        assert set(both) == {row.arm in scored and row.native_tail > 1}


def test_controls_and_hops_stop_where_they_tell_little() -> None:
    plain, wrong = Over(Arm.TRANSLATED, True), Over(Arm.WRONG_DOCUMENT, True)
    hopped, probe = plain._replace(hops=1), plain._replace(probe_tokens=64)
    for over, tails in ((plain, (128, 512)), (wrong, (128,)), (hopped, (128,))):
        assert tuple(w for w in (128, 512) if over.allows(w, 1024)) == tails
    assert probe.allows(512, 577)
    assert not probe.allows(512, 576), "nothing would be left that was translated"


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
    assert set(found["a"].chosen) == {frozenset({128, 192})}
    with pytest.raises(TooFewData, match="512"):
        evaluation_texts({"a": [texts]}, source, target, lengths=(512,), documents=5)


@pytest.fixture
def deep(target: LoadedModel, corpus: Corpus) -> Evidence:
    """A broken translation there, a right one back; one of three documents looked into."""
    return evaluate(
        broken_mapper(target), target, target, {"a": corpus},
        lengths=LENGTHS, native_tails=(1, 32), reverse=identity_mapper(target),
        depth=Depth(documents=1, hops=2, turns=3), progress=False,
    )  # fmt: skip


def test_one_document_is_looked_into_and_all_are_translated_again(
    deep: Evidence, corpus: Corpus
) -> None:
    first = corpus.names[0]
    assert {row.document for row in (*deep.curve, *deep.drift)} == {first}
    assert Counter(row.mode for row in deep.curve) == {"one": 3, "up_to": 3}
    assert [(row.turn, row.length) for row in deep.drift] == [(1, 53), (2, 106), (3, 159)]
    assert {(row.layer, row.documents) for row in deep.layers} == {(0, 1), (1, 1), (2, 1)}
    continued = [row for row in deep.rows if row.agreement is not None]
    assert {row.document for row in continued} == {first}
    arms = {row.arm for row in continued}
    assert arms == {
        Arm.NATIVE, Arm.TRANSLATED, Arm.WRONG_DOCUMENT, Arm.RAW_SOURCE, Arm.ZERO_CACHE
    }  # fmt: skip
    assert {row.agreement for row in continued if row.arm is Arm.NATIVE} == {32}
    assert {row.agreement for row in continued if row.arm is Arm.RAW_SOURCE} == {32}
    assert max(row.agreement or 0 for row in continued if row.arm is Arm.ZERO_CACHE) < 32
    hops = Counter((row.hops, row.length) for row in of(deep, Arm.TRANSLATED))
    assert hops == {(hop, n): docs * 4 for hop in (0, 1, 2) for n, docs in ((96, 3), (160, 2))}
    assert {row.hops for row in deep.rows if row.arm is not Arm.TRANSLATED} == {0}


def test_hops_go_through_the_translations_that_they_say(deep: Evidence) -> None:
    def mean(hops: int) -> float:
        kls = [row.kl for row in of(deep, Arm.TRANSLATED) if (row.hops, row.length) == (hops, 160)]
        return sum(kls) / len(kls)

    # One earlier hop was the right direction; two went through the broken one before.
    assert mean(1) == pytest.approx(mean(0), rel=1e-2)
    assert mean(2) != pytest.approx(mean(0), rel=1e-2)
    verdict = decide(
        deep, tokens=100, domain="a", hops=3, prefix_known=True, rule=Rule(9, 0.1, 0.1)
    )
    assert verdict.reason == "drift_budget_exhausted"


def test_a_resumed_evaluation_is_the_uninterrupted_one(
    target: LoadedModel, corpus: Corpus, deep: Evidence, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    original, measured = evaluation_module.measure_document, []

    def stop_at_the_third(*arguments: object, **options: object) -> object:
        measured.append(options["document"])
        if len(measured) == 3:
            raise KeyboardInterrupt
        return original(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluation_module, "measure_document", stop_at_the_third)

    def run() -> Evidence:
        return evaluate(
            broken_mapper(target), target, target, {"a": corpus},
            lengths=LENGTHS, native_tails=(1, 32), reverse=identity_mapper(target),
            depth=Depth(documents=1, hops=2, turns=3), work=tmp_path, progress=False,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        run()
    resumed = run()
    assert measured == [*corpus.names[:3], corpus.names[2]]
    assert resumed.model_dump_json() == deep.model_dump_json()
    assert run().model_dump_json() == deep.model_dump_json()
    assert len(measured) == 4
    # Another mapper finds nothing of it.
    evaluate(
        identity_mapper(target), target, target, {"a": corpus},
        lengths=(96,), native_tails=(1,), work=tmp_path, progress=False,
    )  # fmt: skip
    assert len(measured) == 7


def test_what_was_measured_with_other_first_tokens_or_profiles_is_not_taken_up(
    target: LoadedModel,
) -> None:
    """A fit that resumes with other exact prefixes has the same maps and other translations."""
    mapper = identity_mapper(target)
    cache = cache_of_text(target, torch.tensor([5]))
    known = replace(mapper, prefixes=ExactPrefixes.of({(5,): cache}))
    doubled = KVCache(tuple(2 * k for k in cache.keys), cache.values, cache.positions)
    other = replace(mapper, prefixes=ExactPrefixes.of({(5,): doubled}))
    mappers = (mapper, known, other, replace(mapper, skipped_positions=9))
    digests = {digest_of([one], []) for one in mappers}
    digests |= {digest_of([mapper], [], {"x": torch.tensor([value])}) for value in (1.0, 2.0)}
    assert len(digests) == 6
    assert digest_of([known], []) in digests


def test_what_was_measured_with_other_reads_or_without_key_norms_is_not_taken_up(
    target: LoadedModel,
) -> None:
    """The same weights with a key norm, or of other source layers or heads, translate otherwise."""
    mapper = identity_mapper(target)

    def changed(**fields: Any) -> Mapper:
        return replace(mapper, layers=(replace(mapper.layers[0], **fields), *mapper.layers[1:]))

    norms = [torch.full((target.identity.head_dim,), scale) for scale in (1.0, 2.0)]
    heads = [replace(mapper.layers[0].keys, heads=((0,),)), mapper.layers[0].values]
    both = {"keys": heads[0], "values": replace(heads[1], heads=((0,),))}
    other = {**both, "keys": replace(heads[0], heads=((1,),))}
    found = [mapper, *(changed(key_norm=norm) for norm in norms), changed(sources=(1,))]
    found += [changed(**both), changed(**other)]
    assert len({digest_of([one], []) for one in found}) == len(found)


def test_agreement_counts_up_to_the_first_difference() -> None:
    own = torch.tensor([4, 4, 5, 6])
    for other, expected in (([4, 4, 5, 6], 4), ([4, 4, 9, 6], 2), ([1, 4, 5, 6], 0)):
        assert agreement(own, torch.tensor(other)) == expected


def test_too_few_documents_is_an_error_that_says_how_many_are_needed(corpus: Corpus) -> None:
    with pytest.raises(TooFewData, match="a: 3 documents of 96 .* alpha 0.1 .* need 30;"):
        require_documents({"a": corpus}, LENGTHS, alpha=0.1, delta=0.05)
    require_documents({"a": corpus}, LENGTHS, alpha=0.8, delta=0.05)
