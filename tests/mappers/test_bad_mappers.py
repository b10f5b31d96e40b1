"""Bad mappers are never served: fitted for real on the embedded models, measured, and asked for.

Two ways to fit badly: on ten windows, and on pairs that do not belong together (the source's cache
of one text with the target's of another). The first has too few rows an input, however well it did
on a few documents that resemble each other; the second is refused for what was measured.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from mappers import artifact, collect
from mappers.accept import decide
from mappers.bench import Depth
from mappers.cache import KVCache
from mappers.collect import cache_of_text
from mappers.evaluate import evaluate, evaluation_texts
from mappers.evidence import Evidence
from mappers.fit import fit_pair
from mappers.layouts import Layout, write
from mappers.models import LoadedModel, ModelSpec, load_model
from mappers.plan import FitPlan
from mappers.servable import why_not_servable
from service.cli import app
from service.policy import Policy
from service.schemas import REASONS
from service.settings import Settings
from tests.mappers.conftest import DEMO
from tests.service.live import SAFETENSORS
from tests.service.pair import Request, claim
from tests.service.reporting import served

TOKENS = 128
USUAL = Policy()
RULE = USUAL.rule(USUAL.max_kl)
DOCUMENTS = 34  # some more than the rule needs: the strangest do not count
HELD_OUT = {"in_domain": (DEMO / "text" / "held_out.jsonl",)}


class Shuffled:
    """Stands in for ``aligned``: each source cache meets the target's of the window before."""

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def __call__(
        self, source: LoadedModel, target: LoadedModel, ids: Tensor
    ) -> tuple[KVCache, KVCache]:
        other = ids.flip(0) if self._before is None else self._before
        self._before = ids
        return cache_of_text(source, ids), cache_of_text(target, other)


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedModel, LoadedModel]:
    source, target = (
        load_model(ModelSpec(path=str(DEMO / name), name=name)) for name in ("small", "large")
    )
    return source, target


def fitted(root: Path, pair: tuple[LoadedModel, LoadedModel], *, windows: int) -> Path:
    """The artifact of a fit on so many windows, with evidence for the usual rule."""
    nowhere = ModelSpec(path="nowhere")
    plan = FitPlan(
        source=nowhere, target=nowhere, calibration=(DEMO / "text" / "calibration.jsonl",),
        root=root, windows=windows, window_tokens=TOKENS, stride=1,
    )  # fmt: skip
    folder = fit_pair(plan, *pair, progress=False)
    loaded = artifact.load(folder)
    texts = evaluation_texts(HELD_OUT, *pair, lengths=[TOKENS], documents=DOCUMENTS)
    evidence = evaluate(
        loaded.mapper, *pair, texts, lengths=[TOKENS], native_tails=[1, 64],
        profile=loaded.profile,
        depth=Depth(documents=0, hops=0), progress=False,
    )  # fmt: skip
    return artifact.add_evidence(folder, evidence, "")


@pytest.fixture(scope="module")
def ten_windows(
    pair: tuple[LoadedModel, LoadedModel], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return fitted(tmp_path_factory.mktemp("ten"), pair, windows=10)


@pytest.fixture(scope="module")
def shuffled(
    pair: tuple[LoadedModel, LoadedModel], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "aligned", Shuffled())
        return fitted(tmp_path_factory.mktemp("shuffled"), pair, windows=45)


@pytest.fixture(params=["ten_windows", "shuffled"])
def bad(request: pytest.FixtureRequest) -> Path:
    folder = request.getfixturevalue(request.param)
    assert isinstance(folder, Path)
    return folder


def evidence_of(folder: Path) -> Evidence:
    found = artifact.load(folder).evidence
    assert found is not None
    return found


def test_the_embedded_mapper_is_servable_by_the_same_rule() -> None:
    [folder] = (DEMO / "artifacts").glob("small-to-large-*")
    assert why_not_servable(evidence_of(folder), RULE) is None


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("domain", [None, "in_domain"])
@pytest.mark.parametrize("tail", [None, 1, 64])
def test_the_rule_refuses_every_setting_of_shuffled_pairs(
    shuffled: Path, domain: str | None, tail: int | None, known: bool
) -> None:
    verdict = decide(
        evidence_of(shuffled), tokens=TOKENS, domain=domain, prefix_known=known, rule=RULE,
        max_native_tail=tail,
    )  # fmt: skip
    # It is refused for what was measured, not because too little was.
    assert verdict.rows >= RULE.documents_needed()
    assert verdict.decision == "reprefill"
    assert verdict.reason in ("certified_kl_exceeds_threshold", "no_evidence")


def test_no_threshold_makes_shuffled_pairs_servable(shuffled: Path) -> None:
    why = why_not_servable(evidence_of(shuffled), RULE._replace(max_kl=1e6))
    assert why is not None
    assert "no better than with another document's cache" in why


def test_inspect_says_why_in_one_line(bad: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(bad)])
    assert result.exit_code == 0
    [line] = [line for line in result.output.splitlines() if line.startswith("Not servable")]
    few = "fitted on only 2.4 rows an input, 8 are needed" in line
    assert (few, f"above {USUAL.max_kl:g}" in line) == (_is_ten(bad), not _is_ten(bad))


def test_the_service_loads_it_and_translates_nothing(
    bad: Path, pair: tuple[LoadedModel, LoadedModel]
) -> None:
    source, target = pair
    ids = torch.arange(1, TOKENS + 1)
    cache = cache_of_text(source, ids)
    # No threshold helps ten windows.
    max_kl = 100.0 if _is_ten(bad) else USUAL.max_kl
    with served(Settings(artifacts=(bad,), shadow_rate=0, max_kl=max_kl)) as client:
        [mapper] = client.get("/mappers").json()["mappers"]
        assert mapper["state"] == "ready"
        assert ("rows an input" if _is_ten(bad) else "certified KL") in mapper["why_not_servable"]
        for tokens, domain in itertools.product((64, TOKENS, 200), (None, "in_domain", "law")):
            plan = client.post("/translate/plan", json=document(pair, tokens, domain)).json()
            assert (plan["decision"], plan["reason"] in REASONS) == ("reprefill", True)
        body = Request(document(pair, TOKENS, "in_domain"), write(Layout.NHD, cache)).body
        answer = client.post("/translate", content=body, headers=SAFETENSORS)
        assert (answer.status_code, answer.headers["kvt-decision"]) == (200, "reprefill")
        why = "no_evidence" if _is_ten(bad) else "certified_kl_exceeds_threshold"
        assert answer.headers["kvt-reason"] == why


def _is_ten(folder: Path) -> bool:
    return folder.parent.name.startswith("ten")


def document(
    pair: tuple[LoadedModel, LoadedModel], tokens: int, domain: str | None
) -> dict[str, Any]:
    """A request that could not ask for less: any tail, any KL."""
    source, target = (claim(side.identity, kv_dtype="float32") for side in pair)
    said = {"source": source, "target": target, "tokens": tokens, "layout": "NHD"}
    return said if domain is None else said | {"domain": domain}
