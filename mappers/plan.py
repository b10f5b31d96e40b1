"""What a fit is given: two models, texts, a recipe and where the result goes."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from mappers.head_selection import Share
from mappers.mapper import LAGS_AT_MOST
from mappers.models import ModelSpec
from mappers.recipes import RECIPES
from mappers.selection import Method

Budget = Literal["paper", "half", "quarter", "eighth"]
Count = Annotated[int, Field(ge=1)]
Paths = tuple[Path, ...]
CHOSEN_FOR_HEADS = {"lags", "share", "spread"}
CHOSEN_FOR_LAYERS = {"selection"}
CHOSEN_BY_BUDGET = {"recipe", "selection", "share", "spread"}


class FitPlan(BaseModel):
    """All that decides a fit.

    ``k`` source layers a target layer, or source heads a target head where the recipe chooses
    heads, found by ``selection`` (``mappers.selection``). Of a recipe that chooses heads: ``lags``,
    how many tokens back heads may be read, ``share``, whether all heads of a target layer read the
    same, and ``spread``: where errors cost more KL, a layer may read up to so many times k, at the
    cost of others (``mappers.sensitivity``). A ``budget`` chooses all of these by what is best at
    the operations of ``full_head`` with ``k``, or a part of them (``mappers.budget``).
    ``row_weights`` by the target's attention (``mappers.row_weights``) take a second pass over the
    text. ``key_norm`` puts mapped keys back on the target's norm where it has one
    (``mappers.key_norm``). ``ridge`` is relative to the mean diagonal of the inputs' Gram matrix,
    source layer by source layer. ``windows`` calibration windows of ``window_tokens`` tokens, of
    which every ``stride``-th row is taken and none of the first ``skip_positions``. ``evaluation``
    names the texts of each domain; ``documents`` of each are measured at prompts of ``lengths``
    tokens (those that both models and the document allow) with each of ``native_tails``. Documents
    too few to certify a share ``alpha`` with confidence 1 - ``delta`` are found before anything is
    fitted, unless alpha is None; its default is what the service asks of evidence. The table of
    exact prefixes holds what the tokenizer puts in front of a text (or, if that is nothing, the
    ``first_tokens`` most frequent first tokens) and ``known_texts``, such as the opening of a chat
    template. ``work`` keeps the sums, so that a stopped fit resumes and another ``k`` or ``ridge``
    needs no second pass; without it they are beside the artifact until it is done. Sums that take
    more than ``sums_memory`` are never held at once (``mappers.fit_in_parts``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: ModelSpec
    target: ModelSpec
    calibration: Annotated[Paths, Field(min_length=1)]
    evaluation: dict[str, Paths] = {}
    root: Path
    work: Path | None = None
    device: str = "cpu"
    budget: Budget | None = None
    recipe: str = "full_head"
    k: Count = 4
    selection: Method = "top"
    lags: Annotated[int, Field(ge=0, le=LAGS_AT_MOST)] = 1
    share: Share = "layer"
    spread: Count = 1
    row_weights: Literal["none", "attention"] = "none"
    key_norm: bool = True
    ridge: Annotated[float, Field(gt=0)] = 1e-4
    weights_dtype: Literal["float32", "bfloat16"] = "float32"
    sums_memory: Annotated[ByteSize, Field(ge=1)] = ByteSize(16 * 2**30)
    windows: Count = 200
    window_tokens: Annotated[int, Field(ge=16)] = 1024
    stride: Count = 4
    skip_positions: Annotated[int, Field(ge=0)] = 4
    documents: Count = 64
    lengths: tuple[Count, ...] = (128, 256, 512, 1024)
    native_tails: tuple[Count, ...] = (1, 32, 128, 512)
    alpha: Annotated[float, Field(gt=0, lt=1)] | None = 0.1
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.05
    first_tokens: Annotated[int, Field(ge=0)] = 256
    known_texts: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _known_recipe(self) -> Self:
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe: expected one of {sorted(RECIPES)}")
        return self

    @model_validator(mode="after")
    def _chosen_once(self) -> Self:
        named = sorted(self.model_fields_set & CHOSEN_BY_BUDGET)
        if self.budget is not None and named:
            raise ValueError(
                f"the budget chooses {', '.join(named)}; to do so, name a recipe and no budget"
            )
        if self.budget is not None and self.row_weights != "none":
            # Candidates are judged without weights, so what is published would be another map.
            raise ValueError("a budget fits rows without weights; name a recipe and no budget")
        return self

    @model_validator(mode="after")
    def _of_this_recipe(self) -> Self:
        """An option that would change nothing was meant for another recipe."""
        heads = RECIPES[self.recipe].structure == "joint"
        named = sorted(self.model_fields_set & (CHOSEN_FOR_LAYERS if heads else CHOSEN_FOR_HEADS))
        if self.budget is None and named:
            what = "layers" if heads else "heads"
            raise ValueError(f"{named[0]}: {self.recipe} does not choose {what}")
        return self
