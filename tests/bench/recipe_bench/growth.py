"""How many calibration documents a fit needs: the same candidates after 10, 20, ... 500 windows.

Each window is the first of its document, and every fourth row is fitted, as the paper does, so that
500 windows are affordable.
"""

import time
from collections.abc import Iterator

from mappers.collect import aligned, content, sampled_positions, take
from mappers.corpus import Corpus
from mappers.geometry import Geometry
from mappers.moments import PairMoments
from mappers.progress import steps
from mappers.recipes import RECIPES
from recipe_bench.candidates import Fitted, Models, fit_plan, our_plan
from recipe_bench.sums import SKIPPED

COUNTS = (10, 20, 50, 100, 200, 500)
STRIDE = 4
GROWING = (("full_head", 4), ("head_local", 4))


def names(layers: int) -> list[str]:
    """Of all candidates, in the order in which ``grown`` gives them."""
    return [name(recipe, min(k, layers), count) for count in COUNTS for recipe, k in GROWING]


def name(recipe: str, k: int, count: int) -> str:
    return f"{recipe} k={k}, {count} documents"


def grown(models: Models, corpus: Corpus) -> Iterator[tuple[str, Fitted]]:
    """A mapper of each candidate at each count that the corpus reaches."""
    source, target = models.source, models.target
    geometry = Geometry.of(source.identity, target.identity)
    sums = {r: PairMoments(geometry, RECIPES[r].structure) for r, _ in GROWING}
    began = time.process_time()
    for index in steps(range(len(corpus.windows)), "collecting", show=True):
        ids = corpus.windows[index]
        rows = sampled_positions(len(ids), index, stride=STRIDE, skip_positions=SKIPPED)
        sides = zip(aligned(source, target, ids), (source, target), strict=True)
        pair = [content(take(c, rows), side.identity.rope, length=len(ids)) for c, side in sides]
        for moments in sums.values():
            moments.add_window(pair[0], pair[1])
        if index + 1 in COUNTS:
            for recipe, wanted in GROWING:
                k = min(wanted, geometry.source_layers)
                mapper = fit_plan(models, corpus, sums[recipe], our_plan(recipe=recipe, k=k))
                yield name(recipe, k, index + 1), Fitted(mapper, time.process_time() - began)
