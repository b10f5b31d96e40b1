"""How long a translation will take, learned from those that were made."""

import math
from bisect import bisect
from typing import NamedTuple

MEMORY = 0.95


class Mean(NamedTuple):
    """Of the translations of about one length, older ones fading."""

    tokens: float
    seconds: float
    weight: float = 1.0

    def after(self, tokens: int, seconds: float) -> "Mean":
        """With one more."""
        share = 1 / (MEMORY * self.weight + 1)
        return Mean(
            self.tokens + share * (tokens - self.tokens),
            self.seconds + share * (seconds - self.seconds),
            1 / share,
        )


class RunningFit:
    """Seconds against tokens for one mapper on one device: straight pieces through the means of
    length buckets, which are powers of two.

    A bucket fades with its own translations only, so a thousand short ones do not make it forget
    how long a long one takes. Beyond the first and the last mean their piece goes on, as far as
    neither the fixed time nor the time a token gets negative; a single mean is proportional.
    """

    def __init__(self) -> None:
        self._means: dict[int, Mean] = {}

    def add(self, tokens: int, seconds: float) -> None:
        """One translation of ``tokens`` tokens; what is no time teaches nothing."""
        if tokens < 1 or not 0 <= seconds < math.inf:
            return
        bucket = tokens.bit_length()
        before = self._means.get(bucket)
        now = Mean(tokens, seconds) if before is None else before.after(tokens, seconds)
        # A new dict: other threads go on with the one that they have.
        self._means = {**self._means, bucket: now}

    def seconds(self, tokens: int) -> float | None:
        """Expected time for ``tokens`` tokens; None before the first observation."""
        means = sorted(self._means.values())
        if not means:
            return None
        at = bisect([mean.tokens for mean in means], tokens)
        if 0 < at < len(means):
            left, right = means[at - 1 : at + 1]
            return _along(left, _slope(left, right), tokens)
        end, inner = (means[0], means[1:2]) if at == 0 else (means[-1], means[-2:-1])
        steepest = end.seconds / end.tokens
        slope = min(max(0.0, _slope(end, inner[0])), steepest) if inner else steepest
        return _along(end, slope, tokens)


def _slope(one: Mean, other: Mean) -> float:
    return (other.seconds - one.seconds) / (other.tokens - one.tokens)


def _along(mean: Mean, slope: float, tokens: int) -> float:
    return max(0.0, mean.seconds + slope * (tokens - mean.tokens))
