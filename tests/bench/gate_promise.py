"""The gate as it is served, on prefixes of documents that its evidence has not seen.

Cross-fitting: the documents are parted into folds, and the prefixes of each fold meet a service
whose evidence is one prefix of each document of the others. So every document is tested on, and
none by a rule that it had a part in. ``gate.rule`` and ``ContentGate`` decide, from a copy of the
artifact that the service's own store has loaded.
"""

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mappers import artifact as artifacts
from mappers.bounds import mean_bound
from mappers.cache import Readable
from mappers.evidence import Evidence, EvidenceRow
from mappers.probe import PROBE_TOKENS
from service import gate
from service.breaker import Key
from service.content import ContentGate
from service.entry import Entry
from service.gate import Ruling
from service.guards import Standing
from service.policy import Policy
from service.schemas import TranslateRequest, read_request
from service.settings import Settings
from service.store import Store
from tests.bench.gate_data import Family, Measured, Prefix

FOLDS = 8


class Asked(NamedTuple):
    """How prefixes of texts of ``domain`` are asked about: under which name, and with a probe?"""

    domain: str
    said: str | None
    probe_tokens: int = 0


ASKED = {
    "in_domain": Asked("in_domain", "in_domain"),
    "out_of_domain": Asked("out_of_domain", "out_of_domain"),
    "in_domain_unnamed": Asked("in_domain", None),
    "out_of_domain_unnamed": Asked("out_of_domain", None),
    "out_of_domain_mislabelled": Asked("out_of_domain", "in_domain"),
    "out_of_domain_mislabelled_probed": Asked("out_of_domain", "in_domain", PROBE_TOKENS),
    "in_domain_probed": Asked("in_domain", "in_domain", PROBE_TOKENS),
    "out_of_domain_probed": Asked("out_of_domain", "out_of_domain", PROBE_TOKENS),
}


class Outcome(NamedTuple):
    """What the gate said to one request, and the KL of the answer, if there was one."""

    reason: str | None
    native_tail: int
    kl: float | None


@dataclass(frozen=True)
class Served:
    """A mapper as the service has loaded it, with evidence from these rows."""

    entry: Entry
    _content: dict[tuple[int, str | None], str | None] = field(default_factory=dict)
    _rulings: dict[tuple[str, Policy], Ruling] = field(default_factory=dict)

    @classmethod
    def with_rows(cls, family: Family, rows: Iterable[EvidenceRow], folder: Path) -> "Served":
        """From a copy of the artifact in ``folder``. Raises ValueError when it does not load."""
        given = tuple(rows)
        corpora = dict.fromkeys((row.domain for row in given), "")
        copy = Path(shutil.copytree(family.folder, folder / family.folder.name))
        evidence = Evidence(continuation_tokens=32, corpora=corpora, rows=given)
        store = Store(
            Settings(artifacts=(artifacts.add_evidence(copy, evidence),)), lambda prepare: prepare()
        )
        store.load_all()
        if not store.ready:
            raise ValueError(store.entries[0].error)
        return cls(store.entries[0])

    def ruling(self, request: TranslateRequest, policy: Policy) -> Ruling:
        """What the cheap gate says; equal requests are asked once."""
        key = (request.model_dump_json(), policy)
        if key not in self._rulings:
            self._rulings[key] = self.rule(request, policy)
        return self._rulings[key]

    def rule(
        self, request: TranslateRequest, policy: Policy, probe_error: float | None = None
    ) -> Ruling:
        """What the cheap gate says, before a probe's error is known or with it."""
        key = Key(self.entry.id, self.entry.digest or "", request.domain or "any", request.tokens)
        return gate.rule(
            self.entry,
            request,
            Standing(policy, key, "closed", probe_free=True, spent=0.0),
            allow_unproven=False,
            pending_seconds=0.0,
            probe_error=probe_error,
        )

    def content(self, measured: Measured, request: TranslateRequest) -> str | None:
        """What the content gate says of a cache; it knows no threshold, so it is asked once."""
        key = (id(measured), request.domain)
        if key not in self._content:
            content = self.entry.loaded.content
            self._content[key] = content_reason(content, measured.cache, request)
        return self._content[key]

    def outcome(self, measured: Measured, asked: Asked, policy: Policy) -> Outcome:
        """The whole gate, in the order of the service."""
        request = request_for(self.entry, measured.prefix, asked)
        ruling = self.ruling(request, policy)
        reason = ruling.reason or self.content(measured, request)
        if reason is None and asked.probe_tokens:
            error = measured.row(tail=1, probe_tokens=asked.probe_tokens).probe_error
            ruling = self.rule(request, policy, math.nan if error is None else error)
            reason = ruling.reason
        if reason is not None:
            return Outcome(reason, 0, None)
        row = measured.row(tail=ruling.native_tail, probe_tokens=asked.probe_tokens)
        return Outcome(None, ruling.native_tail, row.kl)


def content_reason(content: ContentGate, cache: Readable, request: TranslateRequest) -> str | None:
    """What the content gate holds against a cache that is there as a whole."""
    inspection = content.begin(request)
    for keys, values in cache.layers():
        inspection.add(keys, values)
    return inspection.result(request.domain).reason


