"""The page: whole, closed to the network, safe whatever a model is called, and true."""

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import pytest

from mappers.accept import Rule, decide
from mappers.evidence import Arm, Evidence, EvidenceRow
from mappers.findings import Findings
from mappers.identity import ModelIdentity
from mappers.manifest import Manifest
from mappers.models import LoadedModel
from mappers.report import RULE, render
from mappers.report_verdict import sentence
from service.policy import Policy
from tests.mappers import report_example
from tests.mappers.page import Cells, Page
from tests.mappers.report_example import DOMAINS, LAYERS, LENGTHS, NAME, TAILS

EVIDENCE = report_example.evidence()
PLOTS = {"kl": 2, "acceptance": 2, "arms": 2, "curve": 2, "drift": 2, "layers": 2, "r2": 2}


@pytest.fixture(scope="module")
def manifest(source: LoadedModel, target: LoadedModel) -> Manifest:
    named: ModelIdentity = source.identity.model_copy(update={"model": NAME})
    return report_example.manifest(named, target.identity)


@pytest.fixture(scope="module")
def text(manifest: Manifest) -> str:
    return render(manifest, EVIDENCE)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def mean(rows: Iterable[object], measure: str = "kl") -> str:
    return f"{fmean(getattr(row, measure) for row in rows):.3g}"


def number(cell: str) -> str:
    """A cell's number, without the remark behind it."""
    return cell.split(" ")[0]


def row(table: Cells, *begin: str) -> list[str]:
    """The one row that begins so."""
    (found,) = (cells for cells in table if tuple(cells[: len(begin)]) == begin)
    return found


def with_rows(rows: Iterable[EvidenceRow]) -> Evidence:
    """The example with other rows; made anew, since a copy would keep what was computed."""
    tables = {name: getattr(EVIDENCE, name) for name in ("layers", "curve", "drift", "tasks")}
    return Evidence(continuation_tokens=32, corpora=EVIDENCE.corpora, rows=tuple(rows), **tables)


def test_the_page_is_whole_and_closed_to_the_network(text: str, page: Page) -> None:
    assert page.open == []
    assert not {"script", "link", "img", "image", "iframe", "style"} & set(page.tags[6:])
    assert {value[0] for name, value in page.attributes if name == "href" and value} <= {"#"}
    assert not {"src", "srcset", "onload", "xmlns"} & {name for name, _ in page.attributes}
    assert "://" not in text
    assert text.isascii()
    assert set(re.findall(r"url\(.", text)) <= {"url(#"}


def test_ids_are_unique_and_what_is_named_is_there(text: str, page: Page) -> None:
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    named = {value.removeprefix("#") for name, value in page.attributes if name == "href" and value}
    named |= {
        found for _, value in page.attributes for found in re.findall(r"url\(#(.*?)\)", value or "")
    }
    for name, value in page.attributes:
        if name == "aria-labelledby":
            named |= set((value or "").split())
    assert named <= set(ids)


def test_names_are_text_and_never_markup(page: Page) -> None:
    assert "script" not in page.tags
    assert page.words.count(NAME) > 10, "in the heading, the verdict, captions and identities"


def test_every_section_has_its_plots_and_numbers(page: Page) -> None:
    assert page.plots == PLOTS
    assert "Not measured." not in page.words
    for section, count in PLOTS.items():
        assert len(page.tables[section]) >= count
    assert page.tags.count("desc") == sum(PLOTS.values())


def test_the_same_evidence_gives_the_same_bytes(manifest: Manifest, text: str) -> None:
    assert render(manifest, EVIDENCE) == text


def test_kl_table_is_that_of_the_rows(page: Page) -> None:
    for domain, table in zip(DOMAINS, page.tables["kl"], strict=False):
        for length in LENGTHS:
            for tail in TAILS:
                of = [
                    r
                    for r in EVIDENCE.rows
                    if (r.domain, r.length, r.native_tail, r.hops, r.probe_tokens)
                    == (domain, length, tail, 0, 0)
                ]
                cells = row(table, f"{length}", f"{tail}")
                bare = Arm.NO_CONTEXT if tail == 1 else Arm.LAST_TOKENS
                assert [number(cell) for cell in cells[3:]] == [
                    mean(r for r in of if r.arm is Arm.TRANSLATED and r.prefix_known),
                    mean(r for r in of if r.arm is Arm.TRANSLATED and not r.prefix_known),
                    mean(r for r in of if r.arm is bare),
                    mean(r for r in of if r.arm is Arm.WRONG_DOCUMENT),
                ]


def test_arms_are_all_there_and_their_differences_paired(page: Page) -> None:
    table = page.tables["arms"][0]
    assert [cells[0].removesuffix(" 40 documents") for cells in table[1:]] == [
        *("translated", "translated, first unknown"),
        *(
            "translated, first 64 exact",
            "translated, 2 times",
            "translated, 2 times, first unknown",
        ),
        *("translated, 3 times", "translated, 3 times, first unknown", "target in 8 bits"),
        *("no context", "source alone", "another document's translation"),
        *("source's cache as it is", "zero cache", "native"),
    ]
    cells = row(table, "source alone 40 documents")
    of = [r for r in EVIDENCE.rows if (r.domain, r.length) == (NAME, 320)]
    plain = {
        r.document: r.kl
        for r in of
        if r.arm is Arm.TRANSLATED and r.native_tail == 1
        if r.prefix_known and not r.hops and not r.probe_tokens
    }
    source = {r.document: r.kl for r in of if r.arm is Arm.SOURCE_ALONE}
    assert number(cells[2]) == f"{fmean(source[d] - plain[d] for d in source):.3g}"


