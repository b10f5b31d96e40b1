"""Made-up results, for what is computed from them."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mappers.evidence_rows import Arm, EvidenceRow
from tests.bench.recipe_bench.candidates import READINGS, Group
from tests.bench.recipe_bench.measure import Reading
from tests.bench.recipe_bench.reading import PROMPT_TOKENS, TAILS
from tests.bench.recipe_bench.results import Result

DOMAINS = ("in_domain", "out_of_domain")
DOCUMENTS = 12
CLOSER = {1: 1.0, 32: 0.6, 64: 0.5, 128: 0.4}


def result(name: str, group: Group, *, kl: float, flops: int, seconds: float = 1.0) -> Result:
    """A candidate whose KL is around ``kl`` at a tail of 1, twice that out of domain and three
    times that where the first token is mapped."""
    rows = tuple(_rows(kl, READINGS[group], name))
    facts = (group.value, "code", "translation", flops, 4 * flops, seconds)
    return Result("tiny", name, *facts, rows)


def _rows(kl: float, readings: Sequence[Reading], name: str) -> Iterator[EvidenceRow]:
    noise = np.random.default_rng(len(name)).uniform(0.5, 1.5, DOCUMENTS)
    for reading in readings:
        for times, domain in enumerate(DOMAINS, start=1):
            for number, own in enumerate(noise):
                found = kl * times * own * CLOSER[reading.tail] * (1 if reading.known else 3)
                yield row(domain, number, Arm.TRANSLATED, reading.tail, found, reading.known)


def row(
    domain: str, number: int, arm: Arm, tail: int, kl: float, known: bool = False
) -> EvidenceRow:
    return EvidenceRow(
        document=f"document {number}",
        domain=domain,
        length=PROMPT_TOKENS,
        native_tail=tail,
        prefix_known=known,
        arm=arm,
        kl=kl,
        kl_max=2 * kl,
        top1=0.9,
        nll=2.0 + kl,
    )


def shared(kl_alone: float) -> Iterable[EvidenceRow]:
    """The arms without a mapper; of the last tokens alone the KL is ``kl_alone`` at any tail."""
    for domain in DOMAINS:
        for number in range(DOCUMENTS):
            yield row(domain, number, Arm.NATIVE, PROMPT_TOKENS, 0.0)
            yield row(domain, number, Arm.SOURCE_ALONE, 0, 0.5)
            yield row(domain, number, Arm.NO_CONTEXT, 1, kl_alone)
            for tail in TAILS[1:]:
                yield row(domain, number, Arm.LAST_TOKENS, tail, kl_alone)
