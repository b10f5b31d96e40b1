"""What a caller may post about an answer that it was asked to measure, as one number.

Either the KL itself, in nats a token: the mean over positions of KL(native || translated), as in
``mappers/evidence.py``; or, for each position, what an inference server gives away: the most likely
tokens with their log-probabilities, over the native cache and over the translated one.

From such lists the KL is not known, but the smallest that fits them is. Both distributions are
lumped into the same few events: each token that both lists name, the tokens T that only the
translated list names, everything else. Lumping never raises a KL (data processing inequality), so
the KL of the lumped ones is a lower bound. All their masses are known but the native one of T,
which is at most what the native list leaves over; the value that makes the KL smallest is taken.
Without T, two lists that share no token would look alike. A violation found so is one for certain;
what is missed can keep a breaker from opening, and is never counted towards closing one.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    model_validator,
)

from service.errors import Problem
from service.schemas import Receipt

MAX_FEEDBACK_BYTES = 512 * 1024
MAX_POSITIONS = 256
# What rounding may do to a sum of probabilities.
ROUNDING = 1e-6
# How far a list may exceed 1, for servers that round.
SURPLUS = 1e-3


def _not_negative(value: float | str) -> float:
    if float(value) < -ROUNDING:  # NaN is not
        raise ValueError("a KL is not negative")
    return float(value)


def _not_positive(value: float | str) -> float:
    if float(value) > ROUNDING:
        raise ValueError("a log-probability is not positive")
    return float(value)


TokenId = Annotated[int, Field(ge=0)]
# Strict numbers, and the words that stand for what JSON has no number for.
Measure = Annotated[StrictFloat | Literal["NaN", "Infinity"], AfterValidator(_not_negative)]
LogProbability = Annotated[StrictFloat | Literal["NaN", "-Infinity"], AfterValidator(_not_positive)]
Position = Annotated[list[tuple[TokenId, LogProbability]], Field(min_length=1, max_length=1024)]
Positions = Annotated[list[Position], Field(min_length=1, max_length=MAX_POSITIONS)]


class Feedback(BaseModel):
    """Body of ``POST /feedback``: ``kl``, or both lists of ``[token id, log-probability]``."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    answer_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    kl: Measure | None = Field(None, description="Nats a token; NaN counts as the worst.")
    native: Positions | None = Field(None, description="The target on its own cache.")
    translated: Positions | None = Field(None, description="The target on the answer.")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.kl is None) is (self.native is None) or (self.native is None) is not (
            self.translated is None
        ):
            raise ValueError("kl, or native and translated")
        return self

    @property
    def exact(self) -> bool:
        """Whether ``measured`` is the KL, and not only a bound from below."""
        return self.native is None

    def measured(self) -> float:
        """Nats a token. NaN stays NaN. Raises Problem 422 for lists that are no distributions."""
        if self.native is None or self.translated is None:
            kl = math.nan if self.kl is None else float(self.kl)
            return 0.0 if kl < 0 else kl
        return least_kl(self.native, self.translated)


class FeedbackReceipt(BaseModel):
    """The answer to ``POST /feedback``; posting the same again gives the same."""

    answer_id: str
    kl: float | Literal["NaN", "Infinity"] = Field(description="Nats a token.")
    lower_bound: bool = Field(description="Whether the KL may be larger than this.")
    violation: bool = Field(description="Whether it exceeds the threshold of that answer.")
    counted: bool = Field(description="Whether the breaker's test took it in.")
    breaker: Literal["closed", "open", "half_open"] = Field(description="Its state now.")


Lists = Sequence[Sequence[tuple[int, float | str]]]


def posted_feedback(
    receipt: Receipt, kl: float | None, native: Lists | None, translated: Lists | None
) -> dict[str, Any]:
    """Body and headers with which a client posts. Raises ValueError, also for a KL below 0."""
    if receipt.shadow is None:
        raise ValueError("this answer is not to be measured: its receipt has no shadow")
    given = {"kl": kl, "native": native, "translated": translated}
    said = {name: value for name, value in given.items() if value is not None}
    feedback = Feedback(answer_id=receipt.shadow.answer_id, **said)
    headers = {"content-type": "application/json", "kvt-feedback-token": receipt.shadow.token}
    return {"content": feedback.model_dump_json(exclude_none=True), "headers": headers}


def least_kl(native: Lists, translated: Lists) -> float:
    """The smallest mean KL(native || translated) that fits the lists, nats a token.

    NaN when a log-probability is one. Raises Problem 422 for lists of different lengths, a token
    named twice, and more mass than 1.
    """
    if len(native) != len(translated):
        raise Problem("bad_document", "native and translated have different numbers of positions")
    pairs = zip(native, translated, strict=True)
    return sum(_at_position(_masses(p), _masses(q)) for p, q in pairs) / len(native)


def _masses(listed: Sequence[tuple[int, float | str]]) -> dict[int, float]:
    masses = {token: math.exp(float(log)) for token, log in listed}
    if len(masses) < len(listed):
        raise Problem("bad_document", "a list names a token twice")
    total = sum(masses.values())
    if total > 1 + SURPLUS:
        raise Problem("bad_document", "the probabilities of a list add up to more than 1")
    return {token: mass / max(total, 1.0) for token, mass in masses.items()}


def _at_position(p: dict[int, float], q: dict[int, float]) -> float:
    if math.isnan(sum(p.values()) + sum(q.values())):
        return math.nan
    shared = p.keys() & q.keys()
    known = sum(_term(p[token], q[token]) for token in shared)
    native_left = max(0.0, 1 - sum(p.values()))
    translated_left = max(ROUNDING, 1 - sum(q.values()))
    only_native = sum(mass for token, mass in p.items() if token not in shared)
    only_translated = sum(mass for token, mass in q.items() if token not in shared)
    # Where both events had the same ratio the KL would be smallest: as near to it as can be.
    loose = only_native + native_left
    even = loose * only_translated / (only_translated + translated_left)
    theirs = min(even, native_left)
    rest = _term(theirs, only_translated) + _term(loose - theirs, translated_left)
    return max(0.0, known + rest)


def _term(p: float, q: float) -> float:
    if p <= 0:
        return 0.0
    return math.inf if q == 0 else p * (math.log(p) - math.log(q))
