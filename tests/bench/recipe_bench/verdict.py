"""Whether the defaults of ``kvt fit --budget`` keep what was promised, by paired ratios.

Against each published recipe stands the default of the largest budget that costs no more FLOPs, so
nothing is chosen by what was measured here.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mappers.evidence_rows import EvidenceRow
from tests.bench.recipe_bench.candidates import Group
from tests.bench.recipe_bench.results import Ratio, Result, kls, only_tail, ratio, translated

DOMAINS = ("in_domain", "out_of_domain")
AIMS = {"paper": 0.5, "CacheBridge": 0.8, "aither": 1.0}
"""KL over that of the published recipe, at most; by the beginning of its name."""
PUBLISHED_TAILS = (1, 32)
TAIL_AIM = 0.5
TAILS = (32, 64, 128)
SPEED_AIM = 3.0


class Verdict(NamedTuple):
    """One promise about one pair. ``first_token``: the other's; ours is always exact."""

    pair: str
    ours: str
    other: str
    domain: str
    native_tail: int
    first_token: str
    ratio: Ratio
    aim: float

    @property
    def met(self) -> bool:
        """By the ratio of the means; a NaN has not met it."""
        return self.ratio.ratio <= self.aim


class Speed(NamedTuple):
    """CPU seconds of another fit over ours; ``aim`` is the least."""

    pair: str
    ours: str
    other: str
    ratio: float
    aim: float

    @property
    def met(self) -> bool:
        return self.ratio >= self.aim


def against_published(results: Sequence[Result]) -> Iterator[Verdict]:
    """Each published recipe as published, with its first token mapped, and with it exact."""
    for other, own in _opponents(results):
        aim = next(aim for name, aim in AIMS.items() if other.recipe.startswith(name))
        for tail in PUBLISHED_TAILS:
            for known in (False, True):
                for domain in DOMAINS:
                    found = ratio(
                        kls(own.rows, translated(domain, tail, known=True)),
                        kls(other.rows, translated(domain, tail, known=known)),
                    )
                    first = "exact" if known else "mapped"
                    names = (own.pair, own.recipe, other.recipe)
                    yield Verdict(*names, domain, tail, first, found, aim)


def against_tails(results: Sequence[Result], shared: Sequence[EvidenceRow]) -> Iterator[Verdict]:
    """Each default against reading as many last tokens over nothing; ``shared``: the pair's rows
    of the arms without a mapper."""
    for own in _defaults(results):
        for tail in TAILS:
            for domain in DOMAINS:
                found = ratio(
                    kls(own.rows, translated(domain, tail, known=True)),
                    kls(shared, only_tail(domain, tail)),
                )
                names = (own.pair, own.recipe, "only the tail")
                yield Verdict(*names, domain, tail, "none", found, TAIL_AIM)


def speeds(results: Sequence[Result]) -> Iterator[Speed]:
    """Fits of aither-kvcache against our fit of the same maps, and the default of their cost."""
    same = [
        (other, own)
        for other in results
        for own in results
        if own.recipe == other.recipe.replace("aither-kvcache", "full_head")
    ]
    for other, own in [*same, *_opponents(results)]:
        if other.recipe.startswith("aither"):
            faster = other.fit_seconds / own.fit_seconds
            yield Speed(own.pair, own.recipe, other.recipe, faster, SPEED_AIM)


def _opponents(results: Sequence[Result]) -> Iterator[tuple[Result, Result]]:
    """Each published result with the dearest default that costs no more."""
    for other in results:
        able = [one for one in _defaults(results) if one.flops_per_token <= other.flops_per_token]
        if other.group == Group.PUBLISHED and able:
            yield other, max(able, key=lambda one: one.flops_per_token)


def _defaults(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.group == Group.DEFAULT]
