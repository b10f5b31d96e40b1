"""What a measured KL does: it is checked, written down once, and moves its breaker."""

import math
from typing import Literal

import structlog

from service.audience import Audience
from service.breaker import Breaker, Key, Sample
from service.errors import Problem
from service.feedback import Feedback, FeedbackReceipt
from service.loss import loss_of, violates
from service.policy import Policies
from service.shadow import Shadow
from service.state_file import Answer, StateFile

log = structlog.get_logger("service.reports")


class Reports:
    """Works on the state file's thread, so on one report at a time.

    ``breakers`` is read by others meanwhile: a state in it is replaced, never changed.
    """

    def __init__(
        self,
        file: StateFile,
        shadow: Shadow,
        policies: Policies,
        audience: Audience,
        *,
        seconds: float,
    ) -> None:
        self._file, self._shadow, self._policies = file, shadow, policies
        self._audience, self._seconds = audience, seconds
        self.breakers: dict[Key, Breaker] = file.breakers()

    def settle(self, feedback: Feedback, token: str, now: float) -> tuple[Answer, FeedbackReceipt]:
        """Take it in. Raises Problem: unknown, not its owner's, late, or another value."""
        answer = self._owned(feedback.answer_id, token)
        kl = feedback.measured()
        violation = violates(kl, answer.max_kl)
        value = f"{kl!r} {'exact' if feedback.exact else 'at least'}"
        if answer.value is None:
            answer = self._take(answer, value, kl, exact=feedback.exact, now=now)
        elif answer.value != value:
            raise Problem("feedback_differs", "another KL was posted for this answer before")
        breaker, policy = self.breakers.get(answer.key), self._policies.of(answer.key.mapper)
        return answer, FeedbackReceipt(
            answer_id=answer.id,
            kl=_in_json(kl),
            lower_bound=not feedback.exact,
            violation=violation,
            counted=bool(answer.counted),
            breaker="closed" if breaker is None else breaker.phase(policy, now),
        )

    def _owned(self, answer_id: str, token: str) -> Answer:
        answer = self._file.answer(answer_id)
        if answer is None:
            raise Problem("answer_not_found", "no answer of this id is waiting to be measured")
        if not self._shadow.genuine(answer_id, token):
            raise Problem("wrong_feedback_token", "send the KVT-Feedback-Token of this answer")
        return answer

    def _take(self, answer: Answer, value: str, kl: float, *, exact: bool, now: float) -> Answer:
        if now > answer.issued_seconds + self._seconds:
            raise Problem("answer_expired", f"a KL is taken for {self._seconds:g} seconds")
        policy = self._policies.of(answer.key.mapper)
        shared = self._audience.others(answer.key, answer.client, now) > 0
        sample = Sample(
            loss_of(kl, answer.max_kl, policy),
            violates(kl, answer.max_kl),
            exact,
            answer.client,
            shared,
            answer.issued_seconds,
        )
        breaker = self.breakers.get(answer.key, Breaker.fresh(policy)).under(policy)
        counted = breaker.takes(sample, policy, now)
        after = breaker.observe(sample, policy, now) if counted else None
        self._file.settle(answer.id, value, answer.key, after, now)
        if after is not None:  # only what is written down holds
            self.breakers[answer.key] = after
            _say_moved(answer.key, breaker, after)
        return answer._replace(value=value, counted=counted)


def _say_moved(key: Key, before: Breaker, after: Breaker) -> None:
    """A log line where a breaker has opened or closed."""
    if before.opened_seconds == after.opened_seconds:
        return
    facts = {"id": key.mapper, "domain": key.domain, "max_tokens": key.max_tokens}
    if after.opened_seconds is None:
        log.info("breaker closed", **facts, samples=before.samples + 1)
    else:
        # The last one is a violation, or it would not have opened.
        violations = before.violations + 1
        log.warning("breaker opened", **facts, samples=before.samples + 1, violations=violations)


def _in_json(kl: float) -> float | Literal["NaN", "Infinity"]:
    if math.isnan(kl):
        return "NaN"
    return kl if math.isfinite(kl) else "Infinity"
