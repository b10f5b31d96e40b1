"""A second stage after the fit: corrections of the maps, trained on the target's own predictions.

What the least squares of a fit minimise is not what is wanted: the target should predict the same
on the translated cache. So, with the fitted maps frozen, each gets a correction of low rank,
trained by gradient descent on the KL divergence between the target's next-token distributions on
its own cache and on the translated one. A correction is added to its map in the end: what is served
has the form, and the cost, that it had.

Each step takes one window of text, translates a first part of it (but the first tokens, which are
exact), and reads the rest natively over it: so the first positions after the cut see a native tail
of 1 token, and the last one of ``READ_TOKENS``. Windows that no step sees tell when to stop; the
best state on them is what is returned.

Legend: G groups of target heads, F inputs and O outputs of a group, T tokens, r rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from mappers import hf_compat
from mappers.cache import KVCache
from mappers.checkpoint import read_checkpoint, write_checkpoint
from mappers.collect import aligned, content
from mappers.corpus import Corpus
from mappers.errors import TooFewData
from mappers.mapper import AffineMap, Mapper
from mappers.models import LoadedModel
from mappers.progress import steps as shown
from mappers.recipes import recipe_of
from mappers.rope import RotaryTable

READ_TOKENS = 64
SCHEMA = "kvt-distill-1"


@dataclass(frozen=True)
class Schedule:
    """How long and how fast. ``rate``: of Adam, in units of each map's own output."""

    steps: int = 200
    rank: int = 16
    rate: float = 3e-3
    clip: float = 1.0
    held_out: int = 8
    every: int = 20
    patience: int = 3
    seed: int = 0


