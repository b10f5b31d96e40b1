"""Records of evidence whose every KL is chosen by the test."""

from collections.abc import Sequence
from typing import Any

from mappers.evidence import Arm, Evidence, EvidenceRow


def rows(
    kl: float,
    *,
    length: int = 128,
    tail: int = 1,
    domain: str = "chat",
    known: bool = True,
    hops: int = 0,
    count: int = 30,
    arm: Arm = Arm.TRANSLATED,
) -> list[EvidenceRow]:
    return [
        EvidenceRow(
            document=f"d{n}",
            domain=domain,
            length=length,
            native_tail=tail,
            prefix_known=known,
            hops=hops,
            arm=arm,
            kl=kl,
            kl_max=kl,
            top1=1.0,
            nll=2.0,
        )
        for n in range(count)
    ]


def varied(
    kls: Sequence[float],
    *,
    scores: Sequence[float] | None = None,
    errors: Sequence[float] | None = None,
    probe_tokens: int = 0,
    **place: Any,
) -> list[EvidenceRow]:
    """Rows whose documents differ: in KL, and if given in score and probe error."""
    return [
        row.model_copy(
            update={
                "kl": kls[n],
                "score": None if scores is None else scores[n],
                "probe_tokens": probe_tokens,
                "probe_error": None if errors is None else errors[n],
            }
        )
        for n, row in enumerate(rows(0.0, count=len(kls), **place))
    ]


def evidence(*groups: list[EvidenceRow]) -> Evidence:
    return Evidence(
        continuation_tokens=32,
        corpora={"chat": "sha256:0"},
        rows=tuple(row for group in groups for row in group),
    )
