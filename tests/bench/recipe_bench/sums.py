"""The sums that a pair's candidates are fitted from: collected once, kept on disk.

Of each window the positions from 4 on and the first four are summed apart, so that one pass serves
fits with and without the sink: sums of disjoint rows add up exactly. Only what is asked for is
collected. A stopped pass goes on where it was, to the same bits.
"""

import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mappers.cache import KVCache
from mappers.collect import aligned, content, lagged
from mappers.corpus import Corpus, calibration, read
from mappers.geometry import Structure
from mappers.held_out import hold_out
from mappers.models import LoadedModel
from mappers.moments import PairMoments
from mappers.progress import steps
from tests.bench.recipe_bench import code
from tests.bench.recipe_bench.fitted import Models
from tests.bench.recipe_bench.reading import TEXT

SKIPPED = 4
SEEDS = (0, 1)
EVERY_WINDOWS = 20
LATER, FIRST, FITTED, HELD = "later", "first", "fitted", "held"


class Part(NamedTuple):
    """One file of sums: ``rows`` are ``later``, ``first``, ``fitted``, ``held`` or
    ``shuffled-{seed}``.

    ``fitted`` are those of the later rows that ``kvt fit --budget`` fits candidates on, ``held``
    those of the windows that it judges them on. Shuffled ones are of pairs that do not belong
    together: the target's rows are those of the window before, at random.
    """

    structure: Structure
    rows: str = LATER
    lags: int = 0

    @property
    def name(self) -> str:
        return f"{self.structure}-{self.rows}" + (f"-lag-{self.lags}" if self.lags else "")


def with_heads(lags: int) -> frozenset[Part]:
    """What maps of single heads are fitted from, in the two parts that a budget needs."""
    return frozenset({Part("joint", FITTED, lags), Part("joint", HELD, lags)})


def with_sink(structure: Structure) -> frozenset[Part]:
    """What published recipes are fitted from: they leave no token out."""
    return frozenset({Part(structure, LATER), Part(structure, FIRST)})


@dataclass(frozen=True)
class PairSums:
    """The sums over a text, in ``folder``, and the CPU seconds a window of what made them."""

    folder: Path
    corpus: Corpus
    seconds: Mapping[str, float]
    _held: dict[frozenset[Part], PairMoments] = field(default_factory=dict)

    def moments(self, parts: Iterable[Part]) -> PairMoments:
        """All rows of these parts, to be read only: what was asked for last is held, since sums
        are large and candidates come in the order of what they need."""
        wanted = frozenset(parts)
        if wanted not in self._held:
            self._held.clear()
            first, *others = (
                PairMoments.load(self.folder / f"{part.name}.safetensors")
                for part in sorted(wanted)
            )
            for other in others:
                first.merge(other)
            self._held[wanted] = first
        return self._held[wanted]

    def collecting_seconds(self, parts: Iterable[Part]) -> float:
        """CPU seconds of both models' passes over the text and of these sums."""
        names = ("models", *(part.name for part in parts))
        return len(self.corpus.windows) * sum(self.seconds[name] for name in names)


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
    models: Models,
    corpus: Corpus,
    folder: Path,
    parts: Iterable[Part],
    *,
    every_windows: int = EVERY_WINDOWS,
    progress: bool = True,
) -> PairSums:
    """``parts`` of a pair's sums, from ``folder`` as far as it holds them for this text."""
    folder = _only(folder, _setting(corpus))
    clock = _Clock(folder / "seconds.json")
    total = len(corpus.windows)
    sums = {
        part: _kept(models, folder, part)
        for part in sorted(set(parts))
        if _windows_in(folder, part) < total
    }
    for window, batch in _windows(models, corpus, sums, clock, progress):
        for part, moments in sums.items():
            if moments.windows == window:
                with clock.timing(part.name):
                    batch.add(moments, part)
        if (window + 1) % every_windows == 0 or window + 1 == total:
            for part, moments in sums.items():
                if moments.windows == window + 1:
                    moments.save(folder / f"{part.name}.safetensors")
            clock.save()
    return PairSums(folder, corpus, clock.rates())


