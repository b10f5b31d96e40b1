"""What was measured of each candidate, on disk and as rows of the table.

Rows are worth something only for what was fitted when they were taken: a result names the code that
fitted it and the digest of one document's translation. Other code fits anew; where that gives the
same translation the rows stay, and are dropped where it does not.

Intervals are 95 % percentile intervals over documents; ratios are paired, that is both sides are
resampled together.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mappers.evidence import Evidence
from mappers.evidence_rows import Arm, EvidenceRow, from_table, to_table
from mappers.summary import RESAMPLES, Setting, recovered, summarise
from tests.bench.recipe_bench.reading import PROMPT_TOKENS


@dataclass(frozen=True)
class Result:
    """One candidate on one pair: its costs and a row for each document, tail and prefix.

    code: ``code.fitting``'s digest. translation: ``Fitted.digest``'s.
    """

    pair: str
    recipe: str
    group: str
    code: str
    translation: str
    flops_per_token: int
    nbytes: int
    fit_seconds: float
    rows: tuple[EvidenceRow, ...]

    def save(self, file: Path) -> None:
        facts = {name: value for name, value in vars(self).items() if name != "rows"}
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps({**facts, "rows": to_table(self.rows, EvidenceRow)}))
        partial.rename(file)

    @classmethod
    def load(cls, file: Path) -> "Result":
        facts = json.loads(file.read_text())
        rows: Any = from_table(facts.pop("rows"), EvidenceRow)
        return cls(**facts, rows=rows)


class TableRow(NamedTuple):
    """One line of the table; ``kl`` in nats a token, costs as in ``Result``."""

    pair: str
    recipe: str
    group: str
    domain: str
    native_tail: int
    first_token: str
    documents: int
    kl: float
    kl_low: float
    kl_high: float
    top1: float
    gap_recovered: float
    context_recovered: float
    flops_per_token: int
    bytes: int
    fit_seconds: float


class Ratio(NamedTuple):
    """Mean KL over mean KL on the same documents, with its interval."""

    ratio: float
    low: float
    high: float


def table_rows(result: Result, shared: Sequence[EvidenceRow]) -> Iterator[TableRow]:
    """The lines of one candidate; ``shared`` are the rows of the pair's arms without a mapper."""
    measured = {(row.domain, row.document) for row in result.rows}
    around = [row for row in shared if (row.domain, row.document) in measured]
    cells = summarise(Evidence(continuation_tokens=32, corpora={}, rows=(*around, *result.rows)))
    for setting, cell in cells.items():
        if setting.arm is Arm.TRANSLATED:
            gap, context = recovered(cells, setting)
            yield TableRow(
                result.pair,
                result.recipe,
                result.group,
                setting.domain,
                setting.native_tail,
                "exact" if setting.prefix_known else "mapped",
                cell.documents,
                cell.kl,
                cell.low,
                cell.high,
                cell.top1,
                gap,
                context,
                result.flops_per_token,
                result.nbytes,
                result.fit_seconds,
            )


def shared_rows(pair: str, shared: Sequence[EvidenceRow]) -> Iterator[TableRow]:
    """The lines of the arms without a mapper."""
    cells = summarise(Evidence(continuation_tokens=32, corpora={}, rows=tuple(shared)))
    names = {
        Arm.LAST_TOKENS: "control: only the tail",
        Arm.NO_CONTEXT: "control: only the tail",
        Arm.SOURCE_ALONE: "control: source alone",
    }
    nll = {(key.domain, key.arm): cell.nll for key, cell in cells.items()}
    none = {key.domain: cell.kl for key, cell in cells.items() if key.arm is Arm.NO_CONTEXT}
    for setting, cell in cells.items():
        if setting.arm in names:
            native, source = (nll[setting.domain, arm] for arm in (Arm.NATIVE, Arm.SOURCE_ALONE))
            yield TableRow(
                pair,
                names[setting.arm],
                "control",
                setting.domain,
                1 if setting.arm is Arm.NO_CONTEXT else setting.native_tail,
                "none",
                cell.documents,
                cell.kl,
                cell.low,
                cell.high,
                cell.top1,
                (source - cell.nll) / (source - native) if source > native else float("nan"),
                1 - cell.kl / none[setting.domain],
                0,
                0,
                0.0,
            )


def kls(rows: Sequence[EvidenceRow], setting: Setting) -> dict[str, float]:
    """KL by document."""
    wanted = setting._asdict()
    return {
        row.document: row.kl
        for row in rows
        if all(getattr(row, name) == value for name, value in wanted.items())
    }


def translated(domain: str, tail: int, *, known: bool) -> Setting:
    return Setting(domain, PROMPT_TOKENS, Arm.TRANSLATED, tail, known)


def only_tail(domain: str, tail: int) -> Setting:
    arm = Arm.NO_CONTEXT if tail == 1 else Arm.LAST_TOKENS
    return Setting(domain, PROMPT_TOKENS, arm, tail, False)


def ratio(own: Mapping[str, float], other: Mapping[str, float], *, seed: int = 0) -> Ratio:
    """Of the documents that both have, which are resampled as pairs; NaN where there are none."""
    names = sorted(own.keys() & other.keys())
    if not names:
        return Ratio(*[float("nan")] * 3)
    pairs = np.array([[one[name] for name in names] for one in (own, other)])
    drawn = np.random.default_rng(seed).integers(0, len(names), (RESAMPLES, len(names)))
    means = pairs[:, drawn].mean(axis=2)
    low, high = np.quantile(means[0] / means[1], [0.025, 0.975])
    return Ratio(float(pairs[0].mean() / pairs[1].mean()), float(low), float(high))
