"""How far one next-token distribution is from another, and how much of a gap is closed."""

from typing import NamedTuple

from torch import Tensor


class Measures(NamedTuple):
    """Over N positions: KL(native || arm) mean and maximum, NLL (nats a token), top-1 share."""

    kl: float
    kl_max: float
    top1: float
    nll: float


def compare(native: Tensor, arm: Tensor, next_ids: Tensor) -> Measures:
    """Compare logits ``native`` and ``arm``, each [N, vocabulary], at the true ``next_ids`` [N].

    Any float dtype; computed in float64, where the KL of equal logits is 0 and rounding below zero
    is cut off. Values that are not finite stay so.
    """
    p, q = (logits.double().log_softmax(-1) for logits in (native, arm))
    kl = (p.exp() * (p - q)).sum(-1).clamp(min=0)
    nll = -q.gather(-1, next_ids.to(q.device)[:, None])
    top1 = (p.argmax(-1) == q.argmax(-1)).double().mean()
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
