"""Why a mapper may not serve anything at all: one line for people."""

from math import inf

from mappers.accept import Rule, Verdict, decide
from mappers.evidence import Arm, Evidence
from mappers.summary import Setting, by_setting, compared, point


def why_not_servable(
    evidence: Evidence | None,
    rule: Rule,
    *,
    rows_an_input: float = inf,
    min_rows_an_input: float = 0,
) -> str | None:
    """One line that says why no request can be answered by translating; None where some can.

    Every measured domain and length is asked for, with first tokens known and unknown.
    ``rows_an_input``: of the fit; with fewer than the least, no evidence is good enough.
    """
    if evidence is None:
        return "it has no evidence; kvt evaluate adds some"
    if not rows_an_input >= min_rows_an_input:
        few = f"it was fitted on only {rows_an_input:.1f} rows an input"
        return f"{few}, {min_rows_an_input:g} are needed"
    found = verdicts(evidence, rule)
    if any(verdict.decision == "translate" for verdict in found.values()):
        return None
    certified = [(v.kl_bound, s, v) for s, v in found.items() if v.kl_bound is not None]
    if not certified:
        most = max((verdict.rows for verdict in found.values()), default=0)
        needed = rule.documents_needed()
        return f"{most} documents of a length were measured, {needed} are needed"
    bound, setting, verdict = min(certified, key=lambda entry: entry[:2])
    place = f"{setting.domain}, {setting.length} tokens"
    if verdict.reason == "no_evidence":
        return f"translating is not seen to help anywhere: {_against(evidence, setting)}, {place}"
    line = f"the lowest certified KL is {bound:.3g}, above {rule.max_kl:g} ({place})"
    hint = _against(evidence, setting)
    return f"{line}; {hint}" if hint else line


def verdicts(evidence: Evidence, rule: Rule) -> dict[Setting, Verdict]:
    """What the rule says to prompts of each measured domain and length, by setting (tail 0)."""
    measured = {(b.domain, n) for b, by_n in evidence.translated.items() for n in by_n}
    return {
        Setting(domain, length, Arm.TRANSLATED, 0, known): decide(
            evidence, tokens=length, domain=domain, prefix_known=known, rule=rule
        )
        for domain, length in sorted(measured)
        for known in (True, False)
    }


def _against(evidence: Evidence, setting: Setting) -> str:
    """What a useless translation is no better than, at the setting's smallest tail."""
    rows = by_setting(evidence)
    tails = [key for key in rows if key._replace(native_tail=0) == setting]
    own = min(tails, key=lambda key: key.native_tail)
    kl = point([row.kl for row in rows[own]]).mean
    arm = Arm.NO_CONTEXT if own.native_tail == 1 else Arm.LAST_TOKENS
    tail = 0 if arm is Arm.NO_CONTEXT else own.native_tail
    others = {
        "another document's cache": own._replace(arm=Arm.WRONG_DOCUMENT, prefix_known=True),
        "no cache at all": own._replace(arm=arm, native_tail=tail, prefix_known=False),
    }
    for name, other in others.items():
        found = compared(rows, own, other)
        if found is not None and not found.high < 0:
            other_kl = point([row.kl for row in rows[other]]).mean
            return f"a KL of {kl:.3g} is no better than with {name} ({other_kl:.3g})"
    return ""
