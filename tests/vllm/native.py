"""The reference of all tests: what the models say by themselves, in transformers and float32."""

from functools import cache

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.vllm.stack import FAMILY

TOKENIZER = Tokenizer.from_file(str(FAMILY / "tokenizer.json"))


@cache
def model(name: str) -> PreTrainedModel:
    """One of the embedded family."""
    return AutoModelForCausalLM.from_pretrained(FAMILY / name, dtype=torch.float32)


@torch.no_grad()
def continued(prompt: list[int], tokens: int = 8) -> str:
    """The large model's text after a prompt."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(model("large")(torch.tensor([ids])).logits[0, -1].argmax()))
    return str(TOKENIZER.decode(ids[len(prompt) :], skip_special_tokens=False))


@torch.no_grad()
def kv(name: str, ids: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [T, H, D] of each layer."""
    layers = model(name)(torch.tensor([ids]), use_cache=True).past_key_values.layers
    return [(x.keys[0].transpose(0, 1), x.values[0].transpose(0, 1)) for x in layers]
