"""What one check has found: a verdict, the facts, what to change, and the exit code of a failure.

Facts may hold names and numbers that the service or a configuration states, never paths or raw
input.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from service.commands.exits import Code

Verdict = Literal["ok", "warn", "fail"]


class Finding(BaseModel):
    """``change`` is empty where there is nothing to change; ``code`` is there for a failure."""

    model_config = ConfigDict(frozen=True)

    check: str
    verdict: Verdict
    found: str
    change: str = ""
    code: Code | None = None


def ok(check: str, found: str) -> Finding:
    """As it should be."""
    return Finding(check=check, verdict="ok", found=found)


def warn(check: str, found: str, change: str) -> Finding:
    """It works, but not as well as it could."""
    return Finding(check=check, verdict="warn", found=found, change=change)


def fail(check: str, code: Code, found: str, change: str) -> Finding:
    """Nothing is translated, or should be, until this is changed."""
    return Finding(check=check, verdict="fail", found=found, change=change, code=code)
