"""Testing by betting: evidence against a mean that may be looked at after every sample.

For samples V in [0, 1] and the hypothesis E[V | past] <= bound, a bettor who starts with 1 and
stakes a predictable b in [0, 1 / bound) on each sample has the wealth prod(1 + b (V - bound)), a
supermartingale under the hypothesis. By Ville's inequality it ever reaches 1 / delta with
probability at most delta, however often one looks (Waudby-Smith and Ramdas, arXiv 2010.09686).

The bets are a mixture: a fixed grid of stakes, and for each of them every sample as the one to
start from. A mixture of bettors is a bettor whose stake is their mean weighted by wealth, so
nothing has to be tuned or estimated, and what is lost against the best of them is known at once:
the logarithm of its share. Starting anew matters because a mapper that was good for long has lost
nearly all that was staked on the opposite; the money kept back for later starts has not.
"""

import math
from dataclasses import dataclass, replace

# Shares of the largest stake, 1 / bound; 0.95 of it still survives a sample of 0.
STAKES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 0.95)
MOST = 1e200


@dataclass(frozen=True, slots=True)
class EProcess:
    """Evidence against E[V | past] <= ``bound``, 0 < bound < 1; ``value`` is the wealth now.

    ``wealth`` is per stake, summed over all starts so far. What exceeds ``MOST`` is given away: a
    process whose owner waits for another one could outgrow all numbers, and giving away is fair.
    """

    bound: float
    stakes: tuple[float, ...] = STAKES
    samples: int = 0
    wealth: tuple[float, ...] = ()

    @property
    def value(self) -> float:
        """Mean over the stakes, and what is kept back for later starts; 1 before any sample."""
        return sum(self.wealth) / len(self.stakes) + reserve(self.samples)

    def update(self, sample: float) -> "EProcess":
        """The process after one more sample in [0, 1]; NaN counts as 1."""
        sample = sample if 0 <= sample <= 1 else 1.0
        started = reserve(self.samples) - reserve(self.samples + 1)
        before = self.wealth or (0.0,) * len(self.stakes)
        wealth = tuple(
            min(MOST, (held + started) * (1 + stake * (sample - self.bound) / self.bound))
            for held, stake in zip(before, self.stakes, strict=True)
        )
        return replace(self, samples=self.samples + 1, wealth=wealth)


def reserve(samples: int) -> float:
    """Share of the first capital not yet staked: slow to fall, so that a late start has some.

    The start at sample s gets about ln 2 / (s ln(s)^2): a change there is found later by
    ln(s) + 2 ln(ln(s)) nats, which no test that is valid for ever can do much better than.
    """
    return math.log(2) / math.log(samples + 2)
