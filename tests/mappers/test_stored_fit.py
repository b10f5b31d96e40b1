"""Models whose engines store 8 bits: what is fitted and measured is what is read from storage."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from mappers import artifact
from mappers.arms import CONTINUATION_TOKENS, read_document, read_tail
from mappers.cache import KVCache
from mappers.collect import aligned, cache_of_text, collect, content, sampled_positions
from mappers.corpus import calibration, read
from mappers.curve import layer_curve
from mappers.evidence import Arm
from mappers.fit import fit_pair
from mappers.geometry import Geometry
from mappers.identity import ModelIdentity
from mappers.metrics import Reference
from mappers.models import LoadedModel, ModelSpec
from mappers.moments import PairMoments
from mappers.prefixes import ExactPrefixes
from mappers.profile import scorer
from mappers.quantize import Storage
from mappers.stored import rounded
from mappers.translate import Translator
from tests.mappers.test_fit import plan
from tests.mappers.test_held_out import copied

INT8 = Storage("int8", "per_token_head", True)
FLOAT8 = Storage("float8_e4m3fn", "per_head")
IDS = torch.randint(1, 4_000, (80 + CONTINUATION_TOKENS,), generator=torch.manual_seed(5))


def kept(model: LoadedModel, storage: Storage) -> LoadedModel:
    said = {
        "kv_dtype": storage.dtype,
        "kv_scales": storage.scales,
        "kv_zero_points": storage.zero_points,
    }
    identity = ModelIdentity.model_validate({**dict(model.identity), **said})
    return replace(model, identity=identity)


def assert_same(ours: KVCache, theirs: KVCache) -> None:
    for left, right in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("storage", [INT8, FLOAT8, Storage("float8_e5m2"), Storage("bfloat16")])
def test_the_source_is_read_as_stored_and_the_target_as_computed(
    source: LoadedModel, target: LoadedModel, storage: Storage
) -> None:
    found = aligned(kept(source, storage), kept(target, storage), IDS)
    exact = cache_of_text(source, IDS)
    assert_same(found[0], rounded(exact, storage))
    assert not torch.equal(found[0].keys[0], exact.keys[0])
    assert_same(found[1], cache_of_text(target, IDS))


def test_sums_are_of_what_is_stored(source: LoadedModel, target: LoadedModel, texts: Path) -> None:
    corpus = calibration(read([texts]), target.tokenizer, window_tokens=96, windows=3)
    geometry = Geometry.of(source.identity, target.identity)
    stored = kept(source, INT8)
    found = collect(stored, target, corpus, PairMoments(geometry, "all_heads"), progress=False)
    by_hand = PairMoments(geometry, "all_heads")
    for index, ids in enumerate(corpus.windows):
        rows = sampled_positions(len(ids), index, stride=4, skip_positions=4)
        sides = (rounded(cache_of_text(source, ids), INT8), cache_of_text(target, ids))
        by_hand.add_window(
            *(
                content(side.take(rows), of.identity.rope, length=len(ids))
                for side, of in zip(sides, (source, target), strict=True)
            )
        )
    assert torch.equal(found.keys.gram, by_hand.keys.gram)
    plain = collect(source, target, corpus, PairMoments(geometry, "all_heads"), progress=False)
    assert not torch.equal(found.keys.gram, plain.keys.gram)


def test_evidence_is_of_stored_sources_and_stored_answers(
    source: LoadedModel, target: LoadedModel, texts: Path, tmp_path: Path
) -> None:
    held_out = tmp_path / "held_out"
    held_out.mkdir()
    for file in sorted(texts.iterdir())[:2]:
        file.rename(held_out / file.name)
    asked = plan(texts, tmp_path / "root", evaluation={"a": (held_out,)}, native_tails=(1,))
    sides = kept(source, INT8), kept(target, FLOAT8)
    loaded = artifact.load(fit_pair(asked, *sides, progress=False))
    assert (loaded.mapper.source.storage, loaded.mapper.target.storage) == (INT8, FLOAT8)
    assert loaded.evidence is not None
    reading = read_document(*sides, Translator(loaded.mapper), ExactPrefixes(), IDS, (80,))
    original = rounded(cache_of_text(source, IDS[:-1]), INT8)
    assert_same(reading.original, original)
    translated = Translator(loaded.mapper).translate(original, dtype=torch.float32)
    assert_same(reading.prefix_unknown, rounded(translated, FLOAT8))
    score = scorer(loaded.profile, loaded.mapper)
    rows = [row for row in loaded.evidence.rows if row.arm is Arm.TRANSLATED]
    assert rows
    assert all(row.score is not None for row in rows)
    assert score(original) is not None


def test_the_layer_curve_of_a_16_bit_target_that_stores_8_bits_ends_at_its_translation(
    target: LoadedModel,
) -> None:
    half = replace(kept(target, FLOAT8), model=copy.deepcopy(target.model).to(torch.bfloat16))
    translator = Translator(copied(half, 0.9))
    reading = read_document(half, half, translator, ExactPrefixes(), IDS, (80,))
    assert (reading.native.dtype, reading.prefix_known.dtype) == (torch.bfloat16, torch.float32)
    *_, last = layer_curve(half, reading, document="d", domain="a", tail=1)
    answer = read_tail(half, [reading.prefix_known], reading.ids, length=80, tail=1)[0]
    reference = Reference(reading.native_logits[0], reading.next_ids(80))
    assert (last.mode, last.layer) == ("up_to", 2)
    assert last.kl == pytest.approx(reference.compare(answer).kl, rel=1e-3)


@pytest.mark.parametrize(
    "said",
    [
        {"kv_dtype": "int8"},
        {"kv_scales": "per_head"},
        {"kv_dtype": "float8_e5m2", "kv_zero_points": True},
        {"kv_dtype": "int4"},
    ],
)
def test_a_storage_that_there_is_not_is_refused(said: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ModelSpec.model_validate({"path": "nowhere", **said})
