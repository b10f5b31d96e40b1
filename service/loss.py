"""What a breaker's test is about: the loss of one answer, and how large its mean may be.

It is the risk that was certified. ``exceedance``: an answer loses 1 when its KL exceeds the
threshold that was in force for it, else nothing, and a share ``eps`` of answers may. ``mean``: an
answer loses its KL, cut at ``kl_clip``, and the mean may be ``max_kl``; both as shares of the clip,
so that a loss is between 0 and 1 in either case.
"""

import math

from service.policy import Policy


def tolerated(policy: Policy) -> float:
    """The largest mean loss that is no fault; between 0 and 1."""
    return policy.max_kl / policy.kl_clip if policy.risk == "mean" else policy.eps


def loss_of(kl: float, max_kl: float, policy: Policy) -> float:
    """The loss of an answer of this KL that was given under ``max_kl``; NaN is the worst.

    A request that had tightened the threshold was promised a mean KL of its own ``max_kl``. In
    shares of what it was promised it is like any other: its KL is scaled before it is cut, which
    keeps the expected loss of a good mapper at most ``tolerated``.
    """
    if policy.risk == "exceedance":
        return float(violates(kl, max_kl))
    share = kl * (policy.max_kl / max_kl) / policy.kl_clip
    return 1.0 if math.isnan(share) else min(share, 1.0)


def violates(kl: float, max_kl: float) -> bool:
    """Whether a KL is above its threshold; NaN is."""
    return not kl <= max_kl
