"""Training state on disk: written whole or not at all, and resumed from."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

History = list[dict[str, float]]


def resume(
    folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> tuple[int, History]:
    """Load the last checkpoint, if there is one; returns the next step and the loss history."""
    if not (folder / "history.json").exists():
        return 0, []
    history: History = json.loads((folder / "history.json").read_text())
    stored = load_file(folder / "state.safetensors")
    weights = {n: stored[f"model.{n}"] for n, _ in model.named_parameters()}
    model.load_state_dict(weights, strict=False)  # a tied head is no parameter of its own
    for prefix, optimizer, parameter in _slots(optimizers):
        entries = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
        optimizer.state[parameter] = entries
    return int(history[-1]["step"]), history


def save(
    folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], history: History
) -> None:
    """Weights and optimizer state first, the history that vouches for them last."""
    folder.mkdir(exist_ok=True)
    tensors = {f"model.{n}": p.detach().contiguous() for n, p in model.named_parameters()}
    for prefix, optimizer, parameter in _slots(optimizers):
        for key, value in optimizer.state[parameter].items():
            tensors[f"{prefix}{key}"] = value.detach().clone()
    save_file(tensors, folder / ".state.safetensors")
    (folder / ".history.json").write_text(json.dumps(history))
    for name in ("state.safetensors", "history.json"):
        (folder / f".{name}").rename(folder / name)


def _slots(
    optimizers: list[torch.optim.Optimizer],
) -> list[tuple[str, torch.optim.Optimizer, nn.Parameter]]:
    """A stable name for the state of every parameter of every optimizer."""
    return [
        (f"optimizer.{index}.{number}.", optimizer, parameter)
        for index, optimizer in enumerate(optimizers)
        for number, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])
    ]
