"""All that is measured of one document: every arm at every length, tail and hop count."""

from collections.abc import Iterator
from dataclasses import dataclass

from mappers.arms import Reading, read_all
from mappers.bench import Bench
from mappers.curve import layer_curve
from mappers.evidence_rows import Arm, CurveRow, DriftRow, EvidenceRow
from mappers.hops import drift
from mappers.layer_measures import Sums, layer_sums
from mappers.prompt_rows import BARE_TAILS, Over, Prompt, bare_rows, prompt_rows


@dataclass(frozen=True)
class Found:
    """What one document gave; ``sums`` is empty where layers were not looked into."""

    rows: tuple[EvidenceRow, ...]
    curve: tuple[CurveRow, ...]
    drift: tuple[DriftRow, ...]
    sums: Sums


def measure_document(
    bench: Bench, reading: Reading, wrong: Reading | None, *, document: str, domain: str, deep: bool
) -> Found:
    """Every row of one document; ``wrong`` is another one's reading. ``deep``: curves as well."""
    _, rounded = read_all(bench.rounded, reading.ids, reading.lengths)
    rows: list[EvidenceRow] = []
    prompts = [Prompt(bench, document, domain, reading, length) for length in reading.lengths]
    for prompt, logits in zip(prompts, rounded, strict=True):
        rows.append(prompt.row(Over(Arm.QUANTIZED), logits, tail=prompt.length))
        rows += prompt_rows(prompt, wrong, deep)
    for tail in sorted({*bench.native_tails, *BARE_TAILS}):
        rows += bare_rows(prompts, tail)
    if not deep:
        return Found(tuple(rows), (), (), {})
    names = {"document": document, "domain": domain}
    tail = min(bench.native_tails)
    turned: Iterator[DriftRow] = iter(())
    if bench.pair is not None:
        step = max(1, max(reading.lengths) // bench.depth.turns)
        turned = drift(bench.pair, reading.ids, **names, turn_tokens=step, turns=bench.depth.turns)
    curve = layer_curve(bench.target, reading, **names, tail=tail)
    return Found(tuple(rows), tuple(curve), tuple(turned), layer_sums(bench.target, reading))
