"""The report's sections: what each is about, its plots, a panel for each domain, and its tables."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from mappers.evidence_rows import Arm, LayerRow
from mappers.findings import Findings, bare
from mappers.manifest import Manifest
from mappers.plots_acceptance import acceptance
from mappers.plots_drift import drift_curve
from mappers.plots_kl import arms, ends, kl_by_length
from mappers.plots_layers import heat_map, layer_curve, layer_measures
from mappers.report_tables import (
    Table,
    acceptance_table,
    all_arms_table,
    arm_name,
    arms_of,
    arms_table,
    curve_table,
    drift_table,
    kept_table,
    kl_table,
    matrix_table,
    measures_table,
    tasks_table,
    translated_shares,
)
from mappers.servable import verdicts
from mappers.summary import Cell, curve_points, drift_points

THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The columns of the acceptance table, in nats a token, beside the threshold in force."""

STAIRS = tuple(float(t) for t in np.geomspace(0.01, 3, 121))


class Panel(NamedTuple):
    """One plot and what it is of."""

    caption: str
    svg: Markup


class Section(NamedTuple):
    """One heading of the page; without panels and tables it says that it was not measured.

    ``tables`` are shown, ``more`` are to be opened, by caption. Panels of a ``whole`` section take
    a row each.
    """

    name: str
    heading: str
    lead: str
    panels: Sequence[Panel] = ()
    tables: Mapping[str, Table] = {}
    more: Mapping[str, Table] = {}
    whole: bool = False


def sections(manifest: Manifest, findings: Findings) -> Iterator[Section]:
    """All sections, in the order of the page."""
    yield _kl(findings)
    yield _acceptance(findings)
    yield _arms(findings)
    yield _curve(findings)
    yield _drift(findings)
    yield _measures(findings)
    yield _matrices(manifest)
    yield _tasks(findings)


def _kl(findings: Findings) -> Section:
    panels, more, kept = [], {}, {}
    keys = [key for domain in findings.domains for key in findings.translated(domain)]
    both = (k for key in keys for k in (key, bare(key)) if k in findings.cells)
    span = ends(findings.cells[key] for key in both)
    for number, domain in enumerate(findings.domains):
        own: dict[int, dict[int, Cell]] = defaultdict(dict)
        alone: dict[int, dict[int, Cell]] = defaultdict(dict)
        for key in findings.translated(domain):
            own[key.native_tail][key.length] = findings.cells[key]
            if bare(key) in findings.cells:
                alone[key.native_tail][key.length] = findings.cells[bare(key)]
        if own:
            look: dict[str, Any] = dict(max_kl=findings.rule.max_kl, span=span)
            svg = kl_by_length(f"kl-{number}", domain, own, alone, **look)
            panels.append(Panel(domain, svg))
            more[f"{domain}: numbers"] = kl_table(findings, domain)
            kept[f"{domain}: gap and context recovered"] = kept_table(findings, domain)
    return Section(
        "kl",
        "KL against the target's own cache",
        "Mean over the 32 positions after the prompt and over documents, with 95 % intervals "
        "(bootstrap over documents). Solid: translated, with the last tokens (the tail) read "
        "natively. Dashed: the same tail read over nothing; where a solid line is not below its "
        "dashed one, translating gives nothing. Gap recovered is (source NLL - translated NLL) / "
        "(source NLL - native NLL), context recovered 1 - KL / KL(no context); a dash: undefined.",
        panels,
        more=more | kept,
    )


def _acceptance(findings: Findings) -> Section:
    evidence, rule = findings.evidence, findings.rule
    # Where KLs are clipped, a threshold above that says nothing.
    most = rule.kl_clip if rule.risk == "mean" else math.inf
    stairs = {t: verdicts(evidence, rule._replace(max_kl=t)) for t in STAIRS if t < most}
    shown = [t for t in sorted({*THRESHOLDS, rule.max_kl}) if t < most]
    found = {t: verdicts(evidence, rule._replace(max_kl=t)) for t in shown}
    panels, more = [], {}
    for number, domain in enumerate(findings.domains):
        shares = translated_shares(stairs, domain)
        if shares:
            svg = acceptance(f"acceptance-{number}", domain, list(stairs), shares, rule.max_kl)
            panels.append(Panel(domain, svg))
            more[f"{domain}: numbers"] = acceptance_table(found, domain)
    return Section(
        "acceptance",
        "Acceptance against the threshold",
        "How much of a prompt may be translated if the threshold is moved, the first tokens known: "
        "all but the smallest native tail that is certified. In the tables: that tail and its "
        "share of the prompt; all: re-prefill.",
        panels,
        more=more,
    )


