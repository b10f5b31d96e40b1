"""manifest.json: what a mapper on disk is, for which pair, and where it comes from."""

import hashlib
import json
import platform
import re
from importlib.metadata import version
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, Strict, model_validator

from mappers.identity import ModelIdentity, check_pair

# Outer index source layer, inner index target layer; R2 is at most 1 and may be negative.
# Lists are accepted too, since that is what a tensor's ``tolist`` gives.
_Row = Annotated[tuple[float, ...], Strict(False)]
Matrix = Annotated[tuple[_Row, ...], Strict(False)]
Size = Annotated[int, Field(ge=0)]
WeightsDtype = Literal["float32", "bfloat16"]

_LIBRARIES = ("numpy", "safetensors", "tokenizers", "torch", "transformers")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Calibration(_Frozen):
    """The text that a mapper was fitted on: rows are the tokens whose KV entered the fit.

    ``document_digests`` are the first 16 hex digits of each document's, so that evidence is never
    measured on one of them; None in artifacts that are older than the field.
    """

    corpus_digest: str
    documents: Size
    tokens: Size
    rows: Size
    document_digests: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")], ...] | None = None


class Candidate(_Frozen):
    """One way to spend a budget, what it costs, and what it gave on windows held out of its fit:
    the mean KL at native tails of 1 and of 32 tokens, nats per token."""

    recipe: str
    k: Size
    lags: Size
    share: Literal["head", "layer"]
    spread: Size
    flops_per_token: Size
    kl_tail_1: Annotated[float, Field(ge=0)]
    kl_tail_32: Annotated[float, Field(ge=0)]


class Choice(_Frozen):
    """How a recipe was chosen under a budget of ``flops_per_token``: the candidates, best first.

    The mapper is the first of them, fitted once more on all windows, the held-out ones as well.
    """

    budget: Literal["paper", "half", "quarter", "eighth"]
    flops_per_token: Size
    held_out_windows: Size
    candidates: Annotated[tuple[Candidate, ...], Field(min_length=1)]


class ManifestFacts(_Frozen):
    """What only the fit knows and the mapper's tensors do not show.

    ``ridge`` is lambda relative to the mean diagonal of the inputs' Gram matrix (of an imported
    mapper: whatever number its format stated). ``r2_keys`` and
    ``r2_values`` are ``[L_s][L_t]``: how well each source layer alone predicts each target layer.
    None where a mapper was not fitted here. ``row_weights``: as in ``FitPlan``.
    ``choice``: what else was tried, where a budget chose the recipe. ``distill_steps``: of training
    after the fit, which no version does any more but older artifacts name.
    """

    ridge: Annotated[float, Field(ge=0)]
    r2_keys: Matrix | None = None
    r2_values: Matrix | None = None
    calibration: Calibration | None = None
    row_weights: Literal["none", "attention"] = "none"
    distill_steps: Size = 0
    choice: Choice | None = None
    bundle_version: Annotated[int, Field(ge=1)] = 1


class _HeadReads(_Frozen):
    keys: tuple[tuple[Size, ...], ...]
    values: tuple[tuple[Size, ...], ...]


class Manifest(ManifestFacts):
    """The whole of ``manifest.json``.

    ``sources`` are, per target layer, the source layers that it reads, ascending; ``heads`` the
    single heads, in recipes that choose them (``mappers.mapper.Heads``). ``key_norm``: mapped keys
    are put back on the target's norm, whose weights are there. ``weight_bytes``
    and ``prefix_bytes`` are the tensors' bytes in the two tensor files, headers not counted;
    ``flops_per_token`` counts a multiply-add as two. Raises ``ValidationError`` when the parts do
    not fit together.
    """

    schema_version: Literal[1] = 1
    mapper_id: str
    source: ModelIdentity
    target: ModelIdentity
    recipe: str
    sources: tuple[tuple[Size, ...], ...]
    heads: tuple[_HeadReads, ...] | None = None
    key_norm: bool = False
    skipped_positions: Size
    weights_dtype: WeightsDtype
    weight_bytes: Size
    prefix_bytes: Size
    flops_per_token: Size
    libraries: dict[str, str]
    created_at: AwareDatetime

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_pair(self.source, self.target)
        expected = mapper_id(self.source, self.target, self.recipe, self.bundle_version)
        if self.mapper_id != expected:
            raise ValueError("mapper_id: not the one that these identities and recipe have")
        if len(self.sources) != self.target.num_layers:
            raise ValueError("sources: expected one entry for each target layer")
        if self.heads is not None and len(self.heads) != self.target.num_layers:
            raise ValueError("heads: expected one entry for each target layer")
        for matrix in (self.r2_keys, self.r2_values):
            if matrix is not None and not _has_shape(matrix, self.source, self.target):
                raise ValueError("r2: expected [source layers][target layers]")
        return self


def mapper_id(
    source: ModelIdentity, target: ModelIdentity, recipe: str, bundle_version: int = 1
) -> str:
    """A name that is safe as a path component: readable words, then 12 hex digits that decide.

    The digits are of the SHA-256 of both identities, the recipe and the bundle version: what asks
    for a pair finds it by them. What else decides a fit (k, lags, text) is not among them, so that
    another fit of the same recipe is a new version of the same mapper.
    """
    sides = [side.model_dump(mode="json") for side in (source, target)]
    decisive = json.dumps([*sides, recipe, bundle_version], sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(decisive.encode()).hexdigest()[:12]
    words = (_slug(source.model), "to", _slug(target.model), _slug(recipe), f"b{bundle_version}")
    return "-".join((*words, digest))


def library_versions() -> dict[str, str]:
    """Versions of what the numbers depend on, by package name, and of Python."""
    return {"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}}


def _slug(name: str) -> str:
    last = name.rstrip("/").rpartition("/")[2]
    words = re.sub(r"[^a-z0-9._]+", "-", last.lower()).strip("-._")
    return words[:40].rstrip("-._") or "model"


def _has_shape(matrix: Matrix, source: ModelIdentity, target: ModelIdentity) -> bool:
    return len(matrix) == source.num_layers and all(len(row) == target.num_layers for row in matrix)
