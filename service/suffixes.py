"""Answers whose native tail may still be looked at, and what its likelihood says of each.

A caller that has read the tail posts its NLL and learns whether to keep the answer. That moves a
counter and no breaker: it is no KL. A text can surprise the target over its own cache as well, and
the limit is made to send back a share of good answers.

Everything is in memory, and bounded: an answer that is forgotten, by age, by number or by a
restart, is simply not looked at again.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

from mappers.suffix import Judgement, SuffixCheck
from service.errors import Problem
from service.shadow import Shadow
from service.tail_feedback import Suffix, SuffixReceipt, TailFeedback

ANSWERS_AT_MOST = 16_384


@dataclass(slots=True)
class _Given:
    mapper: str
    checks: tuple[SuffixCheck, ...]
    issued_seconds: float
    posted: str | None = None


class Suffixes:
    """Of one process; the oldest answer is forgotten first."""

    def __init__(self, shadow: Shadow, *, seconds: float) -> None:
        self._shadow, self._seconds = shadow, seconds
        self._given: OrderedDict[str, _Given] = OrderedDict()

    def __len__(self) -> int:
        return len(self._given)

    def give(
        self, answer_id: str, mapper: str, checks: tuple[SuffixCheck, ...], now: float
    ) -> str | None:
        """Remember an answer; the token to post its tail with. None: nothing can judge it."""
        if not checks:
            return None
        self._given[answer_id] = _Given(mapper, checks, now)
        while len(self._given) > ANSWERS_AT_MOST or self._oldest() < now - self._seconds:
            self._given.popitem(last=False)
        return self._shadow.token(answer_id)

    def forget(self, answer_id: str) -> None:
        """It was not given after all."""
        self._given.pop(answer_id, None)

    def judge(
        self, feedback: TailFeedback, token: str, now: float
    ) -> tuple[str, bool, SuffixReceipt]:
        """The mapper's id, whether this is the first post, and the answer to it. Raises Problem."""
        given = self._given.get(feedback.answer_id)
        if given is None or given.issued_seconds < now - self._seconds:
            raise Problem("answer_not_found", "no answer of this id has a tail to be judged")
        if not self._shadow.genuine(feedback.answer_id, token):
            raise Problem("wrong_feedback_token", "send the KVT-Feedback-Token of this answer")
        nlls, first = feedback.measured(), given.posted is None
        posted = repr(nlls)  # in which NaN equals NaN
        if not first and given.posted != posted:
            raise Problem("feedback_differs", "another NLL was posted for this answer before")
        given.posted = posted
        worst = _worst([check.judge(*nlls) for check in given.checks])
        suffix = Suffix(
            expected_nll=_in_json(worst.expected_nll),
            limit=_in_json(worst.limit),
            decision=worst.decision,
        )
        return given.mapper, first, SuffixReceipt(answer_id=feedback.answer_id, suffix=suffix)

    def _oldest(self) -> float:
        return next(iter(self._given.values())).issued_seconds


def _worst(judgements: list[Judgement]) -> Judgement:
    """Where the domain was not named every measured one must keep the answer."""
    return min(judgements, key=lambda judgement: (judgement.decision == "keep", judgement.limit))


def _in_json(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
