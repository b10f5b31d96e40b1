"""The embedded family: its two models, the mappers between them, and text for prompts."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Cache

import mappers.demo
from mappers import corpus
from mappers.arms import CONTINUATION_TOKENS
from mappers.artifact import Artifact, load
from mappers.errors import ArtifactError, CorpusError
from mappers.identity import ModelIdentity
from mappers.models import LoadedModel, ModelSpec, load_model
from mappers.stored import AnyCache
from service.hf import request_for
from service.schemas import TranslateRequest
from service.store import artifact_folders

EMBEDDED = Path(mappers.demo.__file__).parent


@dataclass(frozen=True)
class Direction:
    """One way between the two models; ``domain`` is what the evidence calls the prompts' kind."""

    source: LoadedModel
    target: LoadedModel
    domain: str

    @property
    def label(self) -> str:
        """Such as ``small -> large``."""
        return f"{self.source.identity.model} -> {self.target.identity.model}"

    def request(self, cache: Cache, prompt_ids: Tensor) -> tuple[AnyCache, TranslateRequest]:
        """The source's cache of ``prompt_ids`` [1, T] as the client sends it."""
        sides = {"source": self.source.identity, "target": self.target.identity}
        return request_for(cache, **sides, prompt_ids=prompt_ids, domain=self.domain)


def directions(family: Path) -> list[Direction]:
    """Every mapper of the family, with its models loaded and proven to be the ones it is for.

    Raises ArtifactError when there is none, or one is for other models than those beside it.
    """
    artifacts = [load(folder) for folder in artifact_folders([family / "artifacts"])]
    if not artifacts:
        raise ArtifactError("the family has no mappers; kvt fit makes them")
    # The way up, from the smaller model to the larger, is shown first.
    artifacts.sort(key=lambda artifact: artifact.mapper.source.num_layers)
    pairs = [(artifact.mapper.source, artifact.mapper.target) for artifact in artifacts]
    sides = {side.model: side for pair in pairs for side in pair}
    loaded = {name: _load(family, side) for name, side in sides.items()}
    return [
        Direction(loaded[source.model], loaded[target.model], _domain(artifact))
        for (source, target), artifact in zip(pairs, artifacts, strict=True)
    ]


def prompts(family: Path, direction: Direction, *, tokens: int, count: int) -> list[Tensor]:
    """Held-out token ids, int64 [tokens + 32] each: a prompt and the text's own continuation.

    One text of each document that has two or more, and not the one that the evidence was measured
    on. Raises CorpusError when there is none.
    """
    documents = corpus.read([family / "text" / "held_out.jsonl"])
    by_name: dict[str, list[corpus.Document]] = {}
    for document in documents:
        by_name.setdefault(document.name, []).append(document)
    # The evidence takes the text with the smallest digest of each document.
    spare = [max(d, key=lambda each: each.digest) for d in by_name.values() if len(d) > 1]
    spare.sort(key=lambda document: document.digest)
    whole = tokens + CONTINUATION_TOKENS
    encoded = (direction.target.tokenizer(d.text, verbose=False)["input_ids"] for d in spare)
    found = [torch.tensor(ids[:whole]) for ids in encoded if len(ids) >= whole][:count]
    if not found:
        raise CorpusError(f"no held-out text has {whole} tokens")
    return found


def _domain(artifact: Artifact) -> str:
    """The first domain of the evidence: the one of the held-out text."""
    if artifact.evidence is None:
        raise ArtifactError("a mapper of the family has no evidence; kvt evaluate adds it")
    return next(iter(artifact.evidence.corpora))


def _load(family: Path, side: ModelIdentity) -> LoadedModel:
    spec = ModelSpec(path=str(family / side.model), name=side.model, dtype=side.dtype)
    loaded = load_model(spec)
    if loaded.identity != side:
        raise ArtifactError(f"the mappers are not for the {side.model} model beside them")
    return loaded
