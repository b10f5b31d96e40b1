"""A mapper's record with every table filled: numbers drawn at random, shaped like measured ones."""

from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np

from mappers.evidence import Arm, Evidence, EvidenceRow
from mappers.evidence_rows import CurveRow, DriftRow, LayerRow, TaskRow
from mappers.identity import ModelIdentity
from mappers.layer_measures import MEASURES
from mappers.manifest import Calibration, Manifest, mapper_id

NAME = "<script>alert('x')</script>"
DOMAINS = (NAME, "code")
LENGTHS, TAILS, DOCUMENTS, LAYERS, HEADS, TURNS = (96, 160, 320), (1, 32), 40, 3, 2, 4

_KLS = {
    Arm.TRANSLATED: 0.06,
    Arm.WRONG_DOCUMENT: 0.9,
    Arm.RAW_SOURCE: 2.0,
    Arm.ZERO_CACHE: 1.5,
    Arm.LAST_TOKENS: 0.7,
    Arm.NO_CONTEXT: 1.2,
    Arm.SOURCE_ALONE: 0.8,
    Arm.QUANTIZED: 0.004,
    Arm.NATIVE: 0.0,
}


def manifest(source: ModelIdentity, target: ModelIdentity) -> Manifest:
    """Of a mapper between these two; each target layer reads one source layer."""
    random = np.random.default_rng(1)
    keys, values = random.uniform(-0.2, 1, (2, source.num_layers, target.num_layers)).tolist()
    return Manifest(
        mapper_id=mapper_id(source, target, "full_head"),
        source=source,
        target=target,
        recipe="full_head",
        sources=tuple((layer % source.num_layers,) for layer in range(target.num_layers)),
        skipped_positions=4,
        weights_dtype="float32",
        weight_bytes=4_202_496,
        prefix_bytes=8_200,
        flops_per_token=2_097_152,
        libraries={"python": "3.11.7", "torch": "2.13.0"},
        created_at=datetime(2026, 11, 29, tzinfo=UTC),
        ridge=1e-4,
        r2_keys=keys,
        r2_values=values,
        calibration=Calibration(
            corpus_digest=f"sha256:{'ab' * 32}", documents=200, tokens=175_221, rows=43_607
        ),
    )


def evidence() -> Evidence:
    """Translations in the second domain are three times as bad as in the first."""
    random = np.random.default_rng(0)
    return Evidence(
        continuation_tokens=32,
        corpora={domain: f"sha256:{number}" for number, domain in enumerate(DOMAINS)},
        rows=tuple(_rows(random)),
        layers=tuple(_layers(random)),
        curve=tuple(_curve(random)),
        drift=tuple(_drift(random)),
        tasks=tuple(_tasks()),
    )


def old_evidence() -> Evidence:
    """The same of schema 1: rows alone, with the measures that there were."""
    none = dict.fromkeys(("kl_p95", "kl_p99", "worst_position", "top5", "agreement", "score"))
    rows = tuple(row.model_copy(update=none) for row in evidence().rows)
    return Evidence(schema_version=1, continuation_tokens=32, corpora=evidence().corpora, rows=rows)


def _rows(random: np.random.Generator) -> Iterator[EvidenceRow]:
    for number, domain in enumerate(DOMAINS):
        for document in range(DOCUMENTS):
            hardness = (3.0 if number else 1.0) * random.lognormal(0, 0.3)
            for length in LENGTHS:
                for arm, tail, known, hops, probe in _kinds(length):
                    kl = _KLS[arm] * hardness * random.lognormal(0, 0.1) / (1 + tail / 32)
                    kl *= 0.8 if probe else 1 + hops / 4
                    yield EvidenceRow(
                        document=f"{number}-{document}",
                        domain=domain,
                        length=length,
                        native_tail=tail,
                        prefix_known=known,
                        hops=hops,
                        probe_tokens=probe,
                        probe_error=0.1 if probe else None,
                        arm=arm,
                        kl=kl,
                        kl_max=kl * 8,
                        kl_p95=kl * 4,
                        kl_p99=kl * 7,
                        worst_position=3,
                        top1=1 - min(kl, 0.9),
                        top5=1 - min(kl, 0.8),
                        nll=3.5 if arm is Arm.SOURCE_ALONE else 2.0 + kl,
                        agreement=20 if document < 8 else None,
                    )


def _kinds(length: int) -> Iterator[tuple[Arm, int, bool, int, int]]:
    """Arm, tail, whether first tokens are known, hops, probe tokens."""
    yield Arm.NATIVE, length, False, 0, 0
    yield Arm.SOURCE_ALONE, 0, False, 0, 0
    yield Arm.QUANTIZED, length, False, 0, 0
    for tail in TAILS:
        yield (Arm.NO_CONTEXT if tail == 1 else Arm.LAST_TOKENS), tail, False, 0, 0
        yield Arm.WRONG_DOCUMENT, tail, True, 0, 0
        yield Arm.RAW_SOURCE, tail, False, 0, 0
        yield Arm.ZERO_CACHE, tail, False, 0, 0
        yield Arm.TRANSLATED, tail, True, 0, 64
        for hops in range(3):
            yield Arm.TRANSLATED, tail, True, hops, 0
            yield Arm.TRANSLATED, tail, False, hops, 0


def _layers(random: np.random.Generator) -> Iterator[LayerRow]:
    for domain in DOMAINS:
        for layer in range(LAYERS):
            for head in range(HEADS):
                for measure in MEASURES:
                    value = float(random.uniform(0.6, 1))
                    yield LayerRow(
                        domain=domain,
                        layer=layer,
                        head=head,
                        measure=measure,
                        value=value,
                        low=value - 0.05,
                        high=value + 0.02,
                        documents=8,
                    )


def _curve(random: np.random.Generator) -> Iterator[CurveRow]:
    for domain in DOMAINS:
        for document in range(6):
            for mode, factor in (("one", 0.3), ("up_to", 1.0)):
                for layer in range(LAYERS):
                    yield CurveRow(
                        document=f"{document}",
                        domain=domain,
                        length=320,
                        native_tail=1,
                        mode=mode,
                        layer=layer,
                        kl=factor * 0.02 * (layer + 1) * random.lognormal(0, 0.3),
                        top1=0.9,
                    )


def _drift(random: np.random.Generator) -> Iterator[DriftRow]:
    for domain in DOMAINS:
        for document in range(6):
            for turn in range(1, TURNS + 1):
                fresh = 0.05 * random.lognormal(0, 0.3)
                yield DriftRow(
                    document=f"{document}",
                    domain=domain,
                    turn=turn,
                    hops=turn - 1,
                    length=80 * turn,
                    side="target" if turn % 2 else "source",
                    kl=fresh * (1 + turn / 10),
                    top1=0.9,
                    nll=2.0,
                    kl_fresh=fresh,
                )


def _tasks() -> Iterator[TaskRow]:
    for measure, value in (("native", 0.8), ("translated", 0.75), ("retention", 0.9375)):
        yield TaskRow(
            task=NAME,
            native_tail=32,
            questions=200,
            measure=measure,
            value=value,
            low=value - 0.04,
            high=value + 0.03,
        )
