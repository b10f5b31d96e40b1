"""Two models over the same tokens -> the sums that every recipe is fitted from.

Windows stream through both models one at a time; what is kept is the statistics and one window's
cache. A checkpoint lets a stopped pass go on where it was, to the same bits.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mappers import hf_compat
from mappers.cache import KVCache, from_hf
from mappers.checkpoint import read_checkpoint, write_checkpoint
from mappers.corpus import Corpus
from mappers.errors import CorpusError
from mappers.identity import check_pair
from mappers.models import LoadedModel as LoadedModel
from mappers.models import ModelSpec as ModelSpec
from mappers.models import load_model as load_model
from mappers.moments import PairMoments
from mappers.parts import Part
from mappers.profile_fit import ProfileBuilder
from mappers.progress import steps
from mappers.rope import Rope, RotaryTable
from mappers.stored import rounded

STATE_FILE = "state.json"
PROFILE_SCHEMA = "profile-1"


@dataclass(frozen=True)
class Checkpoints:
    """Where the pass is saved, how often, and the digest of the plan that it belongs to."""

    folder: Path
    plan_digest: str
    every_windows: int = 25


def collect(
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    moments: PairMoments,
    *,
    stride: int = 4,
    skip_positions: int = 4,
    profile: ProfileBuilder | None = None,
    part: Part | None = None,
    checkpoints: Checkpoints | None = None,
    progress: bool = True,
) -> PairMoments:
    """Add the corpus's windows to ``moments``, or to those of an earlier, stopped pass.

    Of each window the positions ``skip_positions + offset, + stride, ...`` are taken, the offset
    rotating from window to window. ``profile`` sees every source cache, whole; ``part`` says which
    layers the moments are of, all if None. Returns the moments.
    Raises UnsupportedModel when the tokenizers differ, CorpusError when the checkpoint is another
    plan's or another text's.
    """
    check_pair(source.identity, target.identity)
    done = 0
    if checkpoints is not None:
        done, moments = _resume(checkpoints, corpus, moments, profile)
    for index in steps(range(done, len(corpus.windows)), "collecting", show=progress):
        ids = corpus.windows[index]
        rows = sampled_positions(len(ids), index, stride=stride, skip_positions=skip_positions)
        if len(rows):
            pair = aligned(source, target, ids)
            if profile is not None:
                profile.add(ids, pair[0])
            if part is not None:
                pair = part.caches(*pair)
            own, *before = (
                content(cache, source.identity.rope, length=len(ids))
                for cache in lagged(pair[0], rows, moments.lags)
            )
            native = content(pair[1].take(rows), target.identity.rope, length=len(ids))
            moments.add_window(own, native, before)
        last = index + 1 == len(corpus.windows)
        if checkpoints is not None and (last or (index + 1) % checkpoints.every_windows == 0):
            _save(checkpoints, corpus, moments, profile, index + 1)
    return moments


def aligned(source: LoadedModel, target: LoadedModel, ids: Tensor) -> tuple[KVCache, KVCache]:
    """Both models' caches of the token ids [T], from position 0 and without padding.

    The source's is what its users get of it, the target's what the target computes.
    """
    return source_cache(source, ids), cache_of_text(target, ids)


def source_cache(source: LoadedModel, ids: Tensor) -> KVCache:
    """``cache_of_text`` as the source's engine stores it, rounding and all (``rounded``).

    Scales are those of this text.
    """
    return rounded(cache_of_text(source, ids), source.identity.storage)


def cache_of_text(model: LoadedModel, ids: Tensor) -> KVCache:
    """One model's cache of the token ids [T]: keys and values [T, H, D] per layer."""
    last = torch.tensor([len(ids) - 1])
    _, cache = hf_compat.read(model.model, ids[None], logits_at=last)
    return from_hf(cache)


def sampled_positions(tokens: int, window: int, *, stride: int, skip_positions: int) -> Tensor:
    """Which of ``tokens`` positions of window number ``window`` are taken, int64 [n]."""
    return torch.arange(min(tokens, skip_positions + window % stride), tokens, stride)


def sampled_rows(corpus: Corpus, *, stride: int, skip_positions: int) -> int:
    """How many rows a pass over the corpus gives, known before any model runs."""
    return sum(
        len(sampled_positions(len(ids), index, stride=stride, skip_positions=skip_positions))
        for index, ids in enumerate(corpus.windows)
    )


def lagged(cache: KVCache, rows: Tensor, lags: int) -> list[KVCache]:
    """``take`` of the tokens ``rows`` [n], of those before them, and so on: one for each lag from
    0 to ``lags``. What would be before the cache's first token is the first token."""
    return [cache.take((rows - lag).clamp_min(0)) for lag in range(lags + 1)]


def content(cache: KVCache, rope: Rope, *, length: int) -> KVCache:
    """The cache in content space: keys without their rotary embedding; all in float32.

    ``length`` is how many tokens the model read when it computed the cache.
    """
    table = RotaryTable.of(rope, cache.positions, length=length)
    return KVCache(
        tuple(table.strip(keys) for keys in cache.keys),
        tuple(values.float() for values in cache.values),
        cache.positions,
    )


def _resume(
    checkpoints: Checkpoints, corpus: Corpus, fresh: PairMoments, profile: ProfileBuilder | None
) -> tuple[int, PairMoments]:
    state_file = checkpoints.folder / STATE_FILE
    if not state_file.exists():
        return 0, fresh
    state = json.loads(state_file.read_text())
    given = {"plan": checkpoints.plan_digest, "corpus": corpus.digest}
    for key, value in given.items():
        if state[key] != value:
            raise CorpusError(
                f"the checkpoint belongs to another {key}; remove it or choose another work folder"
            )
    if profile is not None:
        tensors, _ = read_checkpoint(checkpoints.folder / state["profile"], PROFILE_SCHEMA)
        profile.restore(tensors)
    return int(state["windows"]), PairMoments.load(checkpoints.folder / state["moments"])


def _save(
    checkpoints: Checkpoints,
    corpus: Corpus,
    moments: PairMoments,
    profile: ProfileBuilder | None,
    done: int,
) -> None:
    """The sums first, the state that vouches for them last, then the sums before are removed."""
    folder = checkpoints.folder
    folder.mkdir(parents=True, exist_ok=True)
    names = {kind: f"{kind}-{done:06d}.safetensors" for kind in ("moments", "profile")}
    moments.save(folder / names["moments"])
    if profile is not None:
        facts = {"schema": PROFILE_SCHEMA}
        write_checkpoint(folder / names["profile"], profile.tensors(), facts)
    state = {
        "plan": checkpoints.plan_digest,
        "corpus": corpus.digest,
        "windows": done,
        **names,
    }
    temporary = folder / f".{STATE_FILE}"
    temporary.write_text(json.dumps(state))
    temporary.rename(folder / STATE_FILE)
    for old in [*folder.glob("moments-*.safetensors"), *folder.glob("profile-*.safetensors")]:
        if old.name not in names.values():
            old.unlink()
