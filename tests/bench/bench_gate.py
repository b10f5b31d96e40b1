"""What the gate lets through, on texts of the embedded family that it has not seen.

    python tests/bench/bench_gate.py
    python tests/bench/bench_gate.py --corruptions

The policy is the one that is served: the content gate, then the evidence's verdict with the native
tail that it names. Its evidence is measured here, on documents of which no prefix is in the test.
One JSON line for each threshold and domain on stdout, progress on stderr. ``mislabelled`` are
prefixes of out_of_domain whose request says in_domain: only the content gate can tell.

``violations``: accepted prefixes whose KL is above the threshold; ``violation_upper_bound``: what
their share is at most, with confidence 1 - delta (Clopper and Pearson 1934), if prefixes were
independent (several are of one document). ``recomputed``: the share of the prompts' tokens that the
target reads itself; ``recomputed_yes_or_no``: the same for a gate without native tails.

With ``--corruptions``, one line a corruption: how many of the spoiled caches were refused. ``none``
are good caches; ``..._with_token_ids`` those of requests that name 96 token ids.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from corruptions import CORRUPTIONS, Context
from gate_data import TEXTS, Measured, Prefix, measure, prefixes, source_cache, split

from mappers import artifact as artifacts
from mappers import demo
from mappers.accept import Rule, Verdict, decide
from mappers.artifact import Artifact
from mappers.conformal import FALSE_REFUSALS, limits_by_domain
from mappers.evidence import Evidence
from mappers.models import LoadedModel, ModelSpec, load_model
from mappers.sample import sample_rows
from service.content import ContentGate
from service.schemas import TranslateRequest

DEMO = Path(demo.__file__).parent
TAILS = (1, 8, 32, 64, 128)


@dataclass(frozen=True)
class Policy:
    """What a prefix is judged by."""

    evidence: Evidence
    score_limits: dict[str | None, float]
    deviation_limit: float
    length: int
    max_kl: float
    alpha: float
    delta: float

    def verdict(self, domain: str, tails: Sequence[int]) -> Verdict:
        """The same for all prefixes of a domain."""
        return decide(
            self.evidence,
            tokens=self.length,
            domain=domain,
            prefix_known=True,
            rule=Rule(self.max_kl, self.alpha, self.delta),
            native_tails=tails,
        )

    def plausible(self, measured: Measured, domain: str) -> bool:
        """Whether the content gate lets it pass."""
        found = measured.finding
        if found is None:
            return True
        limit = self.score_limits.get(domain, math.inf)
        return found.deviation <= self.deviation_limit and found.score <= limit


def main(
    source: Annotated[Path, typer.Option(help="model folder")] = DEMO / "small",
    target: Annotated[Path, typer.Option(help="model folder")] = DEMO / "large",
    root: Annotated[Path, typer.Option(help="folder of artifacts")] = DEMO / "artifacts",
    length: Annotated[int, typer.Option(help="tokens of a prompt")] = 192,
    tested: Annotated[int, typer.Option(help="prefixes of each domain")] = 400,
    measured: Annotated[int, typer.Option(help="prefixes of each domain behind the rule")] = 400,
    max_kl: Annotated[list[float], typer.Option()] = [0.05, 0.1, 0.2],  # noqa: B006
    alpha: Annotated[float, typer.Option()] = 0.1,
    delta: Annotated[float, typer.Option()] = 0.05,
    corruptions: Annotated[bool, typer.Option("--corruptions")] = False,
) -> None:
    """Print a JSON line for every threshold and domain, or for every corruption."""
    small = load_model(ModelSpec(path=str(source)))
    found = _artifact(root, small)
    by_domain = {
        d: split(prefixes(d, small, length=length), tested=tested, measured=measured) for d in TEXTS
    }
    if corruptions:
        _print(_corrupted(found, small, by_domain["in_domain"][1], length))
        return
    large = load_model(ModelSpec(path=str(target)))
    models, tails = (found, small, large), [w for w in TAILS if w < length]
    rule, test = (
        {
            d: [*measure(*models, halves[i], length=length, tails=tails)]
            for d, halves in by_domain.items()
        }
        for i in range(2)
    )
    for threshold in max_kl:
        policy = _policy(found, rule, length, threshold, alpha, delta)
        for label, said, given in (
            ("in_domain", "in_domain", test["in_domain"]),
            ("out_of_domain", "out_of_domain", test["out_of_domain"]),
            ("mislabelled", "in_domain", test["out_of_domain"]),
        ):
            _print([_judged(policy, label, said, given)])


def _policy(
    artifact: Artifact,
    rule: dict[str, list[Measured]],
    length: int,
    max_kl: float,
    alpha: float,
    delta: float,
) -> Policy:
    rows = tuple(row for group in rule.values() for m in group for row in m.rows.values())
    evidence = Evidence(continuation_tokens=32, corpora=dict.fromkeys(rule, ""), rows=rows)
    profile = artifact.profile
    return Policy(
        evidence,
        limits_by_domain(rows, FALSE_REFUSALS),
        math.inf if profile is None else profile.limit(FALSE_REFUSALS),
        length,
        max_kl,
        alpha,
        delta,
    )


def _judged(policy: Policy, label: str, said: str, given: Sequence[Measured]) -> dict[str, Any]:
    verdict = policy.verdict(said, TAILS)
    plain = policy.verdict(said, TAILS[:1])
    plausible = [m for m in given if policy.plausible(m, said)]
    accepted = plausible if verdict.decision == "translate" else []
    kls = [m.rows[verdict.native_tail].kl for m in accepted]
    violations = sum(not kl <= policy.max_kl for kl in kls)
    return {
        "threshold": policy.max_kl,
        "alpha": policy.alpha,
        "delta": policy.delta,
        "violations": violations,
        "accepted": len(accepted),
        "total": len(given),
        "domain": label,
        "violation_upper_bound": round(upper_bound(violations, len(kls), policy.delta), 4),
        "acceptance": round(len(accepted) / len(given), 4),
        "mean_native_tail": verdict.native_tail if accepted else None,
        "mean_kl": round(sum(kls) / len(kls), 5) if kls else None,
        "reason": verdict.reason,
        "recomputed": _recomputed(policy, verdict, len(plausible), len(given)),
        "recomputed_yes_or_no": _recomputed(policy, plain, len(plausible), len(given)),
    }


def _recomputed(policy: Policy, verdict: Verdict, plausible: int, given: int) -> float:
    accepted = plausible if verdict.decision == "translate" else 0
    read = accepted * verdict.native_tail + (given - accepted) * policy.length
    return round(read / (given * policy.length), 4)


def upper_bound(violations: int, total: int, delta: float) -> float:
    """The largest share with P(Binomial(total, share) <= violations) > delta; 1 for no trials."""
    low, high = (0.0, 1.0) if violations < total else (1.0, 1.0)
    for _ in range(60):
        middle = (low + high) / 2
        inside = sum(
            math.comb(total, m) * middle**m * (1 - middle) ** (total - m)
            for m in range(violations + 1)
        )
        low, high = (middle, high) if inside > delta else (low, middle)
    return high


def _corrupted(
    artifact: Artifact, source: LoadedModel, given: Sequence[Prefix], length: int
) -> Iterator[dict[str, Any]]:
    mapper = artifact.mapper
    gate = ContentGate.of(
        artifact.profile, artifact.evidence, mapper.source, mapper.skipped_positions
    )
    caches = [source_cache(source, prefix, length) for prefix in given]
    requests = [_request(artifact, length), *(_request(artifact, length, p) for p in given)]

    def refused(name: str, *, named: bool) -> int:
        count = 0
        for i, cache in enumerate(caches):
            context = Context(mapper.source.rope, caches[i - 1], seed=i)
            spoiled = CORRUPTIONS[name](cache, context) if name in CORRUPTIONS else cache
            request = requests[i + 1] if named else requests[0]
            count += gate.inspect(spoiled, request, "in_domain").reason is not None
        return count

    for name in ("none", *CORRUPTIONS):
        yield {"corruption": name, "refused": refused(name, named=False), "total": len(caches)}
    for name in ("none", "another_documents_cache"):
        count = refused(name, named=True)
        yield {"corruption": f"{name}_with_token_ids", "refused": count, "total": len(caches)}


def _request(artifact: Artifact, length: int, prefix: Prefix | None = None) -> TranslateRequest:
    sides = {
        name: {
            "model": side.model,
            "version": side.version,
            "rope_theta": side.rope.theta,
            "dtype": side.dtype,
        }
        for name, side in (("source", artifact.mapper.source), ("target", artifact.mapper.target))
    }
    said: dict[str, Any] = {**sides, "tokens": length, "layout": "NHD"}
    if prefix is not None:
        rows = sample_rows(length)
        said["sample_token_ids"] = {"rows": rows.tolist(), "ids": prefix.ids[rows].tolist()}
    return TranslateRequest.model_validate_json(json.dumps(said))


def _artifact(root: Path, source: LoadedModel) -> Artifact:
    """The artifact that translates from this model."""
    for path in artifacts.find(root):
        found = artifacts.load(path)
        if found.mapper.source == source.identity:
            return found
    raise typer.BadParameter("no artifact is from this source model")


def _print(rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
