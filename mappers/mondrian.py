"""Groups of requests by a number that is known before their KL is.

Mondrian conformal prediction (Vovk et al., "Algorithmic Learning in a Random World", 4.5): where
each group is certified by its own documents, a statement holds in each of them, not only over all.
Edges are order statistics of the documents' own numbers and made of nothing else. So, given them,
the documents strictly between two are independent draws of the requests between the two, and those
that are edges are not.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

GROUPS_AT_MOST = 4
"""A group has a coarser bound than the whole, so more groups soon lose more than they find."""


def edges_of(values: Sequence[float], groups: int) -> tuple[float, ...]:
    """The groups - 1 numbers that part ``values`` into groups of one size, themselves left out."""
    ordered = sorted(values)
    return tuple(ordered[len(ordered) * i // groups] for i in range(1, groups))


def smallest_group(count: int, groups: int) -> int:
    """How many of ``count`` values are in the smallest of so many groups."""
    return (count - groups + 1) // groups


def group_of(value: float, edges: Sequence[float]) -> tuple[float, float]:
    """The edges, both exclusive, between which ``value`` is; on an edge it is above that."""
    above = bisect_right(edges, value)
    return (-inf, *edges)[above], (*edges, inf)[above]
