"""What a caller may post about any answer: how likely the target found the native tail over it.

``POST /feedback`` takes this or a KL (``service/feedback.py``); their fields tell them apart.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from service.errors import Problem
from service.feedback import Feedback, Measure


class TailFeedback(BaseModel):
    """Body of ``POST /feedback`` for the suffix probe; NLLs in nats a token.

    The mean over the tokens of the native tail but the first, each given all before it: so the
    first token's own likelihood, which would take a look at the token before, is not needed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    answer_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    tail_nll: Measure = Field(description="Of the target, over the answer; NaN is the worst.")
    source_tail_nll: Measure | None = Field(None, description="Of the source, of the same tokens.")

    def measured(self) -> tuple[float, float | None]:
        """That of the target and that of the source."""
        source = self.source_tail_nll
        return float(self.tail_nll), None if source is None else float(source)


class Suffix(BaseModel):
    """What the tail's likelihood says of the answer."""

    expected_nll: float | None = Field(description="From the source's NLL; null without one.")
    limit: float | None = Field(description="The largest NLL with which an answer is kept.")
    decision: Literal["keep", "reprefill"]


class SuffixReceipt(BaseModel):
    """The answer to a tail's NLL; posting the same again gives the same."""

    answer_id: str
    suffix: Suffix


_POSTED: TypeAdapter[Feedback | TailFeedback] = TypeAdapter(Feedback | TailFeedback)


def read_posted(raw: bytes) -> Feedback | TailFeedback:
    """Parse a body. Raises Problem 422, quoting nothing of it."""
    try:
        return _POSTED.validate_json(raw)
    except ValidationError as error:
        raise Problem(
            "bad_document",
            "send answer_id, and kl, or both native and translated, for each position a list of "
            "[token id, log-probability], or tail_nll and, where it is known, source_tail_nll",
        ) from error


def posted_tail(
    answer_id: str, token: str | None, tail_nll: float, source_tail_nll: float | None
) -> dict[str, Any]:
    """Body and headers with which a client posts. Raises ValueError, also for an NLL below 0."""
    if token is None:
        raise ValueError("the service has nothing that this answer's tail could be judged by")
    said = {} if source_tail_nll is None else {"source_tail_nll": source_tail_nll}
    posted = TailFeedback(answer_id=answer_id, tail_nll=tail_nll, **said)
    headers = {"content-type": "application/json", "kvt-feedback-token": token}
    return {"content": posted.model_dump_json(exclude_none=True), "headers": headers}
