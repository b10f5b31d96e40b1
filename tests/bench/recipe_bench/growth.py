"""How many calibration documents a fit needs: the same candidates after 10, 20, ... 500 windows.

Each window is the first of its document, and every fourth row is fitted, as the paper does, so that
500 windows are affordable.
"""

import time
from collections.abc import Iterator, Sequence

from mappers.collect import aligned, content, lagged, sampled_positions
from mappers.corpus import Corpus
from mappers.geometry import Geometry
from mappers.moments import PairMoments
from mappers.passes import empty_sums
from mappers.plan import FitPlan
from mappers.progress import steps
from tests.bench.recipe_bench.candidates import fit_plan, name_of, our_plan
from tests.bench.recipe_bench.fitted import Fitted, Models, of_mapper
from tests.bench.recipe_bench.sums import SKIPPED

COUNTS = (10, 20, 50, 100, 200, 500)
STRIDE = 4
READ = 4


def plans(geometry: Geometry) -> list[FitPlan]:
    """What is fitted again and again, all at the cost of full_head."""
    layers = min(READ, geometry.source_layers)
    heads = layers * geometry.source_heads
    return [our_plan(recipe="full_head", k=layers), our_plan(recipe="top_heads", k=heads)]


def names(geometry: Geometry) -> list[str]:
    """Of all candidates, in the order in which ``grown`` gives them."""
    return [_name(plan, count) for count in COUNTS for plan in plans(geometry)]


def grown(models: Models, corpus: Corpus, *, progress: bool = True) -> Iterator[tuple[str, Fitted]]:
    """A mapper of each candidate at each count that the corpus reaches."""
    geometry = models.geometry
    sums = [empty_sums(plan, models.source, models.target) for plan in plans(geometry)]
    seconds = [0.0] * len(sums)
    for number in steps(range(len(corpus.windows)), "collecting", show=progress):
        for index, spent in enumerate(_add(models, corpus, number, sums)):
            seconds[index] += spent
        if number + 1 in COUNTS:
            for plan, moments, collecting in zip(plans(geometry), sums, seconds, strict=True):
                began = time.process_time()
                mapper = fit_plan(models, corpus, moments, plan)
                spent = time.process_time() - began + collecting
                yield _name(plan, number + 1), of_mapper(mapper, spent)


def _name(plan: FitPlan, count: int) -> str:
    return f"{name_of(plan)}, {count} documents"


def _add(
    models: Models, corpus: Corpus, number: int, sums: Sequence[PairMoments]
) -> Iterator[float]:
    """Add one window to all sums: CPU seconds of each, both models' pass included."""
    began = time.process_time()
    ids = corpus.windows[number]
    rows = sampled_positions(len(ids), number, stride=STRIDE, skip_positions=SKIPPED)
    sides = (models.source, models.target)
    source, target = (
        content(cache, side.identity.rope, length=len(ids))
        for cache, side in zip(aligned(*sides, ids), sides, strict=True)
    )
    reading = time.process_time() - began
    for moments in sums:
        began = time.process_time()
        own, *earlier = lagged(source, rows, moments.lags)
        moments.add_window(own, target.take(rows), earlier)
        yield reading + time.process_time() - began
