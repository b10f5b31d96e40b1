"""The prefix probe's error against torch's attention; its queries from model to artifact."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mappers import artifact
from mappers.cache import KVCache
from mappers.collect import cache_of_text
from mappers.errors import ArtifactError, LayoutError, UnsupportedModel
from mappers.folder import publish_folder
from mappers.manifest import ManifestFacts
from mappers.models import LoadedModel
from mappers.probe import (
    PROBE_TOKENS,
    QUERIES_PER_HEAD,
    ProbeQueries,
    bytes_at_most,
    probe_error,
    translation_error,
)
from mappers.queries import collect_probe_queries, read_queries
from mappers.tensor_file import pack
from mappers.translate import Translator
from tests.mappers.identities import broken_mapper, identity_mapper
from tests.mappers.pairs import identity, random_cache, rotate

LAYERS, KV_HEADS, DIM, THETA = 3, 2, 8, 50_000.0
TARGET = identity(LAYERS, KV_HEADS, DIM, theta=THETA)
WINDOWS = list(torch.randint(1, 4_000, (6, 80), generator=torch.manual_seed(8)))


def queries(query_heads: int = 6, scale: float = 0.5) -> ProbeQueries:
    shape = (LAYERS, query_heads, QUERIES_PER_HEAD, DIM)
    content = torch.randn(shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    return ProbeQueries(content, scale, TARGET.rope)


def native(tokens: int = PROBE_TOKENS) -> KVCache:
    return random_cache(LAYERS, tokens, KV_HEADS, DIM, seed=1)


def noisy(cache: KVCache, amount: float) -> KVCache:
    noise = random_cache(LAYERS, cache.tokens, KV_HEADS, DIM, seed=2)
    return KVCache(
        tuple(k + amount * n for k, n in zip(cache.keys, noise.keys, strict=True)),
        tuple(v + amount * n for v, n in zip(cache.values, noise.values, strict=True)),
        cache.positions,
    )


def outputs(asked: ProbeQueries, cache: KVCache, layer: int, head: int) -> Tensor:
    """The second route: one head at a time, float64, torch's attention, a rotation by hand."""
    position = torch.tensor([cache.tokens])
    rotated = rotate(asked.content[layer, head].double()[None], position, THETA)[0]
    kv_head = head * KV_HEADS // asked.content.shape[1]
    keys, values = (side[layer][:, kv_head].double() for side in (cache.keys, cache.values))
    return scaled_dot_product_attention(rotated, keys, values, scale=asked.scale)


@pytest.mark.parametrize("query_heads", [2, 6], ids=["MHA", "GQA"])
def test_the_error_is_that_of_torchs_attention_head_by_head(query_heads: int) -> None:
    asked, own, other = queries(query_heads), native(), noisy(native(), 0.3)
    errors = []
    for layer in range(LAYERS):
        for head in range(query_heads):
            right = outputs(asked, own, layer, head)
            wrong = outputs(asked, other, layer, head)
            errors.append(float((wrong - right).norm() / right.norm()))
    assert probe_error(asked, own, other) == pytest.approx(sum(errors) / len(errors), rel=1e-5)


def test_equal_caches_have_no_error_and_noise_adds_to_it() -> None:
    own = native()
    errors = [probe_error(queries(), own, noisy(own, amount)) for amount in (0, 0.01, 0.1, 1)]
    assert errors[0] == 0
    assert errors == sorted(set(errors))


def test_keys_that_are_turned_are_seen_although_their_lengths_stay() -> None:
    own = native()
    rolled = replace(own, keys=tuple(keys.roll(1, 0) for keys in own.keys))
    assert probe_error(queries(), own, rolled) > 0.1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_never_gives_an_error_that_could_pass(value: float) -> None:
    broken = noisy(native(), 0.0)
    broken.values[1][5, 0, 3] = value
    assert not math.isfinite(probe_error(queries(), native(), broken))
    assert not math.isfinite(probe_error(queries(), broken, native()))


def test_a_native_cache_of_zeros_gives_nan() -> None:
    zeros = random_cache(LAYERS, 4, KV_HEADS, DIM)
    for tensor in (*zeros.keys, *zeros.values):
        tensor.zero_()
    assert math.isnan(probe_error(queries(), zeros, zeros))


@pytest.mark.parametrize(
    ("own", "mapped"),
    [
        (native(), native(PROBE_TOKENS - 1)),
        (random_cache(2, 8, KV_HEADS, DIM), random_cache(2, 8, KV_HEADS, DIM)),
        (random_cache(LAYERS, 8, 4, DIM), random_cache(LAYERS, 8, 4, DIM)),
        (random_cache(LAYERS, 8, KV_HEADS, 4), random_cache(LAYERS, 8, KV_HEADS, 4)),
        (native(0), native(0)),
    ],
    ids=["tokens", "layers", "heads", "dim", "none"],
)
def test_caches_of_another_form_are_refused(own: KVCache, mapped: KVCache) -> None:
    with pytest.raises(LayoutError):
        probe_error(queries(), own, mapped)


