"""What a report speaks of: one mapper's evidence, summarised once, and the rule in force."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mappers.accept import Rule, Verdict
from mappers.evidence import Arm, Evidence
from mappers.servable import verdicts
from mappers.summary import Cell, Rows, Setting, by_setting, summarise


@dataclass(frozen=True)
class Findings:
    """Evidence as the report's tables and plots need it."""

    evidence: Evidence
    rule: Rule

    @cached_property
    def rows(self) -> Rows:
        """The rows of each setting."""
        return by_setting(self.evidence)

    @cached_property
    def cells(self) -> Mapping[Setting, Cell]:
        """The means of each setting, in the order of its fields."""
        return summarise(self.evidence)

    @cached_property
    def verdicts(self) -> Mapping[Setting, Verdict]:
        """What the rule says to each measured kind of prompt."""
        return verdicts(self.evidence, self.rule)

    @cached_property
    def domains(self) -> list[str]:
        """Domains as they were measured, in that order."""
        return list(dict.fromkeys(row.domain for row in self.evidence.rows))

    def translated(self, domain: str) -> list[Setting]:
        """The plain translation's settings: first tokens known, no probe, no earlier hop."""
        return [
            key
            for key in self.cells
            if key.domain == domain
            and key.arm is Arm.TRANSLATED
            and (key.prefix_known, key.hops, key.probe_tokens) == (True, 0, 0)
        ]

    def example(self, domain: str, *beside: Arm) -> Setting | None:
        """The setting that speaks for a domain: its longest prompts, with the certified tail.

        Where none is, or it was not measured over nothing and with the arms ``beside``, the middle
        tail of those that were; None without any.
        """
        keys = [key for key in self.translated(domain) if bare(key) in self.cells]
        longest = [key for key in keys if key.length == max(k.length for k in keys)]
        controlled = [
            key for key in longest if all(key._replace(arm=arm) in self.cells for arm in beside)
        ]
        found = controlled or longest
        if not found:
            return None
        certified = self.verdicts[found[0]._replace(native_tail=0)].native_tail
        served = [key for key in found if key.native_tail == certified]
        return served[0] if served else found[len(found) // 2]


def bare(key: Setting) -> Setting:
    """The arm that reads the same tail over nothing."""
    arm, tail = Arm.LAST_TOKENS, key.native_tail
    if tail == 1:
        arm, tail = Arm.NO_CONTEXT, 0
    return Setting(key.domain, key.length, arm, tail, False)