class Correction(nn.Module):
    """A low-rank addition to one map, in units of its inputs' and outputs' own spread.

    ``unit_x [G, F]``, ``mean_x [G, F]`` and ``unit_y`` are those of its first rows.
    """

    def __init__(self, x: Tensor, y: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        groups, _, inputs = x.shape
        self.mean_x, self.unit_x = x.mean(1), x.std(1).clamp_min(1e-6)
        self.unit_y = float(y.std(1).square().mean().sqrt())
        narrow = torch.randn(groups, inputs, rank, generator=generator) / inputs**0.5
        self.narrow = nn.Parameter(narrow)
        self.wide = nn.Parameter(torch.zeros(groups, rank, y.shape[2]))
        self.shift = nn.Parameter(torch.zeros(groups, 1, y.shape[2]))

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the map's output, ``[G, T, O]``, for inputs ``[G, T, F]``."""
        unit = (x - self.mean_x[:, None]) / self.unit_x[:, None]
        return self.unit_y * (unit @ self.narrow @ self.wide + self.shift)

    def added_to(self, affine: AffineMap) -> AffineMap:
        """The map with this in it."""
        with torch.no_grad():
            weight = self.unit_y * (self.narrow / self.unit_x[:, :, None]) @ self.wide
            bias = self.unit_y * self.shift - self.mean_x[:, None] @ weight
        return replace(
            affine,
            weight=(affine.weight.float() + weight.transpose(0, 1).flatten(1)).to(
                affine.weight.dtype
            ),
            bias=affine.bias + bias.flatten(),
        )


class Student:
    """The mapper as something to train: its maps, frozen, and their corrections."""

    def __init__(self, mapper: Mapper, source: LoadedModel, target: LoadedModel) -> None:
        self.mapper, self.source, self.target = mapper, source, target
        recipe, geometry = recipe_of(mapper), mapper.geometry
        self.joint = recipe.structure == "joint"
        self.columns = [
            recipe.columns(layer.heads or layer.sources, geometry) for layer in mapper.layers
        ]
        self.corrections = nn.ModuleList()

    def begin(self, ids: Tensor, schedule: Schedule) -> None:
        """Corrections of nothing, in the units that a first window gives."""
        generator = torch.Generator().manual_seed(schedule.seed)
        read, _ = aligned(self.source, self.target, ids)
        for layer, x in enumerate(self._inputs(read)):
            for affine, rows in zip(self._maps(layer), x, strict=True):
                y = _mapped(affine, rows)
                self.corrections.append(Correction(rows, y, schedule.rank, generator))

    def translated(self, read: KVCache, native: KVCache, tokens: int) -> DynamicCache:
        """The target's cache of the first ``tokens`` of a window, with gradients.

        Its first tokens are the target's own, as many as serving will hold exactly.
        """
        exact = max(1, self.mapper.skipped_positions)
        table = RotaryTable.of(self.mapper.target.rope, read.positions, length=read.tokens)
        shape = (read.tokens, self.mapper.target.num_kv_heads, self.mapper.target.head_dim)
        cache = DynamicCache()
        for layer, inputs in enumerate(self._inputs(read)):
            sides = []
            for kind, x in enumerate(inputs):
                out = _mapped(self._maps(layer)[kind], x) + self.corrections[2 * layer + kind](x)
                sides.append(out.transpose(0, 1).reshape(shape))
            norm = self.mapper.layers[layer].key_norm
            if norm is not None:
                means = (sides[0] / norm).square().mean(-1, keepdim=True)
                sides[0] = sides[0] * means.clamp_min(1e-12).rsqrt()
            sides[0] = _Rotated.apply(sides[0], table)  # type: ignore[no-untyped-call]
            own = (native.keys[layer][:exact], native.values[layer][:exact])
            keys, values = (
                torch.cat([first, mapped[exact:]])[:tokens].to(native.dtype).transpose(0, 1)[None]
                for first, mapped in zip(own, sides, strict=True)
            )
            cache.update(keys, values, layer)
        return cache

    def loss(self, ids: Tensor, cut: int) -> Tensor:
        """Mean KL(native || translated) at the positions after ``cut``, in nats."""
        read, native = aligned(self.source, self.target, ids)
        rest = ids[cut : cut + READ_TOKENS][None]
        own = hf_compat.stacked([native.slice(0, cut)], native.dtype, native.keys[0].device)
        wanted, _ = hf_compat.read(self.target.model, rest, cache=own, start_position=cut)
        with torch.enable_grad():
            given = _read(self.target, rest, self.translated(read, native, cut), cut)
            log_p, log_q = (logits.float().log_softmax(-1) for logits in (wanted.clone(), given))
            return (log_p.exp() * (log_p - log_q)).sum(-1).mean()

    def mapper_with_corrections(self) -> Mapper:
        """The mapper that was learned, of the same form as the one given."""
        layers = []
        corrections: Any = iter(self.corrections)
        for layer in self.mapper.layers:
            keys, values = next(corrections), next(corrections)
            maps = {"keys": keys.added_to(layer.keys), "values": values.added_to(layer.values)}
            layers.append(replace(layer, **maps))
        return replace(self.mapper, layers=tuple(layers))

    def _maps(self, layer: int) -> tuple[AffineMap, AffineMap]:
        return self.mapper.layers[layer].keys, self.mapper.layers[layer].values

    def _inputs(self, read: KVCache) -> list[tuple[Tensor, Tensor]]:
        """Per target layer what its keys and its values are mapped from, each ``[G, T, F]``."""
        stripped = content(read, self.mapper.source.rope, length=read.tokens)
        keys, values = (
            torch.cat([layer.flatten(1) for layer in side], 1)
            for side in (stripped.keys, stripped.values)
        )
        if self.joint:
            own, rows = torch.cat([keys, values], 1), torch.arange(read.tokens)
            lags = range(self.mapper.lags + 1)
            keys = values = torch.cat([own[(rows - lag).clamp_min(0)] for lag in lags], 1)
        return [(keys[:, k].transpose(0, 1), values[:, v].transpose(0, 1)) for k, v in self.columns]


def distill(
    mapper: Mapper,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    schedule: Schedule,
    *,
    checkpoint: Path | None = None,
    progress: bool = True,
) -> Mapper:
    """The mapper with corrections trained on the corpus; on a stopped run's checkpoint it goes on.

    The last ``schedule.held_out`` windows are not trained on. Raises TooFewData for a corpus with
    no more windows than that.
    """
    usable = [ids for ids in corpus.windows if len(ids) >= 2 * READ_TOKENS]
    train, held_out = usable[: -schedule.held_out], usable[-schedule.held_out :]
    if not train:
        raise TooFewData(f"{len(usable)} windows, of which {schedule.held_out} are held out")
    student = Student(mapper, source, target)
    student.begin(train[0], schedule)
    for parameter in target.model.parameters():
        parameter.requires_grad_(False)
    _train(student, train, held_out, schedule, checkpoint, progress)
    return student.mapper_with_corrections()


def _train(
    student: Student,
    train: Sequence[Tensor],
    held_out: Sequence[Tensor],
    schedule: Schedule,
    checkpoint: Path | None,
    progress: bool,
) -> None:
    """Leaves the best state on the held-out windows in ``student``."""
    parameters = list(student.corrections.parameters())
    optimizer = torch.optim.Adam(parameters, lr=schedule.rate, betas=(0.9, 0.95))
    state = _State(student, optimizer)
    if checkpoint is not None:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        if checkpoint.exists():
            state.restore(checkpoint)
    for step in shown(range(state.step, schedule.steps), "distilling", show=progress):
        if step % schedule.every == 0 and not state.improving(
            _held_out(student, held_out), schedule
        ):
            break
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate * 0.5 * (1 + math.cos(math.pi * step / schedule.steps))
        optimizer.zero_grad()
        student.loss(*_example(train, step, schedule.seed)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, schedule.clip)
        optimizer.step()
        state.step = step + 1
        if checkpoint is not None and state.step % schedule.every == 0:
            state.save(checkpoint)
    else:
        state.improving(_held_out(student, held_out), schedule)
    state.use_best()


def _example(train: Sequence[Tensor], step: int, seed: int) -> tuple[Tensor, int]:
    """A window in turn, and where to cut it: the same for the same step, whatever came before."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    ids = train[step % len(train)]
    latest = len(ids) - READ_TOKENS
    return ids, int(torch.randint(min(READ_TOKENS, latest), latest + 1, (), generator=generator))


@torch.no_grad()
def _held_out(student: Student, windows: Sequence[Tensor]) -> float:
    """Mean loss of the windows, each cut as late as can be."""
    losses = [student.loss(ids, len(ids) - READ_TOKENS).detach() for ids in windows]
    return float(torch.stack(losses).mean())


class _State:
    """Where the training is, and the best corrections so far."""

    def __init__(self, student: Student, optimizer: torch.optim.Optimizer) -> None:
        self.corrections, self.optimizer = student.corrections, optimizer
        self.step, self.best, self.waited = 0, math.inf, 0
        self.best_state = self._now()

    def improving(self, loss: float, schedule: Schedule) -> bool:
        """Note a loss; whether it is still worth going on."""
        if loss < self.best:
            self.best, self.waited, self.best_state = loss, 0, self._now()
        else:
            self.waited += 1
        return self.waited < schedule.patience

    def use_best(self) -> None:
        self.corrections.load_state_dict(self.best_state)

    def save(self, path: Path) -> None:
        tensors = {f"now.{n}": t for n, t in self._now().items()}
        tensors |= {f"best.{n}": t for n, t in self.best_state.items()}
        for index, moment in self.optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{index}.{name}": value for name, value in moment.items()}
        numbers = torch.tensor([self.step, self.best, self.waited], dtype=torch.float64)
        write_checkpoint(path, {**tensors, "numbers": numbers}, {"schema": SCHEMA})

    def restore(self, path: Path) -> None:
        tensors, _ = read_checkpoint(path, SCHEMA)
        parts: dict[str, dict[str, Tensor]] = {"now": {}, "best": {}, "adam": {}, "numbers": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        self.corrections.load_state_dict(parts["now"])
        self.best_state = parts["best"]
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in parts["adam"].items():
            index, _, rest = name.partition(".")
            moments.setdefault(int(index), {})[rest] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        step, self.best, waited = parts["numbers"][""].tolist()
        self.step, self.waited = int(step), int(waited)

    def _now(self) -> dict[str, Tensor]:
        return {name: t.detach().clone() for name, t in self.corrections.state_dict().items()}


def _mapped(affine: AffineMap, x: Tensor) -> Tensor:
    """The fitted map's outputs ``[G, T, O]`` for inputs ``[G, T, F]``."""
    weight = affine.weight.float().view(x.shape[2], len(x), -1).transpose(0, 1)
    return torch.baddbmm(affine.bias.view(len(x), 1, -1), x, weight)


class _Rotated(torch.autograd.Function):
    """A rotary embedding with gradients: rotation's transpose is the way back."""

    @staticmethod
    def forward(context: Any, keys: Tensor, table: RotaryTable) -> Tensor:
        context.table = table
        return table.apply(keys)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # The transpose scales as the embedding does, where stripping would undo that.
        return replace(context.table, scaling=1.0).strip(gradient), None


def _read(target: LoadedModel, ids: Tensor, cache: DynamicCache, start: int) -> Tensor:
    """Logits of ``ids`` [1, n] read behind ``cache``, with gradients through it."""
    positions = torch.arange(start, start + ids.shape[1], device=target.model.device)
    outputs = target.model(
        input_ids=ids.to(target.model.device),
        position_ids=positions[None],
        use_cache=True,
        **hf_compat.cache_arguments(target.model, cache),
    )
    logits: Tensor = outputs.logits
    return logits