def test_acceptance_is_what_the_rule_decides(page: Page) -> None:
    for domain, table in zip(DOMAINS, page.tables["acceptance"], strict=True):
        for length in LENGTHS:
            cells = row(table, f"{length}", "known")
            for name, cell in zip(table[0][2:], cells[2:], strict=True):
                rule = RULE._replace(max_kl=float(name.removeprefix("KL ")))
                found = decide(EVIDENCE, tokens=length, domain=domain, prefix_known=True, rule=rule)
                accepted = found.decision == "translate"
                assert number(cell) == (f"{found.native_tail}" if accepted else "all")
    last = [cells[-1] for table in page.tables["acceptance"] for cells in table[1:]]
    first = [cells[2] for table in page.tables["acceptance"] for cells in table[1:]]
    assert "all" in first
    assert "all" not in last


def test_curve_and_drift_are_means_over_documents(page: Page) -> None:
    for domain, curve, drift in zip(
        DOMAINS, page.tables["curve"], page.tables["drift"], strict=True
    ):
        for layer in range(LAYERS):
            of = [r for r in EVIDENCE.curve if (r.domain, r.layer) == (domain, layer)]
            assert [number(cell) for cell in row(curve, f"{layer}")[2:]] == [
                mean(r for r in of if r.mode == mode) for mode in ("one", "up_to")
            ]
        turn = [r for r in EVIDENCE.drift if (r.domain, r.turn) == (domain, 3)]
        cells = row(drift, "3", "target", "240", "6")
        assert [number(cell) for cell in cells[4:6]] == [mean(turn), mean(turn, "kl_fresh")]


def test_layers_and_matrices(page: Page, manifest: Manifest) -> None:
    table = page.tables["layers"][1]
    at = table[0].index("attention cosine")
    heads = [
        r.value
        for r in EVIDENCE.layers
        if (r.domain, r.layer, r.measure) == (DOMAINS[1], 2, "attention_cosine")
    ]
    assert number(row(table, "2")[at]) == f"{fmean(heads):.3g}"
    assert manifest.r2_values is not None
    assert row(page.tables["r2"][1], "source 1")[1:] == [f"{x:.3g}" for x in manifest.r2_values[1]]


def test_tasks_are_shown_with_what_is_missing(page: Page) -> None:
    (table,) = page.tables["tasks"]
    cells = row(table, NAME, "32", "200")
    assert cells[3:6] == ["80.0 % 76.0 % to 83.0 %", "75.0 % 71.0 % to 78.0 %", "-"]


def test_the_digest_is_that_of_the_file(text: str, manifest: Manifest) -> None:
    assert hashlib.sha256(EVIDENCE.model_dump_json().encode()).hexdigest() in text


def test_old_evidence_says_what_was_not_measured(manifest: Manifest) -> None:
    imported = manifest.model_copy(update={"r2_keys": None, "r2_values": None, "calibration": None})
    page = Page(render(imported, report_example.old_evidence()))
    assert page.plots == {"kl": 2, "acceptance": 2, "arms": 2}
    assert page.words.count("Not measured.") == 5, "curve, drift, layers, matrices, tasks"
    assert "the mapper was not fitted here" in page.words
    assert page.open == []


def test_the_verdict_says_where_not_and_what_it_gives(page: Page) -> None:
    def said(rule: Rule, evidence: Evidence = EVIDENCE) -> str:
        return sentence(Findings(evidence, rule))

    assert said(RULE) in page.words
    assert said(RULE._replace(max_kl=5)).startswith("Servable at a KL of 5 nats a token: all 6")
    mixed = said(RULE._replace(max_kl=0.1))
    assert "3 of 6 measured kinds of prompt" in mixed
    assert "(not code of 96, 160, 320 tokens)" in mixed
    assert "better than that tail alone" in mixed
    assert "above 0.001" in said(RULE._replace(max_kl=0.001))
    few = with_rows(r for r in EVIDENCE.rows if int(r.document.split("-")[1]) < 12)
    assert "12 documents of a length were measured, 29 are needed" in said(RULE, few)


def test_evidence_without_a_translation_says_so(manifest: Manifest) -> None:
    page = Page(render(manifest, with_rows(r for r in EVIDENCE.rows if r.arm is Arm.NATIVE)))
    assert "Nothing translated was measured." in page.words


def test_a_mean_that_is_promised_is_said_to_be_one(manifest: Manifest) -> None:
    rule = RULE._replace(risk="mean", kl_clip=0.8)
    page = Page(render(manifest, EVIDENCE, rule=rule))
    assert "the mean of their KLs, each counted as 0.8 at most" in page.words
    assert page.tables["acceptance"][0][0][-1] == "KL 0.5", "no threshold above the clip"


@pytest.mark.parametrize("kl", [float("nan"), float("inf")])
def test_kls_that_are_not_finite_are_shown_as_such(manifest: Manifest, kl: float) -> None:
    rows = (
        r.model_copy(update={"kl": kl}) if r.arm is Arm.ZERO_CACHE and r.document == "0-7" else r
        for r in EVIDENCE.rows
    )
    page = Page(render(manifest, with_rows(rows)))
    assert row(page.tables["arms"][0], "zero cache 40 documents")[1].startswith("not finite")


def test_the_page_shows_the_services_own_rule() -> None:
    assert Policy().rule(Policy().max_kl) == RULE


def test_the_command_starts_without_matplotlib() -> None:
    script = "import sys, service.cli, service.app; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
