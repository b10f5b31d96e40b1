"""How unfamiliar a text is, from its source cache alone: the out-of-distribution score.

The mean, over kinds, layers and heads, of two of the profile's features in standard deviations:
how far the mean row is from that of the calibration texts, and the square of the rows outside of
their leading components. Both say how far the mapper has to extrapolate (Ren et al., arXiv
2209.15558, use Mahalanobis distances for selective generation). The distance within the leading
components is left out: on the embedded family it did not tell one kind of text from another. The
score is closed form: nothing is fitted to KLs.

It is no forecast for one document of a domain: which tokens come next decides most of that. Its job
is to find a text that is less familiar than what the certificate of its domain rests on. So its
limit is taken from the very documents that were measured (``conformal.py``).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mappers.features import FEATURES

FAMILIARITY = ("shift", "residual")


def score_of(found: Mapping[str, Tensor], z: Tensor) -> float:
    """The score of features ``found``, whose values in standard deviations are ``z [F]``."""
    parts = torch.split(z, [found[name].numel() for name in FEATURES])
    named = dict(zip(FEATURES, parts, strict=True))
    return float(torch.cat([named[name] for name in FAMILIARITY]).mean())
