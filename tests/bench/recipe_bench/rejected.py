"""Ideas that are not in the product, because they won nowhere: here they can be measured again.

- cosine features: random Fourier features (Rahimi and Recht, 2007) of all heads and their
  predecessors, regressed on what the ridge of all heads leaves; the rows even, or weighted by the
  target's attention (``mappers.row_weights``)
- mlp: two hidden layers of 1,024 ReLU (the trained reference of arXiv 2608.03893), here one for
  keys and one for values of each target layer, reading what ``full_head`` reads; Adam on the mean
  squared error of standardised outputs

Both hold all rows in memory, so only pairs whose source has few numbers a token are measured.
"""

import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from mappers.geometry import Geometry
from mappers.mapper import HeadReads, Reads
from mappers.progress import steps
from mappers.queries import read_with_queries
from mappers.row_weights import query_positions, row_weights, shrinkage
from mappers.selection import select
from tests.bench.recipe_bench.candidates import RIDGE, Candidate, Fit, Group
from tests.bench.recipe_bench.fitted import Fitted, Models
from tests.bench.recipe_bench.rows import Map, key_norms, rows_of, translation
from tests.bench.recipe_bench.sums import SEEDS, SKIPPED, PairSums, Part

LAGS = 1
FEATURES = 1024
FEATURE_SCALE = 1.5
"""Of the random directions, for standardised inputs."""
FEATURE_RIDGE = 1e-3
HIDDEN, EPOCHS, BATCH, RATE, STRIDE = 1024, 5, 256, 1e-3, 2
READ = 4
MOST_INPUTS = 4096
ALL_HEADS = frozenset({Part("all_heads")})


def rejected(geometry: Geometry) -> Iterator[Candidate]:
    """What a seed decides comes once for each."""
    if (LAGS + 1) * 2 * geometry.source_layers * geometry.source_width > MOST_INPUTS:
        return
    yield _candidate("all heads, lag 1", partial(_features, weighted=False, seed=None))
    for seed in SEEDS:
        for weighted in (False, True):
            name = f"cosine features{', weighted' if weighted else ''}, seed {seed}"
            yield _candidate(name, partial(_features, weighted=weighted, seed=seed))
    for seed in SEEDS:
        fit = partial(_mlp, k=min(READ, geometry.source_layers), seed=seed)
        yield _candidate(f"mlp, seed {seed}", fit, ALL_HEADS)


def _candidate(name: str, fit: Fit, needs: frozenset[Part] = frozenset()) -> Candidate:
    return Candidate(f"rejected: {name}", Group.REJECTED, fit, needs)


def _features(models: Models, sums: PairSums, *, weighted: bool, seed: int | None) -> Fitted:
    """The ridge of all heads, and what features add to it if there is a seed for them."""
    began = time.process_time()
    rows = rows_of(models, sums.corpus, lags=LAGS)
    ridge = Ridge(rows.inputs, rows.outputs, models.geometry.source_dim)
    apply: Map = ridge
    flops = 2 * ridge.weight.numel()
    if seed is not None:
        left = rows.outputs - ridge(rows.inputs)
        weights = _weights(models, sums) if weighted else None
        cosines = Cosines(rows.inputs, left, weights, models.geometry.target_dim, seed)
        flops += 2 * (cosines.directions.numel() + cosines.weight.numel())

        def apply(inputs: Tensor) -> Tensor:
            return ridge(inputs) + cosines(inputs)

    translate = translation(models, apply, lags=LAGS, norms=key_norms(models, rows))
    return Fitted(translate, flops, 2 * flops, time.process_time() - began)


class Ridge:
    """All inputs on all outputs, a lambda for each block of inputs."""

    def __init__(self, inputs: Tensor, outputs: Tensor, block: int) -> None:
        self.mean_x, self.mean_y = inputs.mean(0), outputs.mean(0)
        x, y = inputs - self.mean_x, outputs - self.mean_y
        gram = (x.T @ x).double()
        means = gram.diagonal().view(-1, block).mean(1)
        gram.diagonal().add_((RIDGE * means).repeat_interleave(block))
        self.weight = torch.linalg.solve(gram, (x.T @ y).double()).float()

    def __call__(self, inputs: Tensor) -> Tensor:
        mapped: Tensor = (inputs - self.mean_x) @ self.weight + self.mean_y
        return mapped


