"""What a fit gives, whoever made it: a translation, and what it costs."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mappers.cache import KVCache
from mappers.geometry import Geometry
from mappers.mapper import Mapper
from mappers.models import LoadedModel
from mappers.recipes import flops_per_token
from mappers.translate import Translator
from tests.bench.recipe_bench.reading import Document

Translate = Callable[[Document], KVCache]
"""The target's cache of all of a document's prompt tokens, the first of them mapped as well."""


@dataclass(frozen=True)
class Models:
    source: LoadedModel
    target: LoadedModel

    @property
    def geometry(self) -> Geometry:
        return Geometry.of(self.source.identity, self.target.identity)


@dataclass(frozen=True)
class Fitted:
    """``fit_seconds`` are CPU seconds from text to weights, ``nbytes`` those of the weights."""

    translate: Translate
    flops_per_token: int
    nbytes: int
    fit_seconds: float

    def digest(self, document: Document) -> str:
        """Of a document's translation to the last bit: another fit or another translator differs.

        The number of threads may change it too.
        """
        cache = self.translate(document)
        found = hashlib.sha256()
        for tensor in (*cache.keys, *cache.values):
            found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]


def of_mapper(mapper: Mapper, fit_seconds: float) -> Fitted:
    """A mapper as the product applies it."""
    translator = Translator(mapper)

    def translate(document: Document) -> KVCache:
        return translator.translate(document.source, dtype=torch.float32)

    return Fitted(translate, flops_per_token(mapper), mapper.nbytes, fit_seconds)