def _setting(corpus: Corpus) -> str:
    """What sums depend on beside the pair."""
    return f"{corpus.digest.removeprefix('sha256:')[:12]}-{code.summing()}"


def _only(folder: Path, setting: str) -> Path:
    """The folder of this setting; those of others, which nobody will ask for, are removed."""
    for other in folder.glob("*"):
        if other.name != setting:
            shutil.rmtree(other)
    own = folder / setting
    own.mkdir(parents=True, exist_ok=True)
    return own


def _windows_in(folder: Path, part: Part) -> int:
    """How many windows were added, without reading the sums."""
    file = folder / f"{part.name}.safetensors"
    if not file.exists():
        return 0
    with safe_open(file, framework="pt") as opened:
        return int(opened.metadata()["windows"])


def _kept(models: Models, folder: Path, part: Part) -> PairMoments:
    file = folder / f"{part.name}.safetensors"
    if file.exists():
        return PairMoments.load(file)
    return PairMoments(models.geometry, part.structure, part.lags)


@dataclass(frozen=True)
class _Window:
    """Both models' contents of one window, and the target's of the window before it."""

    number: int
    held: bool
    source: KVCache
    target: KVCache
    before: KVCache

    def add(self, moments: PairMoments, part: Part) -> None:
        if part.rows == (FITTED if self.held else HELD):
            moments.windows += 1  # None of its rows: the part is as far as the others.
            return
        tokens = self.source.tokens
        first = part.rows == FIRST
        rows = torch.arange(0 if first else SKIPPED, SKIPPED if first else tokens)
        own, *earlier = lagged(self.source, rows, part.lags)
        moments.add_window(own, self._wanted(part, rows), earlier)

    def _wanted(self, part: Part, rows: Tensor) -> KVCache:
        kind, _, seed = part.rows.partition("-")
        if kind != "shuffled":
            return self.target.take(rows)
        generator = torch.Generator().manual_seed(1_000_003 * int(seed) + self.number)
        moved = self.before.take(rows[torch.randperm(len(rows), generator=generator)])
        return KVCache(moved.keys, moved.values, self.source.positions[rows])


def _windows(
    models: Models,
    corpus: Corpus,
    sums: Mapping[Part, PairMoments],
    clock: "_Clock",
    progress: bool,
) -> Iterator[tuple[int, _Window]]:
    """The windows that some of the sums lack; the one before the first is the last."""
    total = len(corpus.windows)
    done = min((moments.windows for moments in sums.values()), default=total)
    before = _contents(models, corpus, done - 1)[1] if done < total else None
    split = any(part.rows in (FITTED, HELD) for part in sums)
    held = {id(ids) for ids in hold_out(corpus)[1].windows} if split else set()
    for number in steps(range(done, total), "collecting", show=progress):
        with clock.timing("models"):
            source, target = _contents(models, corpus, number)
        is_held = id(corpus.windows[number]) in held
        yield number, _Window(number, is_held, source, target, before or target)
        before = target


def _contents(models: Models, corpus: Corpus, window: int) -> tuple[KVCache, KVCache]:
    ids = corpus.windows[window]
    sides = (models.source, models.target)
    pair = zip(aligned(*sides, ids), sides, strict=True)
    source, target = (content(cache, side.identity.rope, length=len(ids)) for cache, side in pair)
    return source, target


class _Clock:
    """CPU seconds by name, with how many windows they are of; kept on disk."""

    def __init__(self, file: Path) -> None:
        self._file = file
        found = json.loads(file.read_text()) if file.exists() else {}
        self._spent: dict[str, list[float]] = found

    def timing(self, name: str) -> "_Timing":
        return _Timing(self._spent.setdefault(name, [0.0, 0]))

    def rates(self) -> dict[str, float]:
        """CPU seconds a window."""
        return {name: seconds / windows for name, (seconds, windows) in self._spent.items()}

    def save(self) -> None:
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self._spent))
        partial.rename(self._file)


class _Timing:
    def __init__(self, spent: list[float]) -> None:
        self._spent, self._began = spent, 0.0

    def __enter__(self) -> None:
        self._began = time.process_time()

    def __exit__(self, *_: object) -> None:
        self._spent[0] += time.process_time() - self._began
        self._spent[1] += 1
