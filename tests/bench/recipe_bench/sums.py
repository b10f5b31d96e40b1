"""The sums that every candidate of a pair is fitted from: collected once, kept on disk.

Of each window the positions from 4 on and the first four are summed apart, so that one pass serves
fits with and without the sink: sums of disjoint rows add up exactly.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mappers.cache import KVCache
from mappers.collect import aligned, content, take
from mappers.corpus import Corpus, calibration, read
from mappers.geometry import STRUCTURES, Geometry, Structure
from mappers.models import LoadedModel
from mappers.moments import PairMoments
from mappers.progress import steps
from recipe_bench.reading import TEXT

SKIPPED = 4
SEEDS = (0, 1)
WITH_SINK: tuple[Structure, ...] = ("all_heads", "per_head")
"""What published recipes are fitted from: they leave no token out."""
SHUFFLED_STRUCTURE: Structure = "per_head"


@dataclass(frozen=True)
class PairSums:
    """Where the sums over a text are, and the CPU seconds that each part of the pass took."""

    folder: Path
    corpus: Corpus
    seconds: dict[str, float]

    def moments(self, structure: Structure, *, skip_positions: int = SKIPPED) -> PairMoments:
        """The sums of all rows, or of those at position 4 and later."""
        found = PairMoments.load(self.folder / f"{structure}-later.safetensors")
        if skip_positions == 0:
            found.merge(PairMoments.load(self.folder / f"{structure}-first.safetensors"))
        return found

    def shuffled(self, seed: int) -> PairMoments:
        """Sums of pairs that do not belong together: rows of the window before, at random."""
        return PairMoments.load(self.folder / f"shuffled-{seed}.safetensors")

    def collecting_seconds(self, structure: Structure) -> float:
        """CPU seconds of both models' passes and of the sums of one structure."""
        return self.seconds["models"] + self.seconds[structure]


def corpus_of(target: LoadedModel, *, windows: int, window_tokens: int) -> Corpus:
    """``windows`` full calibration windows whose text gives their very tokens back.

    So other tools, which read text, can be given the same tokens.
    """
    file, tokenizer = TEXT / "calibration.jsonl", target.tokenizer
    found = calibration(read([file]), tokenizer, window_tokens=window_tokens, windows=2 * windows)
    whole = [
        (ids, name)
        for ids, name in zip(found.windows, found.names, strict=True)
        if len(ids) == window_tokens and ids.tolist() == _read_back(tokenizer, ids)
    ][:windows]
    return Corpus(
        tuple(ids for ids, _ in whole), tuple(name for _, name in whole), found.document_digests
    )


def _read_back(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> list[int]:
    text = tokenizer.decode(ids)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def collect_sums(
    source: LoadedModel, target: LoadedModel, corpus: Corpus, folder: Path
) -> PairSums:
    """All sums of a pair, from ``folder`` if it holds them for this text."""
    record = folder / "seconds.json"
    if record.exists() and json.loads(record.read_text())["corpus"] == corpus.digest:
        return PairSums(folder, corpus, json.loads(record.read_text())["seconds"])
    geometry = Geometry.of(source.identity, target.identity)
    names: dict[str, Structure] = {f"{structure}-later": structure for structure in STRUCTURES}
    names |= {f"{structure}-first": structure for structure in WITH_SINK}
    names |= {f"shuffled-{seed}": SHUFFLED_STRUCTURE for seed in SEEDS}
    sums = {name: PairMoments(geometry, structure) for name, structure in names.items()}
    seconds = dict.fromkeys(("models", *STRUCTURES), 0.0)
    before: KVCache | None = None
    for window in steps(range(len(corpus.windows)), "collecting", show=True):
        began = time.process_time()
        pair = _contents(source, target, corpus, window)
        seconds["models"] += time.process_time() - began
        first = [take(cache, torch.arange(SKIPPED)) for cache in pair]
        later = [take(cache, torch.arange(SKIPPED, cache.tokens)) for cache in pair]
        for structure in STRUCTURES:
            began = time.process_time()
            sums[f"{structure}-later"].add_window(later[0], later[1])
            if structure in WITH_SINK:
                sums[f"{structure}-first"].add_window(first[0], first[1])
            seconds[structure] += time.process_time() - began
        if before is not None and before.tokens == later[0].tokens:
            for seed in SEEDS:
                wrong = _shuffle(before, later[0], seed * len(corpus.windows) + window)
                sums[f"shuffled-{seed}"].add_window(later[0], wrong)
        before = later[1]
    folder.mkdir(parents=True, exist_ok=True)
    for name, moments in sums.items():
        moments.save(folder / f"{name}.safetensors")
    record.write_text(json.dumps({"corpus": corpus.digest, "seconds": seconds}))
    return PairSums(folder, corpus, seconds)


def _contents(
    source: LoadedModel, target: LoadedModel, corpus: Corpus, window: int
) -> tuple[KVCache, KVCache]:
    ids = corpus.windows[window]
    pair = zip(aligned(source, target, ids), (source, target), strict=True)
    left, right = (content(cache, side.identity.rope, length=len(ids)) for cache, side in pair)
    return left, right


def _shuffle(target: KVCache, source: KVCache, seed: int) -> KVCache:
    """The rows of ``target`` in random order, said to be at ``source``'s positions."""
    order = torch.randperm(target.tokens, generator=torch.Generator().manual_seed(seed))
    moved = take(target, order)
    return KVCache(moved.keys, moved.values, source.positions)
