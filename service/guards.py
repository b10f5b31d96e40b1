"""What earlier answers say of a request: its breaker, its session, and the order to measure it.

Everything that the gate asks is a look-up in memory; what has to last is written by the state
file's own thread. Times are seconds since 1970, because they outlive the process.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from time import time as wall_clock
from typing import NamedTuple

import structlog

from mappers.suffix import SuffixCheck
from service.audience import Audience
from service.breaker import Breaker, Key, Phase, length_bucket
from service.entry import Entry
from service.errors import Problem
from service.feedback import Feedback, FeedbackReceipt
from service.policy import Policies, Policy
from service.probes import Probes
from service.reports import Reports
from service.schemas import BreakerInfo, ShadowRequest, TranslateRequest
from service.sessions import Sessions
from service.settings import Settings
from service.shadow import Shadow
from service.state_file import Answer, StateFile
from service.suffixes import Suffixes
from service.tail_feedback import SuffixReceipt, TailFeedback

log = structlog.get_logger("service.guards")


class Standing(NamedTuple):
    """What is known of a request before its evidence is weighed. ``spent``: nats a token."""

    policy: Policy
    key: Key
    phase: Phase
    probe_free: bool
    spent: float

    @property
    def breaker_open(self) -> bool:
        """Whether the breaker keeps this request from being translated."""
        return self.phase == "open" or (self.phase == "half_open" and not self.probe_free)


@dataclass(slots=True)
class Claim:
    """What an answer has taken from the books: ``kl`` (nats a token) of its session's drift, a
    place of a half-open breaker, and, when it is ``marked``, the order to measure it.

    An answer that is not ``given`` gives all of it back: nobody will report on it.
    """

    answer_id: str
    client: str
    standing: Standing
    kl: float
    marked: bool = False
    given: bool = False


class Guards:
    """Breakers, sessions and shadowed answers of one application. Raises StateError."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._file = StateFile(settings.state)
        self._shadow = Shadow(self._file.secret)
        self._audience = Audience(settings.feedback_seconds)
        self._probes = Probes()
        self.policies = Policies(settings, settings.pairs)
        self.sessions = Sessions(most=settings.max_sessions, idle_seconds=settings.session_seconds)
        self._reports = Reports(
            self._file,
            self._shadow,
            self.policies,
            self._audience,
            seconds=settings.feedback_seconds,
        )
        self._suffixes = Suffixes(self._shadow, seconds=settings.feedback_seconds)
        for served in self._file.served():
            self._audience.note(*served)

    def close(self) -> None:
        """When no request is left."""
        self._file.close()

    def client(self, address: str | None) -> str:
        """A client's name in the books, from its address."""
        return self._shadow.client(address)

    def standing(self, entry: Entry, request: TranslateRequest, client: str) -> Standing:
        """For the gate."""
        now, policy = wall_clock(), self.policies.of(entry.id)
        key, session = _key(entry, request, policy), self._session(request)
        clients = 1 + self._audience.others(key, client, now)
        places = policy.breaker_probes
        return Standing(
            policy,
            key,
            phase=self._phase(key, policy, now),
            probe_free=self._probes.free(key, client, now, places=places, clients=clients),
            spent=0.0 if session is None else self.sessions.spent(session, now),
        )

    def opened_since(self, standing: Standing) -> bool:
        """Whether the breaker has opened while the request was queued and computed.

        Half-open where it was closed, it has opened and cooled down meanwhile.
        """
        phase = self._phase(standing.key, standing.policy, wall_clock())
        return phase == "open" or (phase == "half_open" and standing.phase == "closed")

    @contextlib.contextmanager
    def claim(
        self,
        answer_id: str,
        client: str,
        request: TranslateRequest,
        standing: Standing,
        kl: float,
    ) -> Iterator[Claim]:
        """Take a place among the probes, and at most ``kl`` from the session; before anything is
        awaited, so that requests at the same time see each other."""
        claim, now = Claim(answer_id, client, standing, kl), wall_clock()
        session = self._session(request)
        if standing.phase == "half_open":
            until = now + self._settings.feedback_seconds
            self._probes.take(standing.key, answer_id, client, until)
        if session is not None:
            self.sessions.charge(session, kl, now)
        try:
            yield claim
        finally:
            if session is not None:
                self.sessions.refund(session, kl - claim.kl if claim.given else kl)
            if not claim.given:
                self._give_back(claim)

    def _give_back(self, claim: Claim) -> None:
        self._probes.give_back(claim.standing.key, claim.answer_id)
        self._suffixes.forget(claim.answer_id)
        if claim.marked:
            self._file.later(lambda: self._file.forget(claim.answer_id))

    async def mark(self, claim: Claim, max_kl: float) -> ShadowRequest | None:
        """Whether this answer is to be measured; None: no, or it cannot be written down."""
        now, standing, answer_id = wall_clock(), claim.standing, claim.answer_id
        self._audience.note(standing.key, claim.client, now)
        rate = 1.0 if standing.phase == "half_open" else standing.policy.shadow_rate
        if not self._shadow.chosen(answer_id, rate):
            return None
        seconds = self._settings.feedback_seconds
        answer = Answer(answer_id, standing.key, claim.client, max_kl, now)
        claim.marked = True
        try:
            # Kept for twice the time: whoever comes too late is told so.
            await self._file.run(lambda: self._file.add(answer, forget=now - 2 * seconds))
        except sqlite3.Error as error:
            log.error("an answer cannot be written down", fault=type(error).__name__)
            return None
        token = self._shadow.token(answer_id)
        return ShadowRequest(answer_id=answer_id, token=token, expires_seconds=seconds)

    def give_tail(
        self, claim: Claim, mapper_id: str, checks: tuple[SuffixCheck, ...]
    ) -> str | None:
        """The token with which the native tail's NLL is posted; None where nothing can judge it."""
        return self._suffixes.give(claim.answer_id, mapper_id, checks, wall_clock())

    def judge_tail(self, feedback: TailFeedback, token: str) -> tuple[str, bool, SuffixReceipt]:
        """The mapper's id, whether it is the first post, and what to answer. Raises Problem."""
        return self._suffixes.judge(feedback, token, wall_clock())

    async def report(self, feedback: Feedback, token: str) -> tuple[str, FeedbackReceipt]:
        """Take a measured KL in: the mapper's id, and what to answer. Raises Problem."""
        now = wall_clock()
        try:
            answer, receipt = await self._file.run(
                lambda: self._reports.settle(feedback, token, now)
            )
        except sqlite3.Error as error:
            log.error("a KL cannot be written down", fault=type(error).__name__)
            raise Problem("state_unavailable", "the KL could not be written down") from error
        self._probes.give_back(answer.key, answer.id)
        return answer.key.mapper, receipt

    def breakers(self, mapper_id: str, digest: str | None) -> list[BreakerInfo]:
        """Those of one mapper as it is loaded now."""
        now, policy = wall_clock(), self.policies.of(mapper_id)
        found = self._reports.breakers.copy()
        mine = sorted(key for key in found if key[:2] == (mapper_id, digest))
        return [_info(key, found[key], policy, now) for key in mine]

    def _session(self, request: TranslateRequest) -> bytes | None:
        return None if request.session_id is None else self._shadow.session(request.session_id)

    def _phase(self, key: Key, policy: Policy, now: float) -> Phase:
        breaker = self._reports.breakers.get(key)
        return "closed" if breaker is None else breaker.phase(policy, now)


def _key(entry: Entry, request: TranslateRequest, policy: Policy) -> Key:
    domain = policy.evidence_domain(request.domain)
    measured = {bucket.domain for bucket in entry.evidence.translated} if entry.evidence else set()
    # A name that the evidence does not know is the caller's: it makes no breaker of its own.
    name = "any" if domain is None else domain if domain in measured else "other"
    tokens = request.start_position + request.tokens
    return Key(entry.id, entry.digest or "", name, length_bucket(tokens))


def _info(key: Key, breaker: Breaker, policy: Policy, now: float) -> BreakerInfo:
    opened = breaker.opened_seconds
    return BreakerInfo(
        domain=key.domain,
        max_tokens=key.max_tokens,
        state=breaker.phase(policy, now),
        e_value=breaker.bad.whole.value,
        close_e_value=breaker.good.whole.value,
        samples=breaker.samples,
        violations=breaker.violations,
        clients=len(breaker.bad.without),
        opened_seconds_ago=None if opened is None else max(0.0, now - opened),
    )
