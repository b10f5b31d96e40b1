"""Sums over calibration rows, from which the profile's moments follow."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mappers.features import COMPONENTS, FLOOR, RowMoments


class RowSums:
    """Float64 sums over rows and over texts; those of two sets of texts add up.

    The row of a head is its keys, in content space, beside its values: ``2 D`` numbers.
    Legend: L layers, H kv heads, D head dim, m rows.
    """

    def __init__(self, layers: int, heads: int, dim: int) -> None:
        shape = (layers, heads, 2 * dim)
        self.counts = torch.zeros(3, dtype=torch.float64)
        """Texts, rows, and the sum of 1 / rows over the texts."""
        self.row = torch.zeros(shape, dtype=torch.float64)
        self.outer = torch.zeros(*shape, 2 * dim, dtype=torch.float64)
        self.text_mean = torch.zeros(shape, dtype=torch.float64)
        self.text_square = torch.zeros(shape, dtype=torch.float64)
        self.peak = torch.zeros(2, layers, heads, dim)

    @property
    def texts(self) -> int:
        return int(self.counts[0])

    def add(self, rows: Tensor, peaks: Tensor) -> None:
        """One text: its sampled rows ``[2, L, H, m, D]`` and peaks ``[2, L, H, D]``."""
        joint = torch.cat((rows[0], rows[1]), dim=-1).double()
        count, mean = joint.shape[2], joint.mean(2)
        self.counts += torch.tensor([1, count, 1 / count])
        self.row += joint.sum(2)
        self.outer += joint.transpose(-1, -2) @ joint
        self.text_mean += mean
        self.text_square += mean.square()
        self.peak = torch.maximum(self.peak, peaks)

    def merge(self, other: "RowSums") -> None:
        """Add the texts that another pass has seen."""
        for name, tensor in self.tensors().items():
            mine = torch.maximum if name == "peak" else torch.add
            setattr(self, name, mine(tensor, getattr(other, name)))

    def tensors(self) -> dict[str, Tensor]:
        """All of it, for a checkpoint."""
        return dict(vars(self))

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``tensors``, exactly."""
        for name in vars(self):
            setattr(self, name, tensors[name])

    def moments(self) -> RowMoments:
        """What the rows of these texts are like; of at least two texts."""
        texts, rows, inverse = self.counts.tolist()
        mean = self.row / rows
        covariance = self.outer / rows - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        variance = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(FLOOR)
        means = self.text_square / texts - (self.text_mean / texts).square()
        # The means of texts differ by chance too: by the variance within, over their rows.
        chance = min(inverse / texts, 0.5)
        between = ((means - variance * chance) / (1 - chance)).clamp_min(0)
        within = torch.maximum(variance - between, 1e-3 * variance)
        basis, scale, rest, coupling = _components(covariance)
        return RowMoments(
            mean=_by_kind(mean),
            within=_by_kind(within),
            between=_by_kind(between),
            basis=basis,
            scale=scale,
            rest=rest,
            coupling=coupling,
            peak=self.peak.clamp_min(FLOOR),
        )


def _by_kind(joint: Tensor) -> Tensor:
    """``[L, H, 2 D]`` to float32 ``[2, L, H, D]``."""
    return torch.stack(joint.chunk(2, dim=-1)).float()


def _components(covariance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """basis, scale, rest and coupling of ``RowMoments``, from ``[L, H, 2 D, 2 D]``."""
    dim = covariance.shape[-1] // 2
    keys, values = covariance[..., :dim, :dim], covariance[..., dim:, dim:]
    variances, vectors = torch.linalg.eigh(torch.stack((keys, values)))
    leading = min(COMPONENTS, dim - 1)
    scale = variances[..., -leading:].clamp_min(FLOOR).sqrt()
    basis, rest = vectors[..., -leading:], variances[..., :-leading].sum(-1).clamp_min(FLOOR)
    white = basis / scale.unsqueeze(-2)
    coupling = white[0].transpose(-1, -2) @ covariance[..., :dim, dim:] @ white[1]
    return basis.float(), scale.float(), rest.float(), coupling.float()
