"""Shares of an operation's kinds: they are parts of one whole, and follow the work."""

from collections.abc import Callable

import pytest
import torch

from mappers.bench_profile import KINDS, shares

A, B = torch.ones(256, 256), torch.ones(256, 256)


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (lambda: torch.mm(A, B), "multiply"),
        (lambda: torch.mul(A, B), "rotate"),
        (lambda: B.copy_(A), "move"),
        (lambda: A.sum(), "check"),
        (lambda: torch.sort(A), "other"),
    ],
)
def test_where_the_time_goes(step: Callable[[], torch.Tensor], kind: str) -> None:
    def whole() -> None:
        for _ in range(20):
            step()

    found = shares(whole, "cpu")
    assert list(found) == [*KINDS, "other"]
    assert sum(found.values()) == pytest.approx(1, abs=0.01)
    assert max(found, key=lambda name: found[name]) == kind
