"""Fit a mapper and measure it, in one call: text and two models in, an artifact out.

texts -> windows -> both models -> sums -> source layers -> maps -> exact prefixes -> artifact
-> every arm on held-out text -> evidence and report into the artifact
"""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from mappers import artifact
from mappers.cache import DTYPES
from mappers.collect import (
    PROFILE_SCHEMA,
    Checkpoints,
    cache_of_text,
    collect,
    content,
    sampled_rows,
)
from mappers.corpus import Corpus, calibration, read, refuse_overlap
from mappers.distill import Schedule, distill
from mappers.errors import TooFewData
from mappers.evaluate import evaluate, evaluation_texts, require_documents
from mappers.first_tokens import exact_prefixes, prefix_ids
from mappers.geometry import Geometry
from mappers.identity import check_pair
from mappers.key_norm import norm_weights
from mappers.manifest import Calibration, ManifestFacts
from mappers.mapper import LayerMap, Mapper
from mappers.models import LoadedModel, load_model
from mappers.moments import PairMoments
from mappers.plan import FitPlan
from mappers.profile_fit import ProfileBuilder
from mappers.progress import steps
from mappers.queries import collect_probe_queries
from mappers.recipes import RECIPES, sums_of
from mappers.report import render
from mappers.second_pass import WeightedSums, collect_weighted
from mappers.selection import Selection, select


def fit(plan: FitPlan, *, progress: bool = True) -> Path:
    """Carry out ``plan``; returns the artifact's folder, which holds its evidence and report.

    Raises TooFewData, before any model runs over text, when the windows cannot give enough rows;
    CorpusError for unusable or overlapping texts; UnsupportedModel for a pair that cannot be
    translated.
    """
    source = load_model(plan.source, device=plan.device)
    target = load_model(plan.target, device=plan.device)
    return fit_pair(plan, source, target, progress=progress)


def fit_pair(
    plan: FitPlan, source: LoadedModel, target: LoadedModel, *, progress: bool = True
) -> Path:
    """``fit`` for models that are loaded already; ``plan.source`` and ``.target`` are not read."""
    check_pair(source.identity, target.identity)
    corpus = _calibration(plan, source, target)
    texts = evaluation_texts(
        plan.evaluation, source, target, lengths=plan.lengths, documents=plan.documents
    )
    for held_out in texts.values():
        refuse_overlap(corpus.document_digests, held_out)
    if plan.alpha is not None:
        require_documents(texts, plan.lengths, alpha=plan.alpha, delta=plan.delta)
    builder = ProfileBuilder(
        source.identity, windows=len(corpus.windows), skip_positions=plan.skip_positions
    )
    moments = _moments(plan, source, target, corpus, builder, progress)
    selection = select(
        moments,
        plan.k,
        plan.ridge,
        method=plan.selection,
        uneven=plan.uneven,
        share=plan.share,
    )
    mapper = make_mapper(plan, source, target, corpus, moments, selection, progress=progress)
    facts = manifest_facts(plan, corpus, moments, selection)
    folder = artifact.publish(
        plan.root,
        mapper,
        facts,
        profile=builder.profile(),
        probe_queries=collect_probe_queries(target, corpus.windows),
    )
    if texts:
        # From the disk, so that what is measured is what will be served.
        loaded = artifact.load(folder)
        evidence = evaluate(
            loaded.mapper,
            source,
            target,
            texts,
            profile=loaded.profile,
            probe_queries=loaded.probe_queries,
            lengths=plan.lengths,
            native_tails=plan.native_tails,
            work=_checkpoints(plan, source, target).folder / "evaluation",
            progress=progress,
        )
        folder = artifact.add_evidence(folder, evidence, render(loaded.manifest, evidence))
        shutil.rmtree(_checkpoints(plan, source, target).folder / "evaluation", ignore_errors=True)
    if plan.work is None:
        shutil.rmtree(_checkpoints(plan, source, target).folder)
    return folder


def make_mapper(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    moments: PairMoments,
    selection: Selection,
    *,
    progress: bool = True,
) -> Mapper:
    """Solve every target layer from the sums, and look up the exact prefixes."""
    weighted = _weighted(plan, source, target, corpus, selection, progress)
    layers = tuple(
        _solve(plan, moments, selection, weighted, layer)
        for layer in steps(range(target.identity.num_layers), "solving", show=progress)
    )
    known = prefix_ids(target, corpus, first_tokens=plan.first_tokens, texts=plan.known_texts)
    if plan.key_norm and target.identity.k_norm:
        layers = with_key_norms(layers, target, corpus)
    mapper = Mapper(
        source=source.identity,
        target=target.identity,
        recipe=plan.recipe,
        layers=layers,
        prefixes=exact_prefixes(target, known),
        skipped_positions=plan.skip_positions,
    )
    if not plan.distill_steps:
        return mapper
    schedule = Schedule(steps=plan.distill_steps)
    state = _distill_state(plan, source, target)
    return distill(mapper, source, target, corpus, schedule, checkpoint=state, progress=progress)


