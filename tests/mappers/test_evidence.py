"""The record: what is read is what was written, and nothing else is read."""

import math

import pytest
from pydantic import ValidationError

from mappers.evidence import Evidence
from tests.mappers.records import evidence, rows

NAN = float("nan")


def test_json_round_trip_keeps_every_row_even_what_is_not_finite() -> None:
    record = evidence(rows(0.1, count=2), rows(NAN, count=1), rows(math.inf, count=1))
    text = record.model_dump_json()
    again = Evidence.model_validate_json(text)
    assert again.model_dump_json() == text
    assert again.rows[0] == record.rows[0]
    assert math.isnan(again.rows[2].kl)
    assert again.rows[3].kl == math.inf


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"schema_version":2', '"schema_version":3'),
        ('"corpora"', '"surplus":1,"corpora"'),
        ('"translated"', '"other"'),
        (",0.25,", ",-0.25,"),
        (",128,", ',"128",'),
        ('"columns":["document",', '"columns":["name",'),
        ("[[", "[[1,"),
    ],
)
def test_a_record_that_is_not_of_this_schema_is_refused(old: str, new: str) -> None:
    text = evidence(rows(0.25, count=1)).model_dump_json()
    assert old in text
    with pytest.raises(ValidationError):
        Evidence.model_validate_json(text.replace(old, new, 1))
