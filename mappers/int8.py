"""A model with weights rounded to 8 bits: a familiar measure of what a small KL is."""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

LARGEST = 127


def int8_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose linear layers hold rounded weights in the model's dtype; embeddings are kept.

    Weight-only rounding to nearest with one scale an output channel, as in LLM.int8() (arXiv
    2208.07339) without its outlier columns. The output layer is kept too, as is customary.
    """
    rounded = copy.deepcopy(model)
    head: object = rounded.get_output_embeddings()  # type: ignore[no-untyped-call]
    for module in rounded.modules():
        if isinstance(module, nn.Linear) and module is not head:
            with torch.no_grad():
                module.weight.copy_(round_rows(module.weight))
    return rounded


def round_rows(weight: Tensor) -> Tensor:
    """Each row of ``weight`` [outputs, inputs] as whole multiples of its largest / 127."""
    scale = weight.abs().amax(dim=1, keepdim=True).float() / LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return ((weight.float() / scale).round() * scale).to(weight.dtype)
