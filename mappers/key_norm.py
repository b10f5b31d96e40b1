"""The norm that a model's keys pass before they are rotated, found in the keys and put back.

Where a model normalises the keys of each head (Qwen3 and others), every one of its keys is
``w * u`` with a weight w per dim and ``mean(u^2) = 1``: it lies on an ellipsoid. A least-squares
prediction lies inside of it, the further the less sure it is, so attention over predicted keys is
flatter than it should be. Scaling each prediction back onto the ellipsoid costs a few operations
per number and no fit.

Legend: n tokens, H kv heads, D head dim.
"""

import torch
from torch import Tensor

EXACT = 1e-2
"""How far from 1 the mean square may be at any key, for keys that are float32 or bfloat16."""
TINY = 1e-12
"""Of a prediction that is all but zero nothing is known; it stays short."""


def norm_weights(keys: Tensor) -> Tensor | None:
    """The weights w, float32 ``[D]``, of the norm that content keys ``[n, H, D]`` passed.

    Found as the solution of ``mean(k^2 / w^2) = 1``, linear in ``1 / w^2``; None where there is
    none that all keys fulfil, or too few keys to tell.
    """
    squares = keys.flatten(0, 1).double().square().cpu()
    rows, dim = squares.shape
    if rows < 2 * dim:
        return None
    ones = torch.ones(rows, 1, dtype=torch.float64)
    inverse = torch.linalg.lstsq(squares / dim, ones, driver="gelsd").solution
    missed = (squares / dim @ inverse - 1).abs().max()
    if bool((inverse <= 0).any()) or not float(missed) < EXACT:
        return None
    weights: Tensor = inverse.squeeze(1).rsqrt().float()
    return weights


def restore(keys: Tensor, weights: Tensor) -> Tensor:
    """Content keys ``[n, H, D]``, float32, scaled back to where the norm leaves them, in place."""
    means = keys.square() @ (weights.square().reciprocal() / keys.shape[-1])
    return keys.mul_(means.clamp_min(TINY).rsqrt().unsqueeze(-1))
