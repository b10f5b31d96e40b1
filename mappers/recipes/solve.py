"""Centred ridge regression from second moments alone, in float64 by Cholesky.

With the centred Gram matrix ``A = sum (x - mx)(x - mx)'`` and cross products ``C`` of n rows,
``W = (A + lambda I)^-1 C`` and ``b = my - mx W``. What callers give is not lambda but ``ridge``:

    lambda = ridge * (mean of the diagonal of A)

with A the very sub-block that is solved (one target layer's source layers, one head group, keys
or values), and a lambda of its own for every ``block`` of inputs, from its part of the diagonal:
one for all over-shrinks a source layer of small numbers that stands beside one of large. So ridge
has no unit and depends neither on the number of rows nor on the scale of the data; dividing A by n
would change nothing. (The un-normalised ``lambda = 0.01`` printed in arXiv 2608.03893 is another
convention: it shrinks with every row that is added.)
"""

import math

import torch
from torch import Tensor

from mappers.errors import SingularSystem, TooFewData


def factorise(
    gram: Tensor, *, rows: int, ridge: float, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cholesky factor (lower) of ``gram [F, F]`` plus lambda on its diagonal, and lambda ``[F]``.

    Raises TooFewData unless there are more rows than inputs, SingularSystem when the inputs do
    not determine the map, ValueError for a ridge that is negative or not finite.
    """
    inputs = gram.shape[0]
    if not math.isfinite(ridge) or ridge < 0:
        raise ValueError(f"ridge must be a finite number of 0 or more, not {ridge}")
    # Centring costs one row; with fewer the fit is exact on its own rows, and only there.
    if rows <= inputs:
        raise TooFewData(
            f"{rows} rows for {inputs} inputs: at least {inputs + 1} rows are needed "
            "(more text, a smaller stride, or fewer source layers)"
        )
    width = block or inputs
    shrinkage = (ridge * gram.diagonal().view(-1, width).mean(1)).repeat_interleave(width)
    regularised = gram.clone()
    regularised.diagonal().add_(shrinkage)
    factor, failed = torch.linalg.cholesky_ex(regularised)
    if int(failed) or _dependent(factor, regularised):
        raise SingularSystem(
            f"the {inputs} inputs do not determine a map at ridge {ridge}: some are constant or "
            "depend linearly on others; raise the ridge"
        )
    return factor, shrinkage


def solve(
    gram: Tensor, cross: Tensor, *, rows: int, ridge: float, block: int | None = None
) -> Tensor:
    """W ``[F, O]`` for ``gram [F, F]`` and ``cross [F, O]``; raises what ``factorise`` does."""
    factor, _ = factorise(gram, rows=rows, ridge=ridge, block=block)
    return torch.cholesky_solve(cross, factor)


def residual_squares(
    gram: Tensor, cross: Tensor, squares_y: Tensor, *, rows: int, ridge: float
) -> Tensor:
    """Sum of squared residuals ``[O]`` of the fit on its own rows; raises what ``factorise`` does.

    ``y'y - 2 W'C + W'AW`` with ``(A + lambda I) W = C`` is ``y'y - W'C - W' lambda W``.
    """
    factor, shrinkage = factorise(gram, rows=rows, ridge=ridge)
    weight = torch.cholesky_solve(cross, factor)
    explained = (weight * cross).sum(dim=0) + shrinkage @ weight.square()
    return (squares_y - explained).clamp_min(0.0)


def _dependent(factor: Tensor, regularised: Tensor) -> bool:
    """Whether some input is, to rounding, a linear combination of those before it.

    A squared pivot is what is left of an input's sum of squares after regression on the earlier
    ones; relative to that sum it has no unit, so inputs of very different scales do not trip it.
    """
    left = factor.diagonal().square() / regularised.diagonal()
    return bool((left <= factor.shape[0] * torch.finfo(torch.float64).eps).any())
