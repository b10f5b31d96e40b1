"""Sixty steps of ordinary fine-tuning: what a small update of a served model is like."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mappers import demo
from mappers.corpus import calibration, read
from mappers.progress import steps

STEPS = 60
BATCH = 2
TOKENS = 256
LEARNING_RATE = 5e-5
WARM_UP = 6
SKIPPED_WINDOWS = 500
"""Calibration takes the first windows; the model is tuned on others."""


def fine_tune(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Tune all weights in place by AdamW on next tokens, then leave the model in evaluation."""
    torch.manual_seed(0)
    batches = _batches(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    model.train()
    for step in steps(range(STEPS), "fine-tuning", show=True):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP)
        loss = model(input_ids=batches[step], labels=batches[step], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.train(False)


def _batches(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Token ids, int64 [steps, batch, tokens]."""
    file = Path(demo.__file__).parent / "text" / "calibration.jsonl"
    wanted = STEPS * BATCH
    corpus = calibration(
        read([file]), tokenizer, window_tokens=TOKENS, windows=SKIPPED_WINDOWS + 2 * wanted
    )
    whole = [ids for ids in corpus.windows[SKIPPED_WINDOWS:] if len(ids) == TOKENS][:wanted]
    return torch.stack(whole).view(STEPS, BATCH, TOKENS)
