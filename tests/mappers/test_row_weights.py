"""Row weights against the formula written out, one query and one token at a time."""

import torch

from mappers.row_weights import query_positions, row_weights, shrinkage

TOKENS, HEADS, GROUP, DIM = 20, 2, 3, 4


def test_weights_are_the_formula_written_out() -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([6, 11, 19])
    queries = torch.randn(3, HEADS * GROUP, DIM, generator=generator)
    keys, values = torch.randn(2, TOKENS, HEADS, DIM, generator=generator).unbind()
    given = row_weights(queries, keys, values, positions, scale=0.5, skip_positions=2)
    expected = torch.zeros(2, HEADS, TOKENS)
    for head in range(HEADS):
        for n, position in enumerate(positions.tolist()):
            effect = torch.zeros(2, TOKENS)
            for query in queries[n, head * GROUP : (head + 1) * GROUP]:
                seen = slice(0, position + 1)
                attention = (keys[seen, head] @ query * 0.5).softmax(0)
                output = attention @ values[seen, head]
                for i in range(position + 1):
                    apart = (values[i, head] - output).square().sum()
                    size = (0.5 * query).square().sum()
                    effect[0, i] += attention[i] ** 2 * apart * size
                    effect[1, i] += attention[i] ** 2
            effect[:, :2] = 0
            expected[:, head] += effect / effect.sum(1, keepdim=True)
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-6)


def test_every_query_has_the_same_mass_and_the_first_tokens_none() -> None:
    queries, keys = torch.randn(3, HEADS, DIM), torch.randn(TOKENS, HEADS, DIM)
    weights = row_weights(
        queries, keys, keys, torch.tensor([5, 9, 19]), scale=1.0, skip_positions=4
    )
    torch.testing.assert_close(weights.sum(2), torch.full((2, HEADS), 3.0))
    assert float(weights[..., :4].abs().max()) == 0


def test_query_positions_are_spaced_evenly_on_a_log_scale() -> None:
    positions = query_positions(1024)
    assert (len(positions), int(positions[0]), int(positions[-1])) == (32, 12, 1023)
    ratios = (positions[1:] / positions[:-1]).log()
    assert float(ratios.max() - ratios.min()) < 0.1
    assert query_positions(8).tolist() == [7]


def test_shrinkage_leaves_twice_as_many_effective_rows_as_inputs() -> None:
    weights = torch.rand(2, 1000, dtype=torch.float64) ** torch.tensor([[1.0], [40.0]])
    share = shrinkage(weights.sum(1), weights.square().sum(1), rows=1000, inputs=100)
    assert float(share[0]) == 1.0
    assert 0 < float(share[1]) < 1.0
    blended = 1 + share[1] * (weights[1] / weights[1].mean() - 1)
    effective = blended.sum() ** 2 / blended.square().sum()
    torch.testing.assert_close(
        effective, torch.tensor(200.0, dtype=torch.float64), rtol=1e-2, atol=0
    )
    few = shrinkage(weights.sum(1), weights.square().sum(1), rows=1000, inputs=600)
    torch.testing.assert_close(few, torch.zeros(2, dtype=torch.float64))
