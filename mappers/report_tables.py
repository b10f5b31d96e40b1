"""The report's numbers as text: what is behind each plot, and the tables without one."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from mappers.accept import Verdict
from mappers.evidence import Arm
from mappers.evidence_rows import TaskMeasure, TaskRow
from mappers.findings import Findings, bare
from mappers.summary import Cell, Point, Setting, Turn, compared, recovered, recovered_intervals

Text = str | tuple[str, str]
"""What a cell says, maybe with a smaller remark."""
Answers = Mapping[float, Mapping[Setting, Verdict]]
"""What the rule says to every kind of prompt, by threshold."""


class Table(NamedTuple):
    """Numbers as they are shown."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Text]]


NAMES = {
    Arm.TRANSLATED: "translated",
    Arm.QUANTIZED: "target in 8 bits",
    Arm.LAST_TOKENS: "tail alone",
    Arm.NO_CONTEXT: "no context",
    Arm.SOURCE_ALONE: "source alone",
    Arm.WRONG_DOCUMENT: "another document's translation",
    Arm.RAW_SOURCE: "source's cache as it is",
    Arm.ZERO_CACHE: "zero cache",
    Arm.NATIVE: "native",
}
"""The arms in words, in the order in which they are shown."""


def nats(value: float | None) -> str:
    """Three digits; what is not finite or not there is said."""
    if value is None:
        return "-"
    return f"{value:.3g}" if math.isfinite(value) else "not finite"


