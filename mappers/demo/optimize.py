"""The training loop of the embedded family: Muon, random windows, checkpoints."""

import math
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from torch import nn
from transformers import Qwen3ForCausalLM

from .checkpoint import resume, save
from .family import Plan, config, grow

TOKENS_PER_STEP = 4_096
CHECKPOINT_EVERY_STEPS = 200

Ids = NDArray[np.uint16]


def train(
    plan: Plan, base: Qwen3ForCausalLM | None, tokens: dict[str, Ids], work: Path, console: Console
) -> Qwen3ForCausalLM:
    """Train one model, or resume it from its last checkpoint."""
    torch.manual_seed(plan.seed)
    model = grow(base, plan) if base is not None else Qwen3ForCausalLM(config(plan))
    optimizers = make_optimizers(model, plan)
    checkpoint = work / plan.name
    start, history = resume(checkpoint, model, optimizers)
    seconds_before, began = (history[-1]["seconds"] if history else 0.0), time.monotonic()
    losses: list[float] = []
    steps = range(start, plan.steps)
    for step in track(steps, description=f"training {plan.name}", console=console):
        losses.append(one_step(model, optimizers, batch(plan, step, tokens["train"]), plan, step))
        if (step + 1) % CHECKPOINT_EVERY_STEPS == 0 or step + 1 == plan.steps:
            row = {
                "step": step + 1,
                "loss": float(np.mean(losses)),
                "held_out": math.log(perplexity(model, tokens["held_out"][:40_000])),
                "seconds": seconds_before + time.monotonic() - began,
            }
            history.append(row)
            losses.clear()
            console.print(plan.name, row)
            save(checkpoint, model, optimizers, history)
    return model


def make_optimizers(model: nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in n)]
    muon = torch.optim.Muon(matrices, lr=plan.peak_rate, weight_decay=0.01)
    adam = torch.optim.AdamW(rest, lr=plan.peak_rate / 4, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adam]


def rate(plan: Plan, step: int) -> float:
    """Warm up over 2 %, hold, and fall to nothing over the last 40 % of the steps."""
    progress = (step + 1) / plan.steps
    return min(1.0, progress / 0.02, (1.0 - progress) / 0.4 + 1e-3)


def batch(plan: Plan, step: int, tokens: Ids) -> torch.Tensor:
    """Windows [B, T] at random places, the same for the same step; each starts with the BOS."""
    window = (
        plan.long_window_tokens
        if step >= plan.steps * (1 - plan.long_share)
        else plan.window_tokens
    )
    rng = np.random.default_rng([plan.seed, step])
    starts = rng.integers(0, len(tokens) - window, size=TOKENS_PER_STEP // window)
    rows = np.stack([tokens[s : s + window] for s in starts]).astype(np.int64)
    rows[:, 0] = 0
    return torch.from_numpy(rows)


def one_step(
    model: Qwen3ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    ids: torch.Tensor,
    plan: Plan,
    step: int,
) -> float:
    """One forward, backward and update; returns the loss in nats a token."""
    loss = loss_of(model, ids)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, peak in zip(optimizers, (plan.peak_rate, plan.peak_rate / 4), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = peak * rate(plan, step)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss of windows [B, T]."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: Qwen3ForCausalLM, tokens: Ids, window: int = 1_056) -> float:
    """exp of the mean loss over consecutive windows, each begun by the BOS."""
    count = len(tokens) // window
    rows = tokens[: count * window].reshape(count, window).astype(np.int64)
    rows[:, 0] = 0
    losses = [loss_of(model, torch.from_numpy(rows[i : i + 4])).item() for i in range(0, count, 4)]
    return math.exp(float(np.mean(losses)))
