"""What an evaluation works with: two models, a translator, and how much is to be measured."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from mappers.arms import Reading, read_document
from mappers.cache import KVCache
from mappers.hops import Pair
from mappers.models import LoadedModel
from mappers.prefixes import ExactPrefixes
from mappers.probe import ProbeQueries
from mappers.translate import Translator


@dataclass(frozen=True)
class Depth:
    """How much is measured beside the arms.

    Of each domain's first ``documents``: greedy continuations, layers, the layer curve and drift
    over at most ``turns`` turns. Of all documents: up to ``hops`` earlier translations. Hops and
    drift need the mapper of the reverse pair.
    """

    documents: int = 8
    hops: int = 2
    turns: int = 6


@dataclass(frozen=True)
class Bench:
    """The models, what translates between them, and what is to be measured.

    ``rounded`` is the target with weights of 8 bits. ``score`` tells how unfamiliar a source cache
    is, if anything can; without ``probe_queries`` there are no rows with a probe.
    """

    source: LoadedModel
    target: LoadedModel
    translator: Translator
    prefixes: ExactPrefixes
    rounded: PreTrainedModel
    pair: Pair | None
    score: Callable[[KVCache], float | None]
    probe_queries: ProbeQueries | None
    lengths: tuple[int, ...]
    native_tails: tuple[int, ...]
    depth: Depth

    def read(self, ids: Tensor, lengths: tuple[int, ...]) -> Reading:
        """One document through both models and the translator, for prompts of these lengths."""
        models = (self.source, self.target, self.translator, self.prefixes)
        return read_document(*models, ids, lengths)
