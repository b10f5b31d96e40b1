"""One pair of the benchmark: its models, what is read of it, and the results of its candidates."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from rich.console import Console

from mappers.corpus import Corpus
from mappers.identity import ModelIdentity
from tests.bench.pairs import PAIRS
from tests.bench.recipe_bench import code, growth
from tests.bench.recipe_bench.aither import Aither
from tests.bench.recipe_bench.candidates import READINGS, Candidate, Group, candidates
from tests.bench.recipe_bench.controls import controls
from tests.bench.recipe_bench.defaults import defaults
from tests.bench.recipe_bench.fitted import Fitted, Models
from tests.bench.recipe_bench.low_rank import low_ranks
from tests.bench.recipe_bench.measure import measure, missing
from tests.bench.recipe_bench.reading import Document, Readings, load, read_pair
from tests.bench.recipe_bench.rejected import rejected
from tests.bench.recipe_bench.results import Result
from tests.bench.recipe_bench.sums import PairSums, collect_sums, corpus_of

WINDOW_TOKENS = 512
progress = Console(stderr=True)


@dataclass(frozen=True)
class Wanted:
    """Which candidates: of these groups (all if none), with one of ``parts`` in their names."""

    parts: tuple[str, ...] = ("",)
    groups: tuple[Group, ...] = tuple(Group)

    def has(self, name: str, group: Group) -> bool:
        return group in self.groups and any(part in name for part in self.parts)


class PairBench:
    """Each part is made when it is first needed, and kept in ``work``."""

    def __init__(self, name: str, work: Path, *, documents: int, windows: int) -> None:
        self.name, self.work, self.documents, self.windows = name, work, documents, windows

    def run(self, wanted: Wanted) -> Iterator[Result]:
        """The results of all candidates that are wanted."""
        chosen = [one for one in self.candidates() if wanted.has(one.name, one.group)]
        unfinished = [one for one in chosen if self.finished(one.name, one.group) is None]
        # All in one pass over the text.
        sums = self.sums(unfinished) if unfinished else None
        for candidate in chosen:
            yield self.result(candidate, sums)
        for k in (4, 8):
            name = f"aither-kvcache k={k}"
            if k <= self.models.geometry.source_layers and wanted.has(name, Group.PUBLISHED):
                yield self.finished(name, Group.PUBLISHED) or self._aither(name, k)
        names = growth.names(self.models.geometry)
        if any(wanted.has(name, Group.GROWTH) for name in names):
            yield from self._grown(names)

    def kept(self, wanted: Wanted) -> list[Result]:
        """What is on disk, whichever code fitted it and however much of it is measured."""
        results = (Result.load(file) for file in self._folder.glob("*.json"))
        found = [one for one in results if wanted.has(one.recipe, Group(one.group))]
        order = {group.value: number for number, group in enumerate(Group)}
        return sorted(found, key=lambda r: (order[r.group], r.flops_per_token, r.recipe))

    def candidates(self) -> list[Candidate]:
        geometry = self.models.geometry
        made = (candidates, defaults, controls, low_ranks, rejected)
        return [candidate for some in made for candidate in some(geometry)]

    def result(self, candidate: Candidate, sums: PairSums | None = None) -> Result:
        """A candidate's result; it is fitted only where something is missing or out of date.

        ``sums``: those that it needs, if they have been collected.
        """
        found = self.finished(candidate.name, candidate.group)
        if found is not None:
            return found
        progress.print(f"{self.name}: {candidate.name}")
        fitted = candidate.fit(self.models, sums or self.sums([candidate]))
        return self.measured(candidate.name, candidate.group, fitted)

    def finished(self, name: str, group: Group) -> Result | None:
        """What is on disk, if today's code fitted it and nothing is missing."""
        file = self._file(name)
        kept = Result.load(file) if file.exists() else None
        if kept is None or kept.code != code.fitting():
            return None
        return None if missing(self.readings, READINGS[group], kept.rows) else kept

    def measured(self, name: str, group: Group, fitted: Fitted) -> Result:
        """Add the rows of all missing documents, saving after each batch."""
        file = self._file(name)
        kept = Result.load(file) if file.exists() else None
        translation = fitted.digest(self.probe)
        same = kept is not None and kept.translation == translation
        result = Result(
            self.name,
            name,
            group.value,
            code.fitting(),
            translation,
            fitted.flops_per_token,
            fitted.nbytes,
            fitted.fit_seconds,
            kept.rows if kept is not None and same else (),
        )
        given = (self.models.target, self.readings, fitted.translate, READINGS[group], result.rows)
        for rows in measure(*given, label=name):
            result = replace(result, rows=(*result.rows, *rows))
            result.save(file)
        result.save(file)
        return result

    @cached_property
    def models(self) -> Models:
        return Models(*PAIRS[self.name].load(self.work))

    @cached_property
    def readings(self) -> Readings:
        folder = self.work / "readings" / self.key
        return read_pair(self.models.source, self.models.target, folder, documents=self.documents)

    @cached_property
    def probe(self) -> Document:
        """The document whose translation says whether two fits are the same."""
        return load(self.readings.files[0])

    @cached_property
    def corpus(self) -> Corpus:
        return self._text(self.windows)

    @cached_property
    def key(self) -> str:
        """Folder name of what depends on both models, to their weights."""
        return f"{self.name}-{_digest(self.models.source.identity, self.models.target.identity)}"

    def sums(self, wanted: Sequence[Candidate]) -> PairSums:
        """What these candidates are fitted from."""
        needs = {part for candidate in wanted for part in candidate.needs}
        return collect_sums(self.models, self.corpus, self.work / "sums" / self._setting, needs)

    def _aither(self, name: str, k: int) -> Result:
        """Measured in its own process."""
        progress.print(f"{self.name}: {name}")
        baseline = Aither(self.work, self._setting, PAIRS[self.name].folders(self.work), k)
        with baseline.fitted(self.models.target, self.corpus) as fitted:
            return self.measured(name, Group.PUBLISHED, fitted)

    def _grown(self, names: Sequence[str]) -> Iterator[Result]:
        """The results of fits on more and more documents."""
        kept = [self.finished(name, Group.GROWTH) for name in names]
        if all(kept):
            yield from (one for one in kept if one is not None)
            return
        for name, fitted in growth.grown(self.models, self._text(max(growth.COUNTS))):
            progress.print(f"{self.name}: {name}")
            yield self.measured(name, Group.GROWTH, fitted)

    def _text(self, windows: int) -> Corpus:
        return corpus_of(self.models.target, windows=windows, window_tokens=WINDOW_TOKENS)

    @property
    def _setting(self) -> str:
        """Folder name of what depends on the calibration text too."""
        return f"{self.key}-{self.windows}x{WINDOW_TOKENS}"

    @property
    def _folder(self) -> Path:
        return self.work / "results" / self._setting

    def _file(self, name: str) -> Path:
        return self._folder / f"{re.sub(r'[^a-z0-9.]+', '-', name.lower())}.json"


def _digest(*identities: ModelIdentity) -> str:
    text = "\n".join(identity.version for identity in identities)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
