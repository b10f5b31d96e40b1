"""Train the embedded family from scratch: ``python -m mappers.demo.train``.

The steps, each skipped when its result is there already, so that a rerun resumes:

1. text from packages (``corpus.py``), split by document into training and held-out
2. one byte-level BPE tokenizer of 4,096 entries
3. ``small``: 4 layers, rope_theta 10,000
4. ``large``: grown from ``small`` by putting a new layer behind each one, rope_theta 500,000
5. bf16 weights, held-out perplexities beside a trigram model's, loss curve, model card figures

The packages to install are in ``corpus.py``; the extra Python package is
``beautifulsoup4``. On two CPU cores it takes about 100 minutes.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from . import corpus
from .family import VOCAB_SIZE, Plan
from .ngram import Trigram
from .optimize import TOKENS_PER_STEP, Ids, perplexity, train

END_OF_TEXT = "<|endoftext|>"
PIECES_PER_DOCUMENT = 8
HERE = Path(__file__).parent
console = Console()

SMALL = Plan(name="small", layers=4, rope_theta=10_000.0, steps=1_800, peak_rate=0.02, seed=1)
LARGE = Plan(name="large", layers=8, rope_theta=500_000.0, steps=2_200, peak_rate=0.01, seed=2)


def main(
    work: Annotated[Path, typer.Option(help="Folder for text, tokens and checkpoints.")] = Path(
        ".work/demo"
    ),
    out: Annotated[Path, typer.Option(help="Where the finished family goes.")] = HERE,
    small_steps: Annotated[int, typer.Option(min=1)] = SMALL.steps,
    large_steps: Annotated[int, typer.Option(min=1)] = LARGE.steps,
) -> None:
    """Make the embedded family; safe to interrupt and to run again."""
    work.mkdir(parents=True, exist_ok=True)
    prepare_text(work, out)
    tokenizer = train_tokenizer(work, out)
    tokens = {name: encode(work, name, tokenizer) for name in ("train", "held_out")}
    small = train(replace(SMALL, steps=small_steps), None, tokens, work, console)
    large = train(replace(LARGE, steps=large_steps), small, tokens, work, console)
    for plan, model in ((SMALL, small), (LARGE, large)):
        publish(model, out / plan.name)
    write_record(out, work, {"small": small, "large": large}, tokens)


def prepare_text(work: Path, out: Path) -> None:
    """Split the packages' documents; held-out paragraphs are taken out of the training text."""
    if (work / "train.txt").exists():
        return
    documents = list(corpus.training_documents())
    held_out = [d for d in documents if corpus.is_held_out(d)]
    seen = {corpus.hash_of(p) for d in held_out for p in d.text.split("\n\n")}
    kept = [
        d._replace(text=corpus.without_repeats(d.text, seen))
        for d in documents
        if not corpus.is_held_out(d)
    ]
    foreign = [d for d in corpus.foreign_documents(work) if corpus.is_held_out(d)]
    write_samples(out / "text", kept, held_out, foreign)
    (work / "held_out.txt").write_text(END_OF_TEXT.join(d.text for d in held_out))
    (work / "train.txt").write_text(END_OF_TEXT.join(d.text for d in kept))


def write_samples(
    folder: Path,
    kept: list[corpus.Document],
    held_out: list[corpus.Document],
    foreign: list[corpus.Document],
) -> None:
    """The small texts that are committed: to fit mappers with, and to measure them on."""
    folder.mkdir(exist_ok=True)
    corpus.write_pieces(folder / "calibration.jsonl", kept[::3], at_most=1)
    corpus.write_pieces(folder / "held_out.jsonl", held_out, at_most=PIECES_PER_DOCUMENT)
    corpus.write_pieces(folder / "out_of_domain.jsonl", foreign, at_most=PIECES_PER_DOCUMENT)


def train_tokenizer(work: Path, out: Path) -> Tokenizer:
    """Byte-level BPE whose texts start with the end-of-text token, as a BOS."""
    path = out / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet
    )
    texts = (work / "train.txt").read_text().split(END_OF_TEXT)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    tokenizer.save(str(path))
    return tokenizer


def encode(work: Path, name: str, tokenizer: Tokenizer) -> Ids:
    """All documents of one split as one run of token ids, each begun by the end-of-text token."""
    path = work / f"{name}.npy"
    if not path.exists():
        texts = (work / f"{name}.txt").read_text().split(END_OF_TEXT)
        ids = [np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch(texts)]
        np.save(path, np.concatenate(ids), allow_pickle=False)
    loaded: Ids = np.load(path, allow_pickle=False)
    return loaded


def publish(model: Qwen3ForCausalLM, folder: Path) -> None:
    """bf16 weights and config, as ``from_pretrained`` expects them, with the tokenizer beside."""
    half = Qwen3ForCausalLM(model.config)
    half.load_state_dict(model.state_dict())
    nn.Module.to(half, torch.bfloat16)
    half.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(folder.parent / "tokenizer.json"),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
    )
    tokenizer.save_pretrained(folder)


def write_record(
    out: Path, work: Path, family: dict[str, Qwen3ForCausalLM], tokens: dict[str, Ids]
) -> None:
    """``training.json`` and the loss curve: the figures that the model card quotes."""
    held_out = tokens["held_out"]
    trigram = Trigram(tokens["train"].astype(np.int64), VOCAB_SIZE)
    histories = {name: json.loads((work / name / "history.json").read_text()) for name in family}
    record = {
        "tokens": {name: len(ids) for name, ids in tokens.items()},
        "tokens_per_step": TOKENS_PER_STEP,
        "parameters": {n: m.num_parameters() for n, m in family.items()},
        "held_out_perplexity": {
            **{name: round(perplexity(model, held_out), 3) for name, model in family.items()},
            "trigram": round(trigram.perplexity(held_out.astype(np.int64)), 3),
        },
        "history": histories,
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    plot_losses(histories, out / "loss.png")
    console.print(record["held_out_perplexity"])


def plot_losses(histories: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Held-out loss in nats a token against training tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, rows in histories.items():
        million = [row["step"] * TOKENS_PER_STEP / 1e6 for row in rows]
        axes.plot(million, [row["held_out"] for row in rows], label=f"{name}, held out")
    axes.set_xlabel("training tokens of this stage (millions)")
    axes.set_ylabel("loss (nats per token)")
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    typer.run(main)