class Cosines:
    """Random features of standardised inputs on ``left``; of weights ``[n, O / dim]`` each block
    of ``dim`` outputs has its own."""

    def __init__(
        self, inputs: Tensor, left: Tensor, weights: Tensor | None, dim: int, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = inputs.shape[1]
        self.mean, self.deviation = inputs.mean(0), inputs.std(0)
        drawn = torch.randn(size, FEATURES, generator=generator)
        self.directions = drawn * FEATURE_SCALE / size**0.5
        self.phases = 2 * torch.pi * torch.rand(FEATURES, generator=generator)
        features = self._of(inputs)
        self.centre = features.mean(0)
        features -= self.centre
        if weights is None:
            self.weight = _regressed(features, left)
        else:
            blocks = left.view(len(left), -1, dim).unbind(1)
            parts = zip(blocks, weights.T, strict=True)
            self.weight = torch.cat([_regressed(features, y, w) for y, w in parts], dim=1)

    def __call__(self, inputs: Tensor) -> Tensor:
        added: Tensor = (self._of(inputs) - self.centre) @ self.weight
        return added

    def _of(self, inputs: Tensor) -> Tensor:
        standard = (inputs - self.mean) / self.deviation
        found: Tensor = torch.cos(standard @ self.directions + self.phases)
        return found


def _regressed(features: Tensor, left: Tensor, weights: Tensor | None = None) -> Tensor:
    heavy = features if weights is None else features * weights[:, None]
    gram = (heavy.T @ features).double()
    gram.diagonal().add_(FEATURE_RIDGE * gram.diagonal().mean())
    weight: Tensor = torch.linalg.solve(gram, (heavy.T @ left).double())
    return weight.float()


def _weights(models: Models, sums: PairSums) -> Tensor:
    """Row weights ``[n, 2 * L_t * H_t]`` by attention, as even as the number of features asks."""
    found = []
    for number in steps(range(len(sums.corpus.windows)), "weighting", show=True):
        ids = sums.corpus.windows[number]
        asked = query_positions(len(ids))
        native, queries, scale = read_with_queries(models.target.model, ids, asked)
        layers = [
            row_weights(query, keys, values, asked, scale=scale, skip_positions=SKIPPED)
            for query, keys, values in zip(queries, native.keys, native.values, strict=True)
        ]
        found.append(torch.stack(layers, dim=1)[..., SKIPPED:].flatten(0, 2).T)
    drawn = torch.cat(found).double()
    sizes = {"rows": len(drawn), "inputs": FEATURES}
    share = shrinkage(drawn.sum(0), drawn.square().sum(0), **sizes)
    return (1 + share * (drawn / drawn.mean(0) - 1)).float()


def _mlp(models: Models, sums: PairSums, *, k: int, seed: int) -> Fitted:
    began = time.process_time()
    torch.manual_seed(seed)
    chosen = select(sums.moments(ALL_HEADS), k, RIDGE).reads
    rows = rows_of(models, sums.corpus, lags=0, stride=STRIDE)
    g, nets = models.geometry, []
    for number in steps(range(2 * g.target_layers), "training", show=True):
        kind, layer = divmod(number, g.target_layers)
        columns = _columns(g, kind, chosen[layer])
        outputs = rows.outputs[:, number * g.target_width : (number + 1) * g.target_width]
        nets.append((columns, trained(rows.inputs[:, columns], outputs)))

    def apply(inputs: Tensor) -> Tensor:
        return torch.cat([net(inputs[:, columns]) for columns, net in nets], dim=1)

    translate = translation(models, apply, lags=0, norms=key_norms(models, rows))
    numbers = sum(weight.numel() for _, net in nets for weight in net.parameters())
    return Fitted(translate, 2 * numbers, 4 * numbers, time.process_time() - began)


def _columns(g: Geometry, kind: int, reads: Reads) -> Tensor:
    """Where among the inputs the keys, or the values, of whole source layers are."""
    if isinstance(reads, HeadReads):
        raise TypeError("whole layers are read here")
    layers = torch.tensor(reads)[:, None] + kind * g.source_layers
    return (layers * g.source_width + torch.arange(g.source_width)).flatten()


class _Scaled(nn.Module):
    """``net`` between standardised inputs and outputs."""

    def __init__(self, net: nn.Module, inputs: Tensor, outputs: Tensor) -> None:
        super().__init__()
        self.net = net
        self.mean_x, self.scale_x = inputs.mean(0), inputs.std(0)
        self.mean_y, self.scale_y = outputs.mean(0), outputs.std()

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.net((inputs - self.mean_x) / self.scale_x)
        return found * self.scale_y + self.mean_y


def trained(inputs: Tensor, outputs: Tensor) -> nn.Module:
    """A network after a few epochs of Adam, its rate falling to nothing."""
    sizes = (inputs.shape[1], HIDDEN, HIDDEN, outputs.shape[1])
    first, second, last = (nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
    net = _Scaled(nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last), inputs, outputs)
    batches = len(inputs) // BATCH
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, EPOCHS * batches)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs))[: batches * BATCH].view(-1, BATCH):
            error = (net(inputs[rows]) - outputs[rows]) / net.scale_y
            optimizer.zero_grad(set_to_none=True)
            error.square().mean().backward()
            optimizer.step()
            schedule.step()
    return net.requires_grad_(False)