def test_collected_queries_are_the_models_own_in_content_space(target: LoadedModel) -> None:
    found = collect_probe_queries(target, WINDOWS)
    assert found is not None
    ids, row = WINDOWS[0], len(WINDOWS[0]) - 1
    asked, scale = read_queries(target.model, ids, torch.tensor([row]))
    assert found.content.shape == (3, 4, QUERIES_PER_HEAD, 16)
    assert found.scale == scale
    again = found.at(row)[:, :, 0]
    torch.testing.assert_close(again, torch.stack([q[0] for q in asked]), rtol=2e-2, atol=2e-2)


def test_the_error_of_a_mapper_is_that_of_what_it_does_after_the_first_token(
    target: LoadedModel,
) -> None:
    found = collect_probe_queries(target, WINDOWS)
    assert found is not None
    whole = cache_of_text(target, WINDOWS[0])
    probe = whole.slice(0, PROBE_TOKENS)
    same, broken = (Translator(make(target)) for make in (identity_mapper, broken_mapper))
    assert translation_error(found, same, whole, probe) == pytest.approx(0, abs=1e-5)
    mapped = broken.translate(whole, dtype=torch.float32).slice(0, PROBE_TOKENS)
    for ours, exact in zip(mapped.keys + mapped.values, probe.keys + probe.values, strict=True):
        ours[0] = exact[0]
    wrong = translation_error(found, broken, whole, probe)
    assert wrong == pytest.approx(probe_error(found, probe, mapped))
    assert wrong > 0.1


def test_fewer_windows_give_fewer_queries(target: LoadedModel) -> None:
    found = collect_probe_queries(target, WINDOWS[:1])
    assert found is not None
    assert found.content.shape[2] == 1


def test_a_model_whose_attention_is_hidden_has_no_queries(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.model.config, "_attn_implementation", "eager")
    with pytest.raises(UnsupportedModel):
        read_queries(target.model, WINDOWS[0], torch.tensor([5]))
    assert collect_probe_queries(target, WINDOWS) is None


def test_queries_of_a_large_model_take_a_few_megabytes() -> None:
    content = torch.empty(64, 64, QUERIES_PER_HEAD, 128, dtype=torch.bfloat16)
    large = identity(64, 8, 128)
    assert content.nbytes == 4 << 20
    assert ProbeQueries(content.zero_(), 1.0, large.rope).tensors()["queries"].nbytes < (
        bytes_at_most(large)
    )


def published(root: Path, target: LoadedModel) -> tuple[Path, ProbeQueries]:
    found = collect_probe_queries(target, WINDOWS)
    assert found is not None
    mapper = identity_mapper(target)
    folder = artifact.publish(root, mapper, ManifestFacts(ridge=0.1), probe_queries=found)
    return folder, found


def test_queries_survive_the_artifact_bit_for_bit(tmp_path: Path, target: LoadedModel) -> None:
    folder, given = published(tmp_path, target)
    loaded = artifact.load(folder).probe_queries
    assert loaded is not None
    assert torch.equal(loaded.content, given.content)
    assert (loaded.scale, loaded.rope) == (given.scale, given.rope)
    assert "probe.safetensors" in (folder / "SHA256SUMS").read_text()


def test_an_artifact_without_queries_loads_as_before(tmp_path: Path, target: LoadedModel) -> None:
    folder = artifact.publish(tmp_path, identity_mapper(target), ManifestFacts(ridge=0.1))
    assert artifact.load(folder).probe_queries is None


Spoil = Callable[[dict[str, Tensor]], dict[str, Tensor]]
SPOILT: dict[str, Spoil] = {
    "missing": lambda t: {"queries": t["queries"]},
    "surplus": lambda t: {**t, "more": t["scale"]},
    "dtype": lambda t: {**t, "queries": t["queries"].float()},
    "layers": lambda t: {**t, "queries": t["queries"][:2].clone()},
    "heads": lambda t: {**t, "queries": t["queries"][:, :3].clone()},
    "dim": lambda t: {**t, "queries": t["queries"][..., :8].clone()},
    "none": lambda t: {**t, "queries": t["queries"][:, :, :0].clone()},
    "too many": lambda t: {**t, "queries": t["queries"].repeat(1, 1, 2, 1)},
    "not finite": lambda t: {**t, "queries": t["queries"] * math.inf},
    "no scale": lambda t: {**t, "scale": torch.tensor([0.0])},
    "scale of NaN": lambda t: {**t, "scale": torch.tensor([math.nan])},
    "two scales": lambda t: {**t, "scale": torch.tensor([1.0, 1.0])},
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_queries_of_another_form_are_refused(
    tmp_path: Path, target: LoadedModel, spoil: Spoil
) -> None:
    folder, given = published(tmp_path, target)
    files = {f.name: [f.read_bytes()] for f in folder.iterdir() if f.name != "SHA256SUMS"}
    publish_folder(
        tmp_path, folder.name, {**files, "probe.safetensors": pack(spoil(given.tensors()))}
    )
    with pytest.raises(ArtifactError):
        artifact.load(folder)


def test_damaged_queries_are_refused(tmp_path: Path, target: LoadedModel) -> None:
    folder, _ = published(tmp_path, target)
    file = folder / "probe.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ArtifactError, match="digest"):
        artifact.load(folder)
