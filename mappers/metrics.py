"""How far one next-token distribution is from another, and how much of a gap is closed."""

from typing import NamedTuple

from torch import Tensor


class Measures(NamedTuple):
    """Over N positions: KL(native || arm) mean and maximum, NLL (nats a token), top-1 share."""

    kl: float
    kl_max: float
    top1: float
    nll: float


class Reference:
    """The native next-token distributions at N positions, for any number of arms to be held to.

    ``native``: logits [N, vocabulary], any float dtype. ``next_ids``: the text's own tokens, int64
    [N]. All is computed in float64, where the KL of equal logits is 0.
    """

    def __init__(self, native: Tensor, next_ids: Tensor) -> None:
        self.log_p = native.double().log_softmax(-1)
        self.p = self.log_p.exp()
        self.best = self.log_p.argmax(-1)
        self.next_ids = next_ids.to(native.device)[:, None]

    def compare(self, arm: Tensor) -> Measures:
        """The measures of an arm's logits [N, vocabulary]; values that are not finite stay so."""
        log_q = arm.double().log_softmax(-1)
        # Rounding below zero is cut off.
        kl = (self.p * (self.log_p - log_q)).sum(-1).clamp(min=0)
        nll = -log_q.gather(-1, self.next_ids)
        top1 = (self.best == log_q.argmax(-1)).double().mean()
        return Measures(*(_rounded(t) for t in (kl.mean(), kl.max(), top1, nll.mean())))


def gap_recovered(source_nll: float, translated_nll: float, native_nll: float) -> float:
    """(source - translated) / (source - native): 1 is as good as native, 0 as the source alone.

    NaN when the target is no better than the source, where there is no gap to recover.
    """
    gap = source_nll - native_nll
    return (source_nll - translated_nll) / gap if gap > 0 else float("nan")


def context_recovered(kl: float, no_context_kl: float) -> float:
    """1 - KL / KL(no context): 1 is as good as native, 0 as having read nothing."""
    return 1 - kl / no_context_kl if no_context_kl > 0 else float("nan")


def _rounded(value: Tensor) -> float:
    """Six significant digits: the evidence is a table to be read, and small on disk."""
    return float(f"{value.item():.6g}")
