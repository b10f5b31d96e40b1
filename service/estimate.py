"""How long a translation will take, learned from those that were made."""

import math
from bisect import bisect
from collections import Counter
from typing import NamedTuple

RECENT = 9
DOUBT = 0.98


class Made(NamedTuple):
    """One translation."""

    tokens: int
    seconds: float

    @property
    def slowness(self) -> float:
        """Seconds a token."""
        return self.seconds / self.tokens


class RunningFit:
    """Seconds against tokens for one mapper on one device: straight pieces through one translation
    of each length bucket, which are powers of two.

    It is the one of median speed among the last ``RECENT`` of its bucket, so a few that were slow
    for a reason of the moment (page faults, another process) do not count. A bucket forgets with
    its own translations only, so a thousand short ones leave it what it knows of long ones. Beyond
    the first and the last their piece goes on, as far as neither the fixed time nor the time a
    token gets negative; a single one is proportional.

    What is refused measures nothing, so a prediction that is wrong and only refuses would stay
    wrong. Therefore each refusal of its own making is a doubt: it makes the prediction count
    ``DOUBT`` times as much against the next requests of about that length, until the computation of
    one has put it to the test; then it counts in full. To be let in is no test: who is may leave,
    or be refused for the cache. So until the first has been computed others may be let in too. What
    is predicted to take twice as long as it may is tried after 35 refusals, ten times as long after
    114.
    """

    def __init__(self) -> None:
        self._recent: dict[int, tuple[Made, ...]] = {}
        self._middle: dict[int, Made] = {}
        self._doubts: Counter[int] = Counter()

    def add(self, tokens: int, seconds: float) -> None:
        """One translation of ``tokens`` tokens; what is no time teaches nothing."""
        if tokens < 1 or not 0 <= seconds < math.inf:
            return
        bucket = tokens.bit_length()
        recent = (*self._recent.get(bucket, ()), Made(tokens, seconds))[-RECENT:]
        middle = sorted(recent, key=lambda made: made.slowness)[(len(recent) - 1) // 2]
        self._recent[bucket] = recent
        # A new dict: other threads go on with the one that they have.
        self._middle = {**self._middle, bucket: middle}

    def seconds(self, tokens: int) -> float | None:
        """Expected time for ``tokens`` tokens; None before the first observation."""
        points = sorted(self._middle.values())
        if not points:
            return None
        at = bisect([point.tokens for point in points], tokens)
        if 0 < at < len(points):
            left, right = points[at - 1 : at + 1]
            return _along(left, _slope(left, right), tokens)
        end, inner = (points[0], points[1:2]) if at == 0 else (points[-1], points[-2:-1])
        slope = min(max(0.0, _slope(end, inner[0])), end.slowness) if inner else end.slowness
        return _along(end, slope, tokens)

    def trust(self, tokens: int) -> float:
        """The share of a prediction, from 0 to 1, that counts against a prompt of ``tokens``."""
        return float(DOUBT ** self._doubts[tokens.bit_length()])

    def doubt(self, tokens: int) -> None:
        """A prompt of ``tokens`` was refused for what was predicted. Any thread may say so: where
        two do at once and one doubt is lost, it takes one refusal more."""
        self._doubts[tokens.bit_length()] += 1

    def believe(self, tokens: int) -> None:
        """The computation for a prompt of ``tokens``, which is a few more than ``add`` learns of,
        has put the prediction to the test."""
        del self._doubts[tokens.bit_length()]


def _slope(one: Made, other: Made) -> float:
    return (other.seconds - one.seconds) / (other.tokens - one.tokens)


def _along(point: Made, slope: float, tokens: int) -> float:
    return max(0.0, point.seconds + slope * (tokens - point.tokens))
