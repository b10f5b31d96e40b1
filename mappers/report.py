"""The mapper's report: one HTML page without a single outside reference.

Everything shown comes from the manifest and the evidence; names in it are text that somebody chose,
so the template escapes all of it. The same manifest and evidence give the same bytes.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mappers.accept import Rule
from mappers.evidence import Evidence
from mappers.findings import Findings
from mappers.identity import ModelIdentity
from mappers.manifest import Manifest
from mappers.report_sections import sections
from mappers.report_verdict import glance, grade, sentence

RULE = Rule(max_kl=0.15, alpha=0.1, delta=0.05)
"""The rule that a page shows unless it is told another: the service's defaults."""


def render(manifest: Manifest, evidence: Evidence, *, rule: Rule = RULE) -> str:
    """The whole page, with verdicts under ``rule``; in ASCII, whatever names are written in."""
    findings = Findings(evidence, rule)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        manifest=manifest,
        evidence=evidence,
        evidence_digest=f"sha256:{hashlib.sha256(evidence.model_dump_json().encode()).hexdigest()}",
        source=manifest.source,
        target=manifest.target,
        verdict=sentence(findings),
        grade=grade(findings),
        glance=glance(findings),
        sections=list(sections(manifest, findings)),
        documents=_documents(evidence),
        identities=list(_identities(manifest.source, manifest.target)),
    )
    return page.encode("ascii", "xmlcharrefreplace").decode()


def _documents(evidence: Evidence) -> dict[str, int]:
    """How many documents of each domain were measured."""
    return {
        domain: len({row.document for row in evidence.rows if row.domain == domain})
        for domain in evidence.corpora
    }


def _identities(source: ModelIdentity, target: ModelIdentity) -> Iterator[tuple[str, Any, Any]]:
    a, b = (side.model_dump(mode="json") for side in (source, target))
    for field in {**a, **b}:
        if field == "rope":
            for name in a[field]:
                yield f"rope {name.replace('_', ' ')}", a[field][name], b[field][name]
        elif field == "attention":
            yield field, _kinds(a[field]), _kinds(b[field])
        else:
            # Only zero points may be left out: by whoever has none.
            yield field.replace("_", " "), a.get(field, False), b.get(field, False)


def _kinds(layers: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(layers))
