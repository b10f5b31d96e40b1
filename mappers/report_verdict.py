"""The report's first screen: the verdict in one sentence, and where the mapper may serve."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from mappers.accept import Rule, Verdict
from mappers.findings import Findings, bare
from mappers.report_tables import nats, percent
from mappers.servable import why_not_servable
from mappers.summary import Setting, recovered


class Place(NamedTuple):
    """One kind of prompt: how it is answered and why; ``grade`` is good, fair or bad."""

    grade: str
    answer: str
    why: str


class Glance(NamedTuple):
    """All kinds of prompt: a line for each domain and knowledge of first tokens, by length.

    ``promise`` is what "may serve" means.
    """

    promise: str
    lengths: list[int]
    lines: list[tuple[str, str, list[Place | None]]]


def grade(findings: Findings) -> str:
    """How the verdict is coloured: good when every kind with known first tokens may be served."""
    known = [v.decision == "translate" for key, v in findings.verdicts.items() if key.prefix_known]
    return "good" if known and all(known) else "fair" if any(known) else "bad"


def sentence(findings: Findings) -> str:
    """One sentence: whether the mapper may serve under the rule, where not, and what it gives."""
    if not findings.verdicts:
        return "Nothing translated was measured."
    threshold = f"at a KL of {findings.rule.max_kl:g} nats a token"
    reason = why_not_servable(findings.evidence, findings.rule)
    if reason is not None:
        return f"Not servable {threshold}: {reason}{_gain(findings)}."
    known = {key: found for key, found in findings.verdicts.items() if key.prefix_known}
    refused = [key for key, found in known.items() if found.decision != "translate"]
    count = f"{len(known) - len(refused)} of" if refused else "all"
    where = f" (not {_places(refused)})" if refused else ""
    return (
        f"Servable {threshold}: {count} {len(known)} measured kinds of prompt are "
        f"certified{where}{_gain(findings)}."
    )


def glance(findings: Findings) -> Glance:
    """How every measured kind of prompt is answered under the rule."""
    lengths = sorted({key.length for key in findings.verdicts})
    lines: list[tuple[str, str, list[Place | None]]] = []
    for domain in findings.domains:
        for known, first in ((True, "known"), (False, "unknown")):
            found = {
                key.length: _place(findings, key, verdict)
                for key, verdict in findings.verdicts.items()
                if (key.domain, key.prefix_known) == (domain, known)
            }
            lines.append((domain, first, [found.get(length) for length in lengths]))
    return Glance(promise(findings.rule), lengths, lines)


def promise(rule: Rule) -> str:
    """What the rule guarantees of the answers that are translations."""
    confidence = f"with {100 * (1 - rule.delta):g} % confidence"
    if rule.risk == "mean":
        clipped = f"each counted as {rule.kl_clip:g} at most"
        return (
            f"the mean of their KLs, {clipped}, is below {rule.max_kl:g} nats a token {confidence}"
        )
    share = f"at most {100 * rule.alpha:g} % of them have a KL above {rule.max_kl:g} nats a token"
    return f"{share} {confidence}"


def _places(keys: Sequence[Setting]) -> str:
    """Lengths by domain."""
    lengths: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        lengths[key.domain].append(f"{key.length}")
    return "; ".join(f"{domain} of {', '.join(of)} tokens" for domain, of in lengths.items())


def _place(findings: Findings, key: Setting, verdict: Verdict) -> Place:
    if verdict.decision == "translate":
        share = 1 - verdict.native_tail / key.length
        bound = f"tail {verdict.native_tail}, KL at most {nats(verdict.kl_bound)}"
        return Place("good" if share >= 0.5 else "fair", f"{percent(share)} translated", bound)
    return Place("bad", "re-prefill", _why_not(findings, verdict))


def _why_not(findings: Findings, verdict: Verdict) -> str:
    needed = findings.rule.documents_needed()
    if verdict.kl_bound is not None and not verdict.kl_bound <= findings.rule.max_kl:
        return f"KL up to {nats(verdict.kl_bound)}"
    if verdict.kl_bound is None and verdict.rows < needed:
        return f"{verdict.rows} of {needed} documents"
    return "no gain seen"


def _gain(findings: Findings) -> str:
    """What the first domain's example gains over reading its tail alone."""
    key = findings.example(findings.domains[0])
    if key is None:
        return ""
    own, alone = findings.cells[key].kl, findings.cells[bare(key)].kl
    against = "better than" if own < alone else "no better than"
    context = recovered(findings.cells, key).context
    return (
        f"; on {key.domain} prompts of {key.length} tokens with a native tail of "
        f"{key.native_tail}, the mean KL is {nats(own)}, {against} that tail alone "
        f"({nats(alone)}), and {percent(context)} of the context is recovered"
    )
