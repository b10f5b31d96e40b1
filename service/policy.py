"""What may be set for each pair: how good is good enough, and what is done when it is not.

Every field here is a setting of the whole service as well, where it is the default of all pairs:

    max_kl: 0.05
    shadow_rate: 0.01
    pairs:
      small-large-full_head-b1: {max_kl: 0.02, domains: [chat], native_tails: [32, 128]}

A pair's key is its mapper's id. A request may tighten what is in force for its pair (``max_kl``,
``max_native_tail``) and nothing else.
"""

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

from mappers.accept import Risk, Rule

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class Policy(BaseModel):
    """The settings that can differ between pairs; a bad or surplus key is an error that names it.

    KLs are in nats a token. ``model_fields_set`` tells what was given, so one class is the
    defaults, a pair's changes, and the result.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_kl: float = Field(0.15, gt=0, allow_inf_nan=False, description="Nats a token.")
    risk: Risk = Field(
        "exceedance",
        description="What meets max_kl: exceedance, KLs but for a share alpha; mean, their mean.",
    )
    alpha: float = Field(0.1, gt=0, lt=1, description="Share of answers that may exceed it.")
    delta: float = Field(0.05, gt=0, lt=1, description="1 - confidence of that.")
    kl_clip: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="Of the mean: a larger KL counts as this."
    )
    default_domain: Word | None = Field(
        None, description="Domain of requests that name none; none: the worst of all decides."
    )
    trust_domain: bool = Field(
        True,
        description="Whether the domain that a request names chooses its evidence; if not, the "
        "worst of all decides.",
    )
    domains: tuple[Word, ...] = Field(
        (), description="Domains that may be translated; all that were measured when empty."
    )
    native_tails: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="Native tails that may be chosen; all that were measured when empty."
    )
    # A least-squares fit on n rows an input adds 1 / n to its error on other text like it; what it
    # adds on text unlike it nobody has measured, so a few good documents prove too little.
    min_rows_an_input: float = Field(
        8,
        ge=0,
        allow_inf_nan=False,
        description="Rows of the fit for each input of a map; with fewer nothing is translated.",
    )
    reprefill_tokens_per_second: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="The target's own prefill, for requests without reprefill_ms; none: unknown.",
    )
    drift_budget: float | None = Field(
        0.5, gt=0, allow_inf_nan=False, description="Most that a session's KLs may add up to."
    )
    shadow_rate: float = Field(
        0.01, ge=0, le=1, description="Share of answers whose KL the caller is asked to measure."
    )
    breaker_eps: float | None = Field(
        None, gt=0, lt=1, description="Share of violations that is tolerated; none: alpha."
    )
    breaker_delta: float = Field(
        0.01, gt=0, lt=1, description="Most likely share of breakers that ever open falsely."
    )
    breaker_close_delta: float = Field(
        0.05, gt=0, lt=1, description="The same for breakers that close although they should not."
    )
    breaker_cool_down_seconds: float = Field(
        300, gt=0, allow_inf_nan=False, description="From opening to the first probe."
    )
    breaker_probes: int = Field(
        8, ge=1, le=4096, description="Answers of a half-open breaker that wait for their KL."
    )
    breaker_quorum: int = Field(
        2,
        ge=1,
        le=2,
        description="2: where several clients are served, no single one moves a breaker.",
    )

    def rule(self, max_kl: float) -> Rule:
        """The accept rule at a threshold that is this policy's, or tighter."""
        return Rule(max_kl, self.alpha, self.delta, self.risk, self.kl_clip)

    def check(self) -> None:
        """What only the policy in force can say of itself. Raises ValueError."""
        if self.risk == "mean" and not self.kl_clip > self.max_kl:
            limits = f"kl_clip {self.kl_clip:g} must be above max_kl {self.max_kl:g}"
            raise ValueError(f"{limits}, or any mean meets it")

    def evidence_domain(self, named: str | None) -> str | None:
        """Whose evidence a request that names this domain is weighed by; None: all, the worst."""
        return (named or self.default_domain) if self.trust_domain else None

    @property
    def eps(self) -> float:
        """The share of violations that a breaker tolerates."""
        return self.alpha if self.breaker_eps is None else self.breaker_eps

    def changed_by(self, pair: "Policy") -> Self:
        """This policy with what was given for one pair."""
        return self.model_copy(update={name: getattr(pair, name) for name in pair.model_fields_set})


class Policies:
    """The policy in force for each mapper id. Raises ValueError for one that certifies nothing."""

    def __init__(self, default: Policy, pairs: Mapping[str, Policy]) -> None:
        self._default = Policy(**{name: getattr(default, name) for name in Policy.model_fields})
        self._pairs = {name: self._default.changed_by(pair) for name, pair in pairs.items()}
        for policy in (self._default, *self._pairs.values()):
            policy.check()

    def of(self, mapper_id: str) -> Policy:
        """That of one pair."""
        return self._pairs.get(mapper_id, self._default)

    def unused(self, mapper_ids: set[str]) -> list[str]:
        """Configured ids that no mapper has: most likely misspelt."""
        return sorted(self._pairs.keys() - mapper_ids)