def with_key_norms(
    layers: tuple[LayerMap, ...], target: LoadedModel, corpus: Corpus
) -> tuple[LayerMap, ...]:
    """The same layers with the norms that the target's keys are found to pass, if all do."""
    longest = max(corpus.windows, key=len)
    keys = content(cache_of_text(target, longest), target.identity.rope, length=len(longest)).keys
    norms = [norm_weights(layer) for layer in keys]
    if any(norm is None for norm in norms):
        return layers
    return tuple(replace(layer, key_norm=norm) for layer, norm in zip(layers, norms, strict=True))


def _solve(
    plan: FitPlan,
    moments: PairMoments,
    selection: Selection,
    weighted: WeightedSums | None,
    layer: int,
) -> LayerMap:
    recipe, reads = RECIPES[plan.recipe], selection.reads[layer]
    sums = sums_of(recipe, moments, layer, reads)
    if weighted is not None:
        sums = weighted.with_plain(layer, sums)
    dtype = DTYPES[plan.weights_dtype]
    return recipe.solve(sums, reads, moments.geometry, plan.ridge, dtype=dtype)


def _weighted(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    selection: Selection,
    progress: bool,
) -> WeightedSums | None:
    if plan.row_weights == "none":
        return None
    geometry = Geometry.of(source.identity, target.identity)
    sums = WeightedSums(geometry, RECIPES[plan.recipe], selection.reads)
    rows = {"stride": plan.stride, "skip_positions": plan.skip_positions}
    return collect_weighted(source, target, corpus, sums, **rows, progress=progress)


def _calibration(plan: FitPlan, source: LoadedModel, target: LoadedModel) -> Corpus:
    corpus = calibration(
        read(plan.calibration),
        target.tokenizer,
        window_tokens=plan.window_tokens,
        windows=plan.windows,
    )
    geometry = Geometry.of(source.identity, target.identity)
    inputs = RECIPES[plan.recipe].weight_shape(geometry, plan.k)[0]
    rows = sampled_rows(corpus, stride=plan.stride, skip_positions=plan.skip_positions)
    if rows <= inputs:
        raise TooFewData(
            f"{len(corpus.windows)} windows give {rows} rows, a map of {inputs} inputs needs more; "
            "give more text or windows, or a smaller k or stride"
        )
    return corpus


def _moments(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    profile: ProfileBuilder,
    progress: bool,
) -> PairMoments:
    geometry = Geometry.of(source.identity, target.identity)
    empty = PairMoments(geometry, RECIPES[plan.recipe].structure, _lags(plan))
    return collect(
        source,
        target,
        corpus,
        empty,
        stride=plan.stride,
        skip_positions=plan.skip_positions,
        profile=profile,
        checkpoints=_checkpoints(plan, source, target),
        progress=progress,
    )


def _checkpoints(plan: FitPlan, source: LoadedModel, target: LoadedModel) -> Checkpoints:
    """A folder for each head structure and number of lags, whose sums are of another shape."""
    structure, lags = RECIPES[plan.recipe].structure, _lags(plan)
    sides = (side.identity.model_dump(mode="json") for side in (source, target))
    decisive = [*sides, structure, lags, plan.stride, plan.skip_positions, PROFILE_SCHEMA]
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
    own = plan.root / f".fit-{digest[:12]}"
    name = f"{structure}-lags-{lags}" if lags else structure
    return Checkpoints(plan.work / name if plan.work else own, digest)


def _lags(plan: FitPlan) -> int:
    """How many tokens back the sums reach: only single heads are read there."""
    return plan.lags if RECIPES[plan.recipe].structure == "joint" else 0


def _distill_state(plan: FitPlan, source: LoadedModel, target: LoadedModel) -> Path:
    """Where the training of just this plan goes on."""
    digest = hashlib.sha256(plan.model_dump_json(exclude={"evaluation", "root"}).encode())
    folder = _checkpoints(plan, source, target).folder
    return folder / f"distill-{digest.hexdigest()[:12]}.safetensors"


def manifest_facts(
    plan: FitPlan, corpus: Corpus, moments: PairMoments, selection: Selection
) -> ManifestFacts:
    """What the manifest says of a fit beside what the mapper itself shows."""
    return ManifestFacts(
        ridge=plan.ridge,
        r2_keys=_matrix(selection.r2_keys),
        r2_values=_matrix(selection.r2_values),
        calibration=Calibration(
            corpus_digest=corpus.digest,
            documents=len(corpus.document_digests),
            tokens=corpus.tokens,
            rows=moments.count,
            document_digests=tuple(sorted(corpus.document_digests)),
        ),
        row_weights=plan.row_weights,
        distill_steps=plan.distill_steps,
    )


def _matrix(r2: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(f"{cell:.6g}") for cell in row) for row in r2.tolist())
