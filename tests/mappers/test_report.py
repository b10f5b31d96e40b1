"""The page: whole, closed to the network, and safe whatever a model is called."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mappers import artifact
from mappers.artifact import Artifact
from mappers.evidence import Arm, Evidence
from mappers.fit import fit_pair
from mappers.models import LoadedModel, ModelSpec
from mappers.plan import FitPlan
from mappers.report import render, verdict

NAME = "<script>alert('x')</script>"


class Page(HTMLParser):
    """Tags that are opened and closed in turn, and all attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture
def fitted(source: LoadedModel, target: LoadedModel, texts: Path, tmp_path: Path) -> Artifact:
    held_out = tmp_path / "held_out"
    held_out.mkdir()
    for file in sorted(texts.iterdir())[:3]:
        file.rename(held_out / file.name)
    nowhere = ModelSpec(path="nowhere")
    plan = FitPlan(
        source=nowhere,
        target=nowhere,
        calibration=(texts,),
        evaluation={NAME: (held_out,)},
        root=tmp_path / "root",
        k=1,
        windows=9,
        window_tokens=128,
        lengths=(96, 160),
    )
    named = replace(source, identity=source.identity.model_copy(update={"model": NAME}))
    return artifact.load(fit_pair(plan, named, target, progress=False))


@pytest.fixture
def evidence(fitted: Artifact) -> Evidence:
    assert fitted.evidence is not None
    return fitted.evidence


def test_the_page_is_whole_and_closed_to_the_network(fitted: Artifact, evidence: Evidence) -> None:
    text = render(fitted.manifest, evidence)
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not {"src", "href", "onload"} & {name for name, _ in page.attributes}
    assert "://" not in text
    assert "url(" not in text


def test_names_are_text_and_never_markup(fitted: Artifact, evidence: Evidence) -> None:
    page = Page(render(fitted.manifest, evidence))
    assert page.words.count(NAME) >= 3, "in the heading, the verdict and the identities"


def test_heat_maps_have_a_tile_for_every_pair_of_layers(
    fitted: Artifact, evidence: Evidence
) -> None:
    text = render(fitted.manifest, evidence)
    assert text.count("<rect ") == 2 * 2 * 3
    assert text.count(" stroke=") == 2 * 3, "k = 1: one framed tile a target layer"
    imported = fitted.manifest.model_copy(update={"r2_keys": None, "r2_values": None})
    assert render(imported, evidence).count("<rect ") == 0


def test_the_verdict_compares_at_equal_native_tokens(evidence: Evidence) -> None:
    sentence = verdict(evidence)
    assert "prompts of 160 tokens" in sentence
    assert "last 32 natively" in sentence
    for factor, said in ((1e-3, "nats a token: better than"), (1e3, "no better than")):
        rows = [
            row.model_copy(update={"kl": row.kl * factor}) if row.arm is Arm.TRANSLATED else row
            for row in evidence.rows
        ]
        assert said in verdict(evidence.model_copy(update={"rows": tuple(rows)}))


def test_evidence_without_a_translation_says_so(evidence: Evidence) -> None:
    rows = tuple(row for row in evidence.rows if row.arm is Arm.NATIVE)
    only = evidence.model_copy(update={"rows": rows})
    assert verdict(only) == "Nothing translated was measured."
