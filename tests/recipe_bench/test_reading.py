"""What is read of a pair is the models' own, and read once."""

import torch

from mappers import hf_compat
from mappers.arms import read_all
from mappers.evidence_rows import Arm
from tests.bench.recipe_bench.fitted import Models
from tests.bench.recipe_bench.reading import (
    PROMPT_TOKENS,
    TAILS,
    Readings,
    load,
    read_pair,
    tail_logits,
)
from tests.recipe_bench.conftest import DOCUMENTS


def test_every_document_of_both_domains_has_a_row_of_each_arm(readings: Readings) -> None:
    domains = [domain for domain, _ in readings.documents]
    assert domains == ["in_domain"] * DOCUMENTS + ["out_of_domain"] * DOCUMENTS
    arms = [Arm.NATIVE, Arm.SOURCE_ALONE, Arm.NO_CONTEXT, *[Arm.LAST_TOKENS] * (len(TAILS) - 1)]
    for key in readings.documents:
        rows = [row for row in readings.rows if (row.domain, row.document) == key]
        assert [row.arm for row in rows] == arms
        assert rows[0].kl == 0.0
        assert all(row.kl > 0 for row in rows[1:])


def test_a_kept_document_is_not_read_again(models: Models, readings: Readings) -> None:
    folder = readings.files[0].parent.parent
    written = [file.stat().st_mtime_ns for file in readings.files]
    again = read_pair(models.source, models.target, folder, documents=DOCUMENTS)
    assert again == readings
    assert [file.stat().st_mtime_ns for file in again.files] == written


def test_a_tail_over_the_targets_own_cache_reads_its_own_logits(
    models: Models, readings: Readings
) -> None:
    documents = [load(file) for file in readings.files[:3]]
    caches = [
        read_all(models.target.model, one.ids, (PROMPT_TOKENS,))[0].slice(0, PROMPT_TOKENS)
        for one in documents
    ]
    found = tail_logits(models.target, caches, [one.ids for one in documents], tail=32)
    for document, own in zip(documents, found, strict=True):
        positions = torch.arange(PROMPT_TOKENS - 1, len(document.ids) - 1)
        native, _ = hf_compat.read(models.target.model, document.ids[None], logits_at=positions)
        torch.testing.assert_close(own, native[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(document.native_logits, native[0], rtol=1e-4, atol=1e-4)