def folds(
    family: Family, measured: Sequence[Measured], folder: Path, *, count: int = FOLDS
) -> Iterator[tuple[Served, list[Measured]]]:
    """Each fold's prefixes, and the service whose evidence is of the other folds' documents."""
    documents = dict.fromkeys((m.prefix.domain, m.prefix.document) for m in measured)
    fold_of = {document: number % count for number, (_, document) in enumerate(documents)}
    for fold in range(count):
        rows: dict[str, tuple[EvidenceRow, ...]] = {}
        for m in measured:
            if fold_of[m.prefix.document] != fold:
                rows.setdefault(m.prefix.document, m.rows)
        served = Served.with_rows(
            family, (row for own in rows.values() for row in own), folder / str(fold)
        )
        yield served, [m for m in measured if fold_of[m.prefix.document] == fold]


Folds = Sequence[tuple[Served, Sequence[Measured]]]


def line(parts: Folds, label: str, policy: Policy) -> dict[str, Any]:
    """What became of all prefixes of one kind under this policy."""
    asked = ASKED[label]
    found = [
        (m, served.outcome(m, asked, policy))
        for served, fold in parts
        for m in fold
        if m.prefix.domain == asked.domain
    ]
    kls = [outcome.kl for _, outcome in found if outcome.kl is not None]
    tails = [outcome.native_tail for _, outcome in found if outcome.kl is not None]
    violations = sum(not kl <= policy.max_kl for kl in kls)
    return {
        "threshold": policy.max_kl,
        "alpha": policy.alpha,
        "delta": policy.delta,
        "violations": violations,
        "accepted": len(kls),
        "total": len(found),
        "domain": label,
        "violation_upper_bound": _rounded(upper_bound(violations, len(kls), policy.delta)),
        "acceptance": _rounded(len(kls) / len(found)),
        "mean_native_tail": _mean(tails),
        "risk": policy.risk,
        "violation_lower_bound": _rounded(lower_bound(violations, len(kls), policy.delta)),
        "mean_kl": _mean(kls),
        "mean_kl_upper_bound": _rounded(mean_bound(kls, policy.kl_clip, policy.delta)),
        "documents": len({m.prefix.document for m, outcome in found if outcome.kl is not None}),
        "recomputed": _recomputed(found, asked),
        "recomputed_yes_or_no": _recomputed(_yes_or_no(parts, asked, policy), asked),
        "refused": _counted(outcome.reason for _, outcome in found),
    }


def _yes_or_no(parts: Folds, asked: Asked, policy: Policy) -> list[tuple[Measured, Outcome]]:
    """What a gate makes of the same prefixes that knows no tail but the shortest."""
    plain = policy.model_copy(update={"native_tails": (1,)})
    return [
        (m, served.outcome(m, asked, plain))
        for served, fold in parts
        for m in fold
        if m.prefix.domain == asked.domain
    ]


def _recomputed(found: Sequence[tuple[Measured, Outcome]], asked: Asked) -> float:
    """The share of the prompts' tokens that the target reads itself, a probe's included."""
    read = sum(
        m.prefix.length if outcome.kl is None else outcome.native_tail + asked.probe_tokens
        for m, outcome in found
    )
    return _rounded(read / sum(m.prefix.length for m, _ in found))


def request_for(entry: Entry, prefix: Prefix, asked: Asked) -> TranslateRequest:
    """As a client that names its domain and the first token would ask."""
    return read_request(json.dumps(document_for(entry.loaded.mapper, prefix, asked)))


def document_for(mapper: Any, prefix: Prefix, asked: Asked) -> dict[str, Any]:
    """The request document of ``request_for``."""
    sides = {
        name: {
            "model": side.model,
            "version": side.version,
            "rope_theta": side.rope.theta,
            "dtype": side.dtype,
        }
        for name, side in (("source", mapper.source), ("target", mapper.target))
    }
    said: dict[str, Any] = {
        **sides,
        "tokens": prefix.length,
        "layout": "NHD",
        "prefix_token_ids": prefix.ids[:1].tolist(),
    }
    if asked.said is not None:
        said["domain"] = asked.said
    if asked.probe_tokens:
        said["probe"] = {"tokens": asked.probe_tokens}
    return said


def upper_bound(violations: int, total: int, delta: float) -> float:
    """The largest share with P(Binomial(total, share) <= violations) > delta; 1 for no trials.

    Clopper and Pearson 1934.
    """
    low, high = (0.0, 1.0) if violations < total else (1.0, 1.0)
    for _ in range(60):
        middle = (low + high) / 2
        inside = sum(
            math.comb(total, m) * middle**m * (1 - middle) ** (total - m)
            for m in range(violations + 1)
        )
        low, high = (middle, high) if inside > delta else (low, middle)
    return high


def lower_bound(violations: int, total: int, delta: float) -> float:
    """The smallest share with P(Binomial(total, share) >= violations) > delta."""
    return 1 - upper_bound(total - violations, total, delta)


def _counted(reasons: Iterable[str | None]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for reason in reasons:
        if reason is not None:
            found[reason] = found.get(reason, 0) + 1
    return found


def _mean(values: Sequence[float]) -> float | None:
    return _rounded(sum(values) / len(values)) if values else None


def _rounded(value: float) -> float:
    return round(value, 5)