def percent(share: float) -> str:
    """A share; a dash where it is undefined."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else "-"


def within(value: float, low: float, high: float) -> Text:
    """A number with its interval."""
    return nats(value), f"{nats(low)} to {nats(high)}"


def arm_name(key: Setting) -> str:
    """An arm in words, with what makes it differ from the plain translation."""
    name = NAMES[key.arm]
    if key.arm is not Arm.TRANSLATED:
        return name
    hops = "" if not key.hops else f", {key.hops + 1} times"
    probe = "" if not key.probe_tokens else f", first {key.probe_tokens} exact"
    return f"{name}{hops}{probe}{'' if key.prefix_known else ', first unknown'}"


def kl_table(findings: Findings, domain: str) -> Table:
    """Every column of a row reads the same tokens natively."""

    def rows() -> Iterator[list[Text]]:
        for key in findings.translated(domain):
            own = findings.cells[key]
            others = (key._replace(prefix_known=False), bare(key), _wrong(key))
            cells = [own, *(findings.cells.get(other) for other in others)]
            yield [f"{key.length}", f"{key.native_tail}", f"{own.documents}", *map(_kl, cells)]

    columns = ("translated", "first tokens unknown", "tail alone", "another document's")
    return Table(("prompt tokens", "native tail", "documents", *columns), list(rows()))


def kept_table(findings: Findings, domain: str) -> Table:
    """What is left of the gain of having read the prompt."""

    def rows() -> Iterator[list[Text]]:
        for key in findings.translated(domain):
            cell, found = findings.cells[key], recovered(findings.cells, key)
            gap, context = recovered_intervals(findings.rows, key)
            yield [
                f"{key.length}",
                f"{key.native_tail}",
                nats(cell.nll),
                percent(cell.top1),
                _share(found.gap, *gap),
                _share(found.context, *context),
            ]

    columns = ("NLL", "top-1 agreement", "gap recovered", "context recovered")
    return Table(("prompt tokens", "native tail", *columns), list(rows()))


def arms_of(findings: Findings, key: Setting) -> list[tuple[Setting, Cell]]:
    """The arms beside a translated setting: of its length, with its tail or with none."""
    found = [
        (other, cell)
        for other, cell in findings.cells.items()
        if other[:2] == key[:2] and other.native_tail in (0, key.native_tail)
    ]
    return sorted(found, key=lambda pair: _order(pair[0]))


def arms_table(findings: Findings, key: Setting) -> Table:
    """The arms beside a translated setting, with every measure."""
    rows = [
        [_arm(other, cell), *_measures(findings, key, other, cell)]
        for other, cell in arms_of(findings, key)
    ]
    return Table(("arm", *_MEASURES), rows)


def all_arms_table(findings: Findings, domain: str) -> Table:
    """The same at every length and tail that were translated."""
    rows = [
        [_arm(key, cell), f"{key.length}", f"{own.native_tail}"]
        + [*_measures(findings, own, key, cell)]
        for own in findings.translated(domain)
        for key, cell in arms_of(findings, own)
    ]
    return Table(("arm", "prompt tokens", "native tail", *_MEASURES), rows)


_MEASURES = (
    *("KL", "KL minus translated's", "KL p95", "KL p99", "worst KL"),
    *("top-1", "top-5", "NLL", "same greedy tokens"),
)


def _arm(key: Setting, cell: Cell) -> Text:
    return arm_name(key), f"{cell.documents} documents"


def _measures(findings: Findings, own: Setting, key: Setting, cell: Cell) -> Iterator[Text]:
    """Every measure of an arm, and its KL minus that of the translation beside it."""
    against = compared(findings.rows, key, own) if key != own else None
    yield _kl(cell)
    yield "-" if against is None else within(*against[1:])
    yield from map(_if_taken, (cell.kl_p95, cell.kl_p99))
    yield nats(cell.kl_worst)
    yield from map(percent, (cell.top1, cell.top5))
    yield nats(cell.nll)
    yield _if_taken(cell.agreement)


def acceptance_table(found: Answers, domain: str) -> Table:
    """The certified tail at each threshold, and the share of the prompt that it is."""
    kinds = [key for key in next(iter(found.values())) if key.domain == domain]
    rows: list[list[Text]] = []
    for key in kinds:
        known = "known" if key.prefix_known else "unknown"
        tails = [_tail(key, verdicts[key]) for verdicts in found.values()]
        rows.append([f"{key.length}", known, *tails])
    return Table(("prompt tokens", "first tokens", *(f"KL {t:g}" for t in found)), rows)


def translated_shares(found: Answers, domain: str) -> dict[int, list[float]]:
    """The share of prompts that is translated, by length, at each threshold; first tokens known."""
    shares: dict[int, list[float]] = defaultdict(list)
    for verdicts in found.values():
        for key, verdict in verdicts.items():
            if key.domain == domain and key.prefix_known:
                accepted = verdict.decision == "translate"
                shares[key.length].append(accepted * (1 - verdict.native_tail / key.length))
    return shares


def curve_table(one: Mapping[int, Point], up_to: Mapping[int, Point]) -> Table:
    """KL by layer."""
    rows = [
        [f"{layer}", f"{one[layer].documents}", within(*one[layer][1:]), within(*up_to[layer][1:])]
        for layer in sorted(one)
    ]
    return Table(("target layer", "documents", "this layer alone", "all up to it"), rows)


def drift_table(turns: Mapping[int, Turn]) -> Table:
    """KL by turn."""
    rows = [
        [
            f"{number}",
            turn.side,
            f"{turn.length}",
            f"{turn.kl.documents}",
            *(within(*found[1:]) for found in (turn.kl, turn.fresh, turn.added)),
        ]
        for number, turn in sorted(turns.items())
    ]
    columns = ("at every turn", "once", "difference")
    return Table(("turn", "model that reads", "tokens", "documents", *columns), rows)


def measures_table(heads: Mapping[str, Mapping[int, Sequence[float]]]) -> Table:
    """Layer measures: the mean over heads, and the lowest and highest head."""
    layers = sorted({layer for found in heads.values() for layer in found})

    def cell(values: Sequence[float]) -> Text:
        return within(sum(values) / len(values), min(values), max(values))

    rows = [[f"{n}", *(cell(found[n]) for found in heads.values())] for n in layers]
    return Table(("target layer", *(name.replace("_", " ") for name in heads)), rows)


def matrix_table(r2: Sequence[Sequence[float]]) -> Table:
    """R2, a row for each source layer."""
    rows = [[f"source {number}", *map(nats, row)] for number, row in enumerate(r2)]
    return Table(("", *(f"target {layer}" for layer in range(len(r2[0])))), rows)


def _if_taken(value: float) -> str:
    return "-" if math.isnan(value) else nats(value)


def _share(value: float, low: float, high: float) -> Text:
    return (percent(value), f"{percent(low)} to {percent(high)}") if value == value else "-"


def tasks_table(rows: Sequence[TaskRow]) -> Table:
    """Shares of right answers, and what of them is kept."""
    tasks: dict[tuple[str, int, int], dict[str, Text]] = defaultdict(dict)
    for row in rows:
        found = _share(row.value, row.low, row.high)
        tasks[row.task, row.native_tail, row.questions][row.measure] = found
    measures = get_args(TaskMeasure)
    return Table(
        ("task", "native tail", "questions", *(name.replace("_", " ") for name in measures)),
        [
            [task, f"{tail}", f"{questions}", *(found.get(name, "-") for name in measures)]
            for (task, tail, questions), found in tasks.items()
        ],
    )


def _wrong(key: Setting) -> Setting:
    return key._replace(arm=Arm.WRONG_DOCUMENT)


def _kl(cell: Cell | None) -> Text:
    return "-" if cell is None else within(cell.kl, cell.low, cell.high)


def _tail(key: Setting, verdict: Verdict) -> Text:
    if verdict.decision != "translate":
        return "all"
    return f"{verdict.native_tail}", percent(verdict.native_tail / key.length)


def _order(key: Setting) -> tuple[int, int, int, bool]:
    return list(NAMES).index(key.arm), key.hops, key.probe_tokens, not key.prefix_known
