"""Train the embedded family from scratch: ``python -m mappers.demo.train``.

The steps, each skipped when its result is there already, so that a rerun resumes:

1. text from packages (``corpus.py``), split by document into training and held-out
2. one byte-level BPE tokenizer of 4,096 entries
3. ``small``: 4 layers, rope_theta 10,000
4. ``large``: grown from ``small`` by putting a new layer behind each one, rope_theta 500,000
5. bf16 weights, held-out perplexities beside a trigram model's, loss curve, model card figures

The packages to install are in ``corpus.py``; the extra Python packages are ``beautifulsoup4``
and ``matplotlib``. On two CPU cores it takes about 100 minutes.
"""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from . import corpus
from .ngram import Trigram

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4_096
TOKENS_PER_STEP = 4_096
CHECKPOINT_EVERY_STEPS = 200
PIECES_PER_DOCUMENT = 8
HERE = Path(__file__).parent
console = Console()

Ids = NDArray[np.uint16]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one model is trained; windows get longer for the last ``long_share`` of the steps."""

    name: str
    layers: int
    rope_theta: float
    steps: int
    peak_rate: float
    seed: int
    window_tokens: int = 512
    long_window_tokens: int = 1_056
    long_share: float = 0.25


SMALL = Plan(name="small", layers=4, rope_theta=10_000.0, steps=2_400, peak_rate=0.02, seed=1)
LARGE = Plan(name="large", layers=8, rope_theta=500_000.0, steps=4_000, peak_rate=0.01, seed=2)


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
    small = train(_with_steps(SMALL, small_steps), None, tokens, work)
    large = train(_with_steps(LARGE, large_steps), small, tokens, work)
    for plan, model in ((SMALL, small), (LARGE, large)):
        publish(model, out / plan.name)
    write_record(out, work, {"small": small, "large": large}, tokens)


def _with_steps(plan: Plan, steps: int) -> Plan:
    return Plan(**{**asdict(plan), "steps": steps})


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


def config(plan: Plan) -> Qwen3Config:
    """Equal kv_heads x head_dim (4 x 32) on both sides; depth and rope_theta differ."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=plan.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2_048,
        rope_parameters={"rope_type": "default", "rope_theta": plan.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def grow(small: Qwen3ForCausalLM, plan: Plan) -> Qwen3ForCausalLM:
    """Put a copy behind every layer, with its outputs at zero, so that the loss starts where it was."""
    large = Qwen3ForCausalLM(config(plan))
    state = dict(large.state_dict())
    for name, tensor in small.state_dict().items():
        parts = name.split(".")
        if parts[1] != "layers":
            state[name] = tensor.clone()
            continue
        old = int(parts[2])
        for new in (2 * old, 2 * old + 1):
            silent = new % 2 == 1 and parts[-2] in ("o_proj", "down_proj")
            key = ".".join(["model", "layers", str(new), *parts[3:]])
            state[key] = torch.zeros_like(tensor) if silent else tensor.clone()
    large.load_state_dict(state)
    return large


def train(
    plan: Plan, base: Qwen3ForCausalLM | None, tokens: dict[str, Ids], work: Path
) -> Qwen3ForCausalLM:
    """Train one model, or resume it from its last checkpoint."""
    torch.manual_seed(plan.seed)
    model = grow(base, plan) if base is not None else Qwen3ForCausalLM(config(plan))
    optimizers = make_optimizers(model, plan)
    checkpoint = work / plan.name
    start, history = resume(checkpoint, model, optimizers)
    seconds_before, began = (history[-1]["seconds"] if history else 0.0), time.monotonic()
    losses: list[float] = []
    for step in track(
        range(start, plan.steps), description=f"training {plan.name}", console=console
    ):
        losses.append(one_step(model, optimizers, batch(plan, step, tokens["train"]), plan, step))
        if (step + 1) % CHECKPOINT_EVERY_STEPS == 0 or step + 1 == plan.steps:
            seconds = seconds_before + time.monotonic() - began
            held_out = math.log(perplexity(model, tokens["held_out"][:40_000]))
            history.append(
                {
                    "step": step + 1,
                    "loss": float(np.mean(losses)),
                    "held_out": held_out,
                    "seconds": seconds,
                }
            )
            losses.clear()
            console.print(plan.name, history[-1])
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


def resume(
    checkpoint: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> tuple[int, list[dict[str, float]]]:
    """Load the last checkpoint, if there is one; returns the next step and the loss history."""
    if not (checkpoint / "history.json").exists():
        return 0, []
    history: list[dict[str, float]] = json.loads((checkpoint / "history.json").read_text())
    stored = load_file(checkpoint / "state.safetensors")
    weights = {n: stored[f"model.{n}"] for n, _ in model.named_parameters()}
    model.load_state_dict(weights, strict=False)
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                prefix = f"optimizer.{index}.{number}."
                entries = {
                    k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)
                }
                if entries:
                    optimizer.state[parameter] = entries
    return int(history[-1]["step"]), history


def save(
    checkpoint: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    history: list[dict[str, float]],
) -> None:
    """Weights and optimizer state first, the history that vouches for them last."""
    checkpoint.mkdir(exist_ok=True)
    tensors = {f"model.{n}": p.detach().contiguous() for n, p in model.named_parameters()}
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                for key, value in optimizer.state[parameter].items():
                    tensors[f"optimizer.{index}.{number}.{key}"] = value.detach().clone()
    for name, write in (
        ("state.safetensors", lambda p: save_file(tensors, p)),
        ("history.json", lambda p: p.write_text(json.dumps(history))),
    ):
        temporary = checkpoint / f".{name}"
        write(temporary)
        temporary.rename(checkpoint / name)


def publish(model: Qwen3ForCausalLM, folder: Path) -> None:
    """bf16 weights and config, as ``from_pretrained`` expects them, with the tokenizer beside."""
    model.to(torch.bfloat16).save_pretrained(folder)
    model.float()
    PreTrainedTokenizerFast(
        tokenizer_file=str(folder.parent / "tokenizer.json"),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
    ).save_pretrained(folder)


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
