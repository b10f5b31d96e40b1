"""How much each token's keys and values matter to the attention of what comes after it.

The row weights of CacheBridge (arXiv 2609.00891, "Attn-Repair"). For queries u of the target at
positions spaced evenly on a log scale, with attention a, outputs o and head dim d,

    values of token i:  sum over u of a_ui^2
    keys of token i:    sum over u of a_ui^2 |v_i - o_u|^2 |q_u|^2 / d

are the first-order effects of an error there on the output. Each position has the same mass in all,
and no more than 32 rows of an attention matrix exist at a time. Weights that are too uneven for the
number of inputs are drawn towards 1 (``shrinkage``), until the effective sample size of Kish is at
least twice the inputs.

Legend: n queries, T tokens, H kv heads, H_q query heads, D head dim.
"""

import torch
from torch import Tensor

QUERIES = 32
FIRST_QUERY = 12


def query_positions(tokens: int) -> Tensor:
    """At most 32 positions from 12 to the last, evenly on a log scale, int64 ``[n]``."""
    first, last = float(min(FIRST_QUERY, tokens - 1)), float(tokens - 1)
    steps = torch.linspace(0.0, 1.0, QUERIES, dtype=torch.float64)
    positions = (first * (last / first) ** steps).round().to(torch.int64)
    kept: Tensor = torch.unique_consecutive(positions)
    return kept


def row_weights(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    *,
    scale: float,
    skip_positions: int,
) -> Tensor:
    """Weights of one layer's tokens, float32 ``[2, H, T]``: of their keys, then of their values.

    queries: ``[n, H_q, D]`` as attention uses them, asked at ``positions`` ``[n]``. keys, values:
    ``[T, H, D]`` as cached. The first ``skip_positions`` tokens, which are not fitted, have none.
    """
    tokens, heads = keys.shape[:2]
    asked = queries.float().view(len(queries), heads, -1, queries.shape[2]).permute(1, 2, 0, 3)
    known, held = (side.float().transpose(0, 1).unsqueeze(1) for side in (keys, values))
    scores = asked @ known.mT * scale
    later = torch.arange(tokens, device=keys.device) > positions.to(keys.device)[:, None]
    attention = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
    output = attention @ held
    # |v - o|^2 without a tensor of all differences.
    apart = held.square().sum(-1).unsqueeze(-2) + output.square().sum(-1, keepdim=True)
    apart = (apart - 2 * output @ held.mT).clamp_min(0)
    steepness = (asked * scale).square().sum(-1, keepdim=True)
    squares = attention.square()
    effect = torch.stack([squares * apart * steepness, squares]).sum(2)  # [2, H, n, T]
    effect[..., :skip_positions] = 0.0
    return (effect / effect.sum(-1, keepdim=True).clamp_min(1e-30)).sum(2)


def shrinkage(weight: Tensor, squares: Tensor, *, rows: int, inputs: int) -> Tensor:
    """How far to go from equal weights (0) to those given (1), ``[G]``.

    weight, squares: the sums of the weights and of their squares over ``rows`` rows, ``[G]``.
    """
    spread = (rows * squares / weight.square().clamp_min(1e-300) - 1).clamp_min(1e-12)
    wanted = min(rows, 2 * inputs)
    return ((rows / wanted - 1) / spread).sqrt().clamp_max(1.0)
