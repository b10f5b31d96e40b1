"""Documents are measured once at each reading, with their first token exact or mapped."""

import pytest
import torch

from mappers.arms import read_all
from mappers.cache import KVCache
from tests.bench.recipe_bench.fitted import Models
from tests.bench.recipe_bench.measure import (
    OURS,
    PUBLISHED,
    Reading,
    measure,
    missing,
    with_first,
)
from tests.bench.recipe_bench.reading import PROMPT_TOKENS, Document, Readings
from tests.mappers.pairs import random_cache


def test_the_targets_own_cache_costs_nothing_at_any_reading(
    models: Models, readings: Readings
) -> None:
    def native(document: Document) -> KVCache:
        cache, _ = read_all(models.target.model, document.ids, (PROMPT_TOKENS,))
        return cache.slice(0, PROMPT_TOKENS)

    rows = [row for rows in measure(models.target, readings, native, PUBLISHED) for row in rows]
    assert len(rows) == len(readings.files) * len(PUBLISHED)
    assert max(row.kl for row in rows) < 1e-6


def test_an_exact_first_token_takes_the_place_of_the_mapped() -> None:
    mapped = random_cache(3, 5, 2, 16, seed=1)
    first = random_cache(3, 1, 2, 16, seed=2)
    found = with_first(mapped, first)
    for new, old, exact in zip(found.keys, mapped.keys, first.keys, strict=True):
        assert torch.equal(new[0], exact[0])
        assert torch.equal(new[1:], old[1:])
        assert not torch.equal(old[0], exact[0])


def test_what_is_missing_is_read_and_nothing_else(models: Models, readings: Readings) -> None:
    def silent(document: Document) -> KVCache:
        return random_cache(3, PROMPT_TOKENS, 2, 16)

    given = (models.target, readings, silent)
    wanted = (Reading(1, True), Reading(32, True))
    done = [row for rows in measure(*given, wanted[:1]) for row in rows][1:]
    rest = [row for rows in measure(*given, wanted, done) for row in rows]
    both = [*done, *rest]
    keys = {(row.domain, row.document, row.native_tail) for row in both}
    assert len(keys) == len(both) == 2 * len(readings.files)
    assert missing(readings, wanted, both) == []


@pytest.mark.parametrize("known", [True, False])
def test_a_mapped_first_token_is_read_only_where_it_is_said(
    models: Models, readings: Readings, known: bool
) -> None:
    """A cache that is wrong at the first token alone costs something only if that is read."""

    def spoiled(document: Document) -> KVCache:
        cache, _ = read_all(models.target.model, document.ids, (PROMPT_TOKENS,))
        wrong = random_cache(3, 1, 2, 16, seed=5)
        return with_first(cache.slice(0, PROMPT_TOKENS), wrong)

    reading = Reading(1, known)
    kls = [row.kl for rows in measure(models.target, readings, spoiled, [reading]) for row in rows]
    assert (max(kls) < 1e-6) == known


def test_ours_and_published_are_read_at_the_same_tails() -> None:
    assert {one for one in PUBLISHED if one.known} < set(OURS)