def _arms(findings: Findings) -> Section:
    panels, tables, more = [], {}, {}
    examples = {d: findings.example(d, Arm.WRONG_DOCUMENT) for d in findings.domains}
    beside = {d: arms_of(findings, key) for d, key in examples.items() if key is not None}
    span = ends(cell for found in beside.values() for _, cell in found)
    for number, (domain, key) in enumerate(examples.items()):
        if key is not None:
            shown = [(arm_name(k), cell) for k, cell in beside[domain] if k.arm is not Arm.NATIVE]
            look: dict[str, Any] = dict(max_kl=findings.rule.max_kl, span=span)
            svg = arms(f"arms-{number}", domain, shown, **look)
            caption = f"{domain}, {key.length} tokens, native tail {key.native_tail}"
            panels.append(Panel(caption, svg))
            tables[caption] = arms_table(findings, key)
            more[f"{domain}: every length and tail"] = all_arms_table(findings, domain)
    return Section(
        "arms",
        "Arms",
        "What the target predicts when it reads something else in place of its own cache. The "
        "target with weights in 8 bits, which reads everything itself, is a yardstick of a small "
        "KL. Differences are paired: on the same documents, with 95 % intervals.",
        panels,
        tables,
        more,
    )


def _curve(findings: Findings) -> Section:
    points, panels, more = curve_points(findings.evidence.curve), [], {}
    for number, domain in enumerate(dict.fromkeys(key[0] for key in points)):
        one, up_to = (
            {layer: p for (d, m, layer), p in points.items() if (d, m) == (domain, mode)}
            for mode in ("one", "up_to")
        )
        svg = layer_curve(f"curve-{number}", domain, one, up_to)
        panels.append(Panel(domain, svg))
        more[f"{domain}: numbers"] = curve_table(one, up_to)
    return Section(
        "curve",
        "Where in the target the errors arise",
        "Translated keys and values in one layer of the native cache at a time, and in all "
        "layers from the first up to one, at the longest prompts; bands are 95 % intervals.",
        panels,
        more=more,
    )


def _drift(findings: Findings) -> Section:
    points, panels, more = drift_points(findings.evidence.drift), [], {}
    for number, domain in enumerate(dict.fromkeys(key[0] for key in points)):
        turns = {turn: found for (d, turn), found in points.items() if d == domain}
        svg = drift_curve(f"drift-{number}", domain, turns)
        panels.append(Panel(domain, svg))
        more[f"{domain}: numbers"] = drift_table(turns)
    return Section(
        "drift",
        "Drift over turns",
        "A conversation that goes to and fro: each turn, the model at hand reads new tokens over "
        "what it was given, then all is translated into the other's cache. Against it: one "
        "translation of a native cache of the same tokens. Bands are 95 % intervals.",
        panels,
        more=more,
    )


def _measures(findings: Findings) -> Section:
    domains: dict[str, list[LayerRow]] = defaultdict(list)
    for row in findings.evidence.layers:
        domains[row.domain].append(row)
    panels, more = [], {}
    for number, (domain, rows) in enumerate(domains.items()):
        heads: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            heads[row.measure][row.layer].append(row.value)
        svg = layer_measures(f"layers-{number}", domain, heads)
        panels.append(Panel(domain, svg))
        more[f"{domain}: numbers"] = measures_table(heads)
    return Section(
        "layers",
        "Layers and heads",
        "Over mapped tokens of held-out text; a dot is a kv head, the line the mean of a layer. "
        "Error concentration above 1: the errors lie where attention reads. In the tables: the "
        "mean over heads, with the lowest and the highest.",
        panels,
        more=more,
        whole=True,
    )


def _tasks(findings: Findings) -> Section:
    found = findings.evidence.tasks
    return Section(
        "tasks",
        "Tasks",
        "Right answers to multiple-choice questions whose prompt was translated but for the native "
        "tail. Retention is translated / native; from chance, (translated - chance) / (native - "
        "chance). Gap recovered is (translated - source) / (native - source).",
        tables={"right answers": tasks_table(found)} if found else {},
    )


def _matrices(manifest: Manifest) -> Section:
    panels, more = [], {}
    for name, r2 in (("keys", manifest.r2_keys), ("values", manifest.r2_values)):
        if r2 is not None:
            svg = heat_map(f"r2-{name}", name, r2, manifest.sources)
            panels.append(Panel(name, svg))
            more[f"{name}: numbers"] = matrix_table(r2)
    every = all(len(layers) == manifest.source.num_layers for layers in manifest.sources)
    read = "The mapper reads all of them." if every else "Framed: the layers that the mapper reads."
    return Section(
        "r2",
        "Which source layer predicts which target layer",
        f"R\N{SUPERSCRIPT TWO} of one source layer alone, on the calibration text. {read}",
        panels,
        more=more,
    )
