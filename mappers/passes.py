"""The passes of a fit over its calibration text, and where they are kept: windows in, sums out."""

import hashlib
import json
from pathlib import Path

from mappers.collect import PROFILE_SCHEMA, Checkpoints, collect, sampled_rows
from mappers.corpus import Corpus, calibration, read
from mappers.errors import TooFewData
from mappers.geometry import Geometry
from mappers.models import LoadedModel
from mappers.moments import PairMoments
from mappers.plan import FitPlan
from mappers.profile_fit import ProfileBuilder
from mappers.recipes import RECIPES
from mappers.second_pass import WeightedSums, collect_weighted
from mappers.selection import Selection


def calibration_windows(plan: FitPlan, target: LoadedModel) -> Corpus:
    """The windows that a plan asks for. Raises CorpusError where the text has none."""
    return calibration(
        read(plan.calibration),
        target.tokenizer,
        window_tokens=plan.window_tokens,
        windows=plan.windows,
    )


def require_rows(plan: FitPlan, corpus: Corpus, geometry: Geometry) -> None:
    """Raise TooFewData, before any model runs, unless there are more rows than a map has inputs."""
    inputs = RECIPES[plan.recipe].weight_shape(geometry, plan.k)[0]
    rows = sampled_rows(corpus, stride=plan.stride, skip_positions=plan.skip_positions)
    if rows <= inputs:
        raise TooFewData(
            f"{len(corpus.windows)} windows give {rows} rows, a map of {inputs} inputs needs more; "
            "give more text or windows, or a smaller k or stride"
        )


def empty_sums(plan: FitPlan, source: LoadedModel, target: LoadedModel) -> PairMoments:
    """Of the structure and the lags that the plan's recipe is fitted from."""
    geometry = Geometry.of(source.identity, target.identity)
    return PairMoments(geometry, RECIPES[plan.recipe].structure, sums_lags(plan))


def first_pass(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    sums: PairMoments,
    profile: ProfileBuilder,
    *,
    part: str = "",
    progress: bool = True,
) -> PairMoments:
    """Add the windows of ``corpus`` to ``sums``; ``part`` names which of the plan's they are."""
    return collect(
        source,
        target,
        corpus,
        sums,
        stride=plan.stride,
        skip_positions=plan.skip_positions,
        profile=profile,
        checkpoints=_checkpoints(plan, source, target, part),
        progress=progress,
    )


def second_pass(
    plan: FitPlan,
    source: LoadedModel,
    target: LoadedModel,
    corpus: Corpus,
    selection: Selection,
    *,
    progress: bool = True,
) -> WeightedSums | None:
    """The weighted sums of just what is read, where the plan weighs its rows."""
    if plan.row_weights == "none":
        return None
    geometry = Geometry.of(source.identity, target.identity)
    sums = WeightedSums(geometry, RECIPES[plan.recipe], selection.reads)
    rows = {"stride": plan.stride, "skip_positions": plan.skip_positions}
    return collect_weighted(source, target, corpus, sums, **rows, progress=progress)


def work_folder(plan: FitPlan, source: LoadedModel, target: LoadedModel) -> Path:
    """Where a fit keeps what it would need to go on."""
    return _checkpoints(plan, source, target).folder


def _checkpoints(
    plan: FitPlan, source: LoadedModel, target: LoadedModel, part: str = ""
) -> Checkpoints:
    """A folder for each head structure and number of lags, whose sums are of another shape, and in
    it one for each part of the windows."""
    structure, lags = RECIPES[plan.recipe].structure, sums_lags(plan)
    sides = (side.identity.model_dump(mode="json") for side in (source, target))
    decisive = [*sides, structure, lags, plan.stride, plan.skip_positions, PROFILE_SCHEMA]
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
    own = plan.root / f".fit-{digest[:12]}"
    name = f"{structure}-lags-{lags}" if lags else structure
    return Checkpoints((plan.work / name if plan.work else own) / part, digest)


def sums_lags(plan: FitPlan) -> int:
    """How many tokens back the sums reach: only single heads are read there."""
    return plan.lags if RECIPES[plan.recipe].structure == "joint" else 0
