"""How far one next-token distribution is from another, and how much of a gap is closed."""

from typing import NamedTuple

from torch import Tensor

TOP = 5


class Measures(NamedTuple):
    """Over N positions; named and defined as the columns of ``EvidenceRow``."""

    kl: float
    kl_max: float
    top1: float
    nll: float
    kl_p95: float
    kl_p99: float
    worst_position: int
    top5: float


class Reference:
    """The native next-token distributions at N positions, for any number of arms to be held to.

    ``native``: logits [N, vocabulary], any float dtype. ``next_ids``: the text's own tokens, int64
    [N]. All is computed in float64, where the KL of equal logits is 0.
    """

    def __init__(self, native: Tensor, next_ids: Tensor) -> None:
        self.log_p = native.double().log_softmax(-1)
        self.p = self.log_p.exp()
        self.best = _best(native)
        self.next_ids = next_ids.to(native.device)[:, None]

    def compare(self, arm: Tensor) -> Measures:
        """The measures of an arm's logits [N, vocabulary]; values that are not finite stay so."""
        log_q = arm.double().log_softmax(-1)
        # Rounding below zero is cut off.
        kl = (self.p * (self.log_p - log_q)).sum(-1).clamp(min=0)
        nll = -log_q.gather(-1, self.next_ids)
        best = _best(arm)
        shared = (self.best[:, :, None] == best[:, None, :]).any(-1).double().mean()
        return Measures(
            kl=_rounded(kl.mean()),
            kl_max=_rounded(kl.max()),
            top1=_rounded((self.best[:, 0] == best[:, 0]).double().mean()),
            nll=_rounded(nll.mean()),
            kl_p95=_rounded(kl.quantile(0.95)),
            kl_p99=_rounded(kl.quantile(0.99)),
            worst_position=int(kl.argmax()),
            top5=_rounded(shared),
        )


def gap_recovered(source_nll: float, translated_nll: float, native_nll: float) -> float:
    """(source - translated) / (source - native): 1 is as good as native, 0 as the source alone.

    NaN when the target is no better than the source, where there is no gap to recover.
    """
    gap = source_nll - native_nll
    return (source_nll - translated_nll) / gap if gap > 0 else float("nan")


def context_recovered(kl: float, no_context_kl: float) -> float:
    """1 - KL / KL(no context): 1 is as good as native, 0 as having read nothing."""
    return 1 - kl / no_context_kl if no_context_kl > 0 else float("nan")


def _best(logits: Tensor) -> Tensor:
    """The most likely tokens in order, int64 [N, 5] (fewer for a smaller vocabulary)."""
    return logits.topk(min(TOP, logits.shape[-1]), dim=-1).indices


def _rounded(value: Tensor) -> float:
    """Six significant digits: the evidence is a table to be read, and small on disk."""
    return float(f"{value.item():.6g}")
