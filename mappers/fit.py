"""Fit a mapper and measure it, in one call: text and two models in, an artifact out.

texts -> windows -> both models -> sums -> source layers -> maps -> exact prefixes -> artifact
-> every arm on held-out text -> evidence and report into the artifact
"""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from mappers import artifact
from mappers.budget import as_reads, choose
from mappers.corpus import Corpus, refuse_overlap
from mappers.evaluate import evaluate, evaluation_texts, require_documents
from mappers.first_tokens import exact_prefixes, prefix_ids
from mappers.fit_in_parts import fit_in_parts, shares_needed
from mappers.geometry import Geometry
from mappers.identity import check_pair
from mappers.manifest import Calibration, Choice, ManifestFacts
from mappers.mapper import Mapper
from mappers.models import LoadedModel, load_model
from mappers.moments import PairMoments
from mappers.passes import (
    calibration_windows,
    empty_sums,
    first_pass,
    require_rows,
    second_pass,
    work_folder,
)
from mappers.plan import FitPlan
from mappers.profile_fit import ProfileBuilder
from mappers.queries import collect_probe_queries
from mappers.report import render
from mappers.selection import Selection, layer_r2, select
from mappers.sensitivity import weigher
from mappers.solving import mapper_of, solved_mapper
from mappers.sums_memory import Shares


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
    geometry = Geometry.of(source.identity, target.identity)
    shares = shares_needed(as_reads(plan, geometry), geometry)
    corpus = calibration_windows(plan, target)
    require_rows(as_reads(plan, geometry), corpus, geometry)
    texts = evaluation_texts(
        plan.evaluation, source, target, lengths=plan.lengths, documents=plan.documents
    )
    for held_out in texts.values():
        refuse_overlap(corpus.document_digests, held_out)
    if plan.alpha is not None:
        require_documents(texts, plan.lengths, alpha=plan.alpha, delta=plan.delta)
    work = work_folder(as_reads(plan, geometry), source, target)
    profile = ProfileBuilder(
        source.identity, windows=len(corpus.windows), skip_positions=plan.skip_positions
    )
    fitted = _at_once if shares is None else partial(_in_parts, shares=shares)
    mapper, facts = fitted(plan, source, target, corpus, profile, progress=progress)
    folder = artifact.publish(
        plan.root,
        mapper,
        facts,
        profile=profile.profile(),
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
            work=work / "evaluation",
            progress=progress,
        )
        folder = artifact.add_evidence(folder, evidence, render(loaded.manifest, evidence))
        shutil.rmtree(work / "evaluation", ignore_errors=True)
    if plan.work is None:
        shutil.rmtree(work)
    return folder


def _at_once(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    profile: ProfileBuilder,
    *,
    progress: bool,
) -> tuple[Mapper, ManifestFacts]:
    if plan.budget is not None:
        plan, reads, moments, choice = choose(
            plan, plan.budget, source, target, corpus, profile, progress=progress
        )
        selection = Selection(*layer_r2(moments, plan.ridge), reads)
    else:
        empty, choice = empty_sums(plan, source, target), None
        moments = first_pass(plan, source, target, corpus, empty, profile, progress=progress)
        selection = _selected(plan, source, target, corpus, moments, progress)
    mapper = make_mapper(plan, source, target, corpus, moments, selection, progress=progress)
    return mapper, manifest_facts(plan, corpus, moments.count, selection, choice)


def _selected(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    moments: PairMoments,
    progress: bool,
) -> Selection:
    return select(
        moments,
        plan.k,
        plan.ridge,
        method=plan.selection,
        share=plan.share,
        spread=plan.spread,
        weigh=weigher(plan, source, target, corpus, moments, progress=progress),
    )


def _in_parts(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    profile: ProfileBuilder,
    shares: Shares,
    *,
    progress: bool,
) -> tuple[Mapper, ManifestFacts]:
    """A budget buys one choice a target layer, as many reads for each: to let candidates compete
    would take the passes of each."""
    plan = as_reads(plan, Geometry.of(source.identity, target.identity))
    parts = fit_in_parts(plan, source, target, corpus, profile, shares, progress=progress)
    mapper = mapper_of(plan, source, target, corpus, parts.layers)
    mapper = with_prefixes(plan, target, corpus, mapper)
    return mapper, manifest_facts(plan, corpus, parts.rows, parts.selection)


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
    weighted = second_pass(plan, source, target, corpus, selection, progress=progress)
    mapper = solved_mapper(
        plan, source, target, corpus, moments, selection.reads, weighted=weighted, progress=progress
    )
    return with_prefixes(plan, target, corpus, mapper)


def with_prefixes(plan: FitPlan, target: LoadedModel, corpus: Corpus, mapper: Mapper) -> Mapper:
    """The mapper with the prefixes that the plan and the corpus make exact."""
    known = prefix_ids(target, corpus, first_tokens=plan.first_tokens, texts=plan.known_texts)
    return replace(mapper, prefixes=exact_prefixes(target, known))


def manifest_facts(
    plan: FitPlan,
    corpus: Corpus,
    rows: int,
    selection: Selection,
    choice: Choice | None = None,
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
            rows=rows,
            document_digests=tuple(sorted(corpus.document_digests)),
        ),
        row_weights=plan.row_weights,
        choice=choice,
    )


def _matrix(r2: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(f"{cell:.6g}") for cell in row) for row in r2.tolist())
