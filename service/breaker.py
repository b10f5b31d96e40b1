"""The breaker of one mapper, domain and length: closed, open, half-open, and what moves it.

A sample is the KL that a caller measured for an answer, turned into a loss from 0 to 1
(``loss.py``). Closed, a test of "the mean loss is tolerable" opens the breaker when its wealth
reaches 1 / delta, so a breaker whose mapper is good ever opens with probability at most delta
(``eprocess.py``). Open, nothing is translated until a cool-down has passed. Half-open, a few
answers are given, each to be measured: the first test, begun anew, opens it again; the reverse
test, of "the mean loss is what is tolerated or more", closes it.

Where several clients are served, no single one may decide for all. A verdict then needs the wealth
without any one client's samples as well, and a client that posts far more than the others is not
counted beyond half of the latest samples and one, so that it can no more hide what they see. A
client that is served alone decides for itself, but not by what a single one left behind.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from mappers.accept import Risk
from service.eprocess import EProcess
from service.loss import tolerated
from service.policy import Policy

Phase = Literal["closed", "open", "half_open"]

MAX_CLIENTS = 32
RECENT = 64
# Fewer stakes for the way back: it is known what a good mapper looks like, few violations or none.
CLOSING_STAKES = (1 / 2, 0.95)
FEW = 4


class Key(NamedTuple):
    """What one breaker is about; ``max_tokens`` names the length bucket, a power of two."""

    mapper: str
    digest: str
    domain: str
    max_tokens: int


class Sample(NamedTuple):
    """One measured answer; its loss is from 0 to 1.

    ``exact`` is False for a loss that is only known to be at least so large. ``client`` is whom the
    answer was given to, ``shared`` whether others were served as well.
    """

    loss: float
    violation: bool
    exact: bool
    client: str
    shared: bool
    issued_seconds: float


@dataclass(frozen=True, slots=True)
class Jury:
    """One test over all clients, and the same without each of them (the latest that matter)."""

    whole: EProcess
    without: dict[str, EProcess] = field(default_factory=dict)

    def hear(self, value: float, client: str) -> "Jury":
        """After one more sample of this client."""
        without = {c: p if c == client else p.update(value) for c, p in self.without.items()}
        without.setdefault(client, self.whole)
        whole = self.whole.update(value)
        if len(without) > MAX_CLIENTS:
            least = min(without, key=lambda c: abs(without[c].value - whole.value))
            del without[least]
        return Jury(whole, without)

    def value(self, trusted: str | None = None) -> float:
        """The wealth that a verdict may rest on: without any one client but ``trusted``.

        A client that is gone is one as well: it has not decided for those who are left.
        """
        others = (process.value for c, process in self.without.items() if c != trusted)
        return min((self.whole.value, *others))


@dataclass(frozen=True, slots=True)
class Breaker:
    """An immutable state; ``opened_seconds`` is None when closed. Times are seconds since 1970."""

    bad: Jury
    good: Jury
    opened_seconds: float | None = None
    violations: int = 0
    recent: tuple[str, ...] = ()
    risk: Risk = "exceedance"

    @classmethod
    def fresh(cls, policy: Policy, opened_seconds: float | None = None) -> "Breaker":
        """No samples yet."""
        bound = tolerated(policy)
        closing = EProcess(1 - bound, CLOSING_STAKES)
        return cls(Jury(EProcess(bound)), Jury(closing), opened_seconds, risk=policy.risk)

    @property
    def samples(self) -> int:
        """Samples counted since it last opened or closed."""
        return self.bad.whole.samples

    def under(self, policy: Policy) -> "Breaker":
        """The same state for a policy that may tolerate another loss: the tests then begin anew."""
        if self.risk == policy.risk and math.isclose(self.bad.whole.bound, tolerated(policy)):
            return self
        return Breaker.fresh(policy, self.opened_seconds)

    def phase(self, policy: Policy, now: float) -> Phase:
        """A breaker becomes half-open by the passing of time alone."""
        if self.opened_seconds is None:
            return "closed"
        return "half_open" if now >= self._probes_from(policy) else "open"

    def takes(self, sample: Sample, policy: Policy, now: float) -> bool:
        """Whether the sample counts: fresh, and not one too many of its client."""
        phase = self.phase(policy, now)
        if phase == "open" or (
            phase == "half_open" and sample.issued_seconds < self._probes_from(policy)
        ):
            return False
        if not self._robust(sample, policy):
            return True
        share = self.recent.count(sample.client) + 1
        # One more than half, or two that post alike would keep each other out for ever.
        return share <= max(FEW, len(self.recent) / 2 + 1)

    def observe(self, sample: Sample, policy: Policy, now: float) -> "Breaker":
        """The state after a sample that ``takes`` has let in."""
        half_open = self.opened_seconds is not None
        bad = self.bad.hear(sample.loss, sample.client)
        good = self.good
        # What is only known to be at least so large says nothing good, unless it is the worst.
        if half_open and (sample.exact or sample.loss == 1):
            good = good.hear(1 - sample.loss, sample.client)
        if self._wealth(bad, sample, policy) >= 1 / policy.breaker_delta:
            return Breaker.fresh(policy, opened_seconds=now)
        if half_open and self._wealth(good, sample, policy) >= 1 / policy.breaker_close_delta:
            return Breaker.fresh(policy)
        return replace(
            self,
            bad=bad,
            good=good,
            violations=self.violations + sample.violation,
            recent=(*self.recent, sample.client)[-RECENT:],
        )

    def _probes_from(self, policy: Policy) -> float:
        return (self.opened_seconds or 0.0) + policy.breaker_cool_down_seconds

    def _wealth(self, jury: Jury, sample: Sample, policy: Policy) -> float:
        """What this sample's verdict rests on; whoever is served alone decides for itself."""
        if policy.breaker_quorum == 1:
            return jury.whole.value
        return jury.value(trusted=None if sample.shared else sample.client)

    @staticmethod
    def _robust(sample: Sample, policy: Policy) -> bool:
        return sample.shared and policy.breaker_quorum > 1


def length_bucket(tokens: int) -> int:
    """The longest prompt of the bucket of one with ``tokens`` tokens: the next power of two."""
    return 1 << (tokens - 1).bit_length()
