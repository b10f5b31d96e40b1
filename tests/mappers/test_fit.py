"""The whole way from text to a loaded artifact, and what stops it early."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from mappers import artifact
from mappers import collect as collecting
from mappers.cache import from_hf
from mappers.errors import CorpusError, TooFewData, UnsupportedModel
from mappers.evidence import Arm
from mappers.first_tokens import exact_prefixes, prefix_ids
from mappers.fit import fit, fit_pair
from mappers.hf_compat import read
from mappers.models import LoadedModel, ModelSpec
from mappers.plan import FitPlan
from mappers.probe import PROBE_TOKENS


@pytest.fixture
def held_out(tmp_path: Path, texts: Path) -> Path:
    """Three of the texts, moved out of the calibration folder."""
    folder = tmp_path / "held_out"
    folder.mkdir()
    for file in sorted(texts.iterdir())[:3]:
        file.rename(folder / file.name)
    return folder


def plan(texts: Path, root: Path, **changes: Any) -> FitPlan:
    nowhere = ModelSpec(path="nowhere")
    return FitPlan(
        **{
            "source": nowhere,
            "target": nowhere,
            "calibration": (texts,),
            "root": root,
            "k": 2,
            "windows": 12,
            "window_tokens": 128,
            "lengths": (96,),
            "alpha": None,
            **changes,
        }
    )


@pytest.fixture
def no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a model was run")

    monkeypatch.setattr(collecting, "aligned", refuse)


def test_a_fitted_artifact_holds_mapper_evidence_and_report(
    source: LoadedModel, target: LoadedModel, texts: Path, held_out: Path, tmp_path: Path
) -> None:
    asked = plan(texts, tmp_path / "root", evaluation={"a": (held_out,)}, known_texts=("the",))
    folder = fit_pair(asked, source, target, progress=False)
    loaded = artifact.load(folder)
    assert loaded.evidence is not None
    assert {row.domain for row in loaded.evidence.rows} == {"a"}
    assert len([r for r in loaded.evidence.rows if r.arm is Arm.NATIVE]) == 3
    assert loaded.evidence.corpora.keys() == {"a"}
    calibration = loaded.manifest.calibration
    assert calibration is not None
    assert (calibration.documents, calibration.rows) == (9, 12 * 31)
    assert loaded.manifest.r2_keys is not None
    assert loaded.mapper.prefixes.longest_match((0, 5)) is not None
    assert loaded.profile is not None
    assert loaded.probe_queries is not None
    assert {row.probe_tokens for row in loaded.evidence.rows} == {0, PROBE_TOKENS}
    assert all(row.score is not None for row in loaded.evidence.rows if row.arm is Arm.TRANSLATED)
    assert "</html>" in (folder / "report.html").read_text()
    assert sorted(p.name for p in (tmp_path / "root").iterdir()) == [folder.name]


def test_a_pair_whose_target_is_the_source_is_found_out(
    target: LoadedModel, texts: Path, held_out: Path, tmp_path: Path
) -> None:
    renamed = replace(target, identity=target.identity.model_copy(update={"version": "copy"}))
    asked = plan(texts, tmp_path / "root", evaluation={"a": (held_out,)}, k=1, ridge=1e-9)
    loaded = artifact.load(fit_pair(asked, target, renamed, progress=False))
    assert [layer.sources for layer in loaded.mapper.layers] == [(0,), (1,), (2,)]
    assert loaded.evidence is not None
    known = [row for row in loaded.evidence.rows if row.prefix_known]
    translated = [row for row in known if row.arm is Arm.TRANSLATED]
    wrong = [row for row in known if row.arm is Arm.WRONG_DOCUMENT]
    assert max(row.kl for row in translated) < 1e-5
    assert min(row.kl for row in wrong) > 1e-2


def test_a_resumed_fit_is_the_uninterrupted_one_bit_for_bit(
    source: LoadedModel,
    target: LoadedModel,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = fit_pair(plan(texts, tmp_path / "a"), source, target, progress=False)
    monkeypatch.setattr(collecting.Checkpoints, "__init__", every_third(collecting.Checkpoints))
    original, calls = collecting.aligned, []

    def stop_once(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(collecting, "aligned", stop_once)
    asked = plan(texts, tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        fit_pair(asked, source, target, progress=False)
    assert list((tmp_path / "b").glob(".fit-*"))
    resumed = fit_pair(asked, source, target, progress=False)
    assert len(calls) == 8 + 12 - 6
    for name in ("weights.safetensors", "prefixes.safetensors"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    assert not list((tmp_path / "b").glob(".fit-*"))


def every_third(cls: type) -> Any:
    original = cls.__init__  # type: ignore[misc]

    def init(self: Any, folder: Path, plan_digest: str) -> None:
        original(self, folder, plan_digest, every_windows=3)

    return init


def test_another_k_and_ridge_need_no_second_pass_over_the_text(
    source: LoadedModel,
    target: LoadedModel,
    texts: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    work = tmp_path / "work"
    fresh = fit_pair(plan(texts, tmp_path / "a", k=1, ridge=1e-2), source, target, progress=False)
    fit_pair(plan(texts, tmp_path / "b", work=work), source, target, progress=False)
    request.getfixturevalue("no_forward_pass")
    asked = plan(texts, tmp_path / "b", work=work, k=1, ridge=1e-2)
    again = fit_pair(asked, source, target, progress=False)
    name = "weights.safetensors"
    assert (again / name).read_bytes() == (fresh / name).read_bytes()
    other = asked.model_copy(update={"recipe": "head_local"})
    with pytest.raises(AssertionError, match="a model was run"):
        fit_pair(other, source, target, progress=False)
    stricter = asked.model_copy(update={"stride": 2})
    with pytest.raises(CorpusError, match="another plan"):
        fit_pair(stricter, source, target, progress=False)


def test_sums_with_and_without_lags_are_kept_beside_each_other(
    source: LoadedModel,
    target: LoadedModel,
    texts: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    def lags(**changes: Any) -> int:
        asked = plan(texts, tmp_path / "root", work=tmp_path, recipe="top_heads", **changes)
        return artifact.load(fit_pair(asked, source, target, progress=False)).mapper.lags

    assert (lags(lags=0), lags(k=12, lags=2)) == (0, 2)
    request.getfixturevalue("no_forward_pass")
    assert (lags(lags=0, share="head"), lags(k=12, lags=2, share="head")) == (0, 2)
    with pytest.raises(AssertionError, match="a model was run"):
        lags(lags=1)


def test_weights_can_be_kept_in_bfloat16(
    source: LoadedModel, target: LoadedModel, texts: Path, tmp_path: Path
) -> None:
    asked = plan(texts, tmp_path, weights_dtype="bfloat16", recipe="head_local")
    loaded = artifact.load(fit_pair(asked, source, target, progress=False))
    assert loaded.manifest.weights_dtype == "bfloat16"
    assert loaded.mapper.layers[0].keys.weight.dtype == torch.bfloat16
    assert loaded.manifest.recipe == "head_local"
    assert loaded.evidence is None


@pytest.mark.usefixtures("no_forward_pass")
def test_too_few_rows_are_found_before_any_model_runs(
    source: LoadedModel, target: LoadedModel, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(TooFewData, match="2 windows give 63 rows, a map of 64 inputs"):
        fit_pair(plan(texts, tmp_path, windows=2, skip_positions=3), source, target, progress=False)


@pytest.mark.usefixtures("no_forward_pass")
def test_texts_that_overlap_are_refused_before_any_model_runs(
    source: LoadedModel, target: LoadedModel, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(CorpusError, match="must differ"):
        fit_pair(plan(texts, tmp_path, evaluation={"a": (texts,)}), source, target, progress=False)


@pytest.mark.usefixtures("no_forward_pass")
def test_different_tokenizers_are_refused(
    source: LoadedModel, target: LoadedModel, texts: Path, tmp_path: Path
) -> None:
    changed = target.identity.model_copy(update={"tokenizer_digest": "sha256:other"})
    with pytest.raises(UnsupportedModel, match="different tokenizers"):
        fit_pair(plan(texts, tmp_path), source, replace(target, identity=changed), progress=False)


def test_fit_loads_both_models(
    source: LoadedModel, target: LoadedModel, texts: Path, tmp_path: Path
) -> None:
    specs = {}
    for side, model in (("source", source), ("target", target)):
        model.model.save_pretrained(tmp_path / side)
        model.tokenizer.save_pretrained(tmp_path / side)
        specs[side] = ModelSpec(path=str(tmp_path / side))
    loaded = artifact.load(fit(plan(texts, tmp_path / "root", **specs), progress=False))
    assert (loaded.mapper.source.model, loaded.mapper.target.model) == ("source", "target")


@pytest.mark.parametrize(
    "wrong", [{"recipe": "magic"}, {"k": 0}, {"ridge": 0.0}, {"calibration": ()}, {"speed": 1}]
)
def test_a_plan_that_cannot_be_meant_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        plan(tmp_path, tmp_path, **wrong)


def test_prefixes_are_the_bos_or_the_frequent_first_tokens_and_the_known_texts(
    target: LoadedModel,
) -> None:
    from mappers.corpus import Corpus

    windows = tuple(torch.tensor([first, 9, 9]) for first in (5, 7, 7, 6, 6, 6))
    corpus = Corpus(windows, ("d",) * 6, frozenset("d"))
    opening = tuple(target.tokenizer("the cache")["input_ids"])
    assert opening[0] == 0
    known = prefix_ids(target, corpus, first_tokens=2, texts=("the cache", "the cache"))
    assert known == [(0,), opening]
    bare = replace(target, tokenizer=_WithoutBos(target.tokenizer))
    assert prefix_ids(bare, corpus, first_tokens=2, texts=("the cache",)) == [
        (6,),
        (7,),
        opening[1:],
    ]


class _WithoutBos:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: str, **options: Any) -> Any:
        return self.tokenizer(text, **{**options, "add_special_tokens": False})


def test_exact_prefixes_are_the_targets_own_cache_of_longer_texts(target: LoadedModel) -> None:
    ids = torch.tensor([0, 40, 41, 42, 43])
    table = exact_prefixes(target, [(0,), (0, 40, 41)])
    whole = from_hf(read(target.model, ids[None])[1])
    for asked, length in ((ids, 3), (torch.tensor([0, 40, 9]), 2), (torch.tensor([0, 9]), 1)):
        found = table.longest_match(tuple(asked.tolist()))
        assert found is not None
        assert found[0] == length
        for exact, native in zip(found[1].keys, whole.keys, strict=True):
            torch.testing.assert_close(exact, native[:length], rtol=1e-4, atol=1e-5)
    assert table.longest_match((40, 41)) is None
