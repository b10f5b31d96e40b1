"""The score, calibrated to the KL: what documents as unfamiliar as this one came to, on average."""

from collections.abc import Iterable
from functools import lru_cache

from mappers.accept import Place
from mappers.evidence import Evidence
from mappers.isotonic import Isotonic, isotonic


def expected_kl(
    evidence: Evidence, places: Iterable[Place], native_tail: int, score: float
) -> float | None:
    """Mean KL of measured documents with a score like this, in nats a token; the worst place's.

    It never falls as the score grows (isotonic regression). It is a forecast of a mean and bounds
    nothing: within a domain a score says little of one document. None where a place has no scores.
    """
    found = []
    for bucket, length in places:
        rows = evidence.translated[bucket][length].get(native_tail, ())
        points = tuple((row.score, row.kl) for row in rows if row.score is not None)
        if not points:
            return None
        found.append(_fitted(points)(score))
    return max(found, default=None)


@lru_cache(maxsize=1024)
def _fitted(points: tuple[tuple[float, float], ...]) -> Isotonic:
    """Remembered, because requests differ far more than what they are compared with."""
    return isotonic(points)
