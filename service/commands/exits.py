"""Exit codes of ``kvt``, and the one place that turns an error into a line and a code.

====  =====================================================================
code  meaning
====  =====================================================================
0     done
1     a fault of ours; Python's traceback says where
2     the command line, an environment variable or the YAML file is wrong
3     a model that is not supported, or another one than the artifact is for
4     an artifact that is incomplete, altered or not what it says
5     data: text, tensors or files that cannot be used
6     the server cannot be reached, or did not start
10    the decision is re-prefill (``kvt translate``), or a demo that shows one
130   interrupted
====  =====================================================================
"""

import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from mappers.errors import (
    ArtifactError,
    IdentityMismatch,
    KVTranslatorError,
    UnsupportedModel,
)


class Code(IntEnum):
    """What a shell script may rely on."""

    USAGE = 2
    IDENTITY = 3
    ARTIFACT = 4
    DATA = 5
    SERVER = 6
    REPREFILL = 10
    INTERRUPTED = 130


class Failure(Exception):
    """A command ends here: one line for a person and a code for a script."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


def code_of(error: KVTranslatorError) -> Code:
    """The exit code of an error of the library."""
    if isinstance(error, UnsupportedModel | IdentityMismatch):
        return Code.IDENTITY
    return Code.ARTIFACT if isinstance(error, ArtifactError) else Code.DATA


class OneLineErrors(TyperGroup):
    """The group of all commands: every expected error becomes one line on stderr and a code."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """As click's, but never with a usage box or a traceback for what a caller did."""
        extra["standalone_mode"] = False
        try:
            code = super().main(args, *rest, **extra)
        except typer.TyperException as error:
            _stop(Code.USAGE, error.format_message())
        except Failure as error:
            _stop(error.code, str(error))
        except KVTranslatorError as error:
            _stop(code_of(error), said_by(error))
        except OSError as error:
            _stop(Code.DATA, _system(error))
        if code == Code.INTERRUPTED:
            _stop(Code.INTERRUPTED, "interrupted")
        sys.exit(code)


def said_by(error: KVTranslatorError) -> str:
    """Its message, after the reason word of an unsupported model."""
    return f"{error.reason}: {error}" if isinstance(error, UnsupportedModel) else str(error)


def fault_of(error: ValidationError) -> str:
    """The first fault, with the name of the option that it is about."""
    first = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    what = first["msg"].removeprefix("Value error, ")  # of validators of our own
    return f"{name.replace('_', '-')}: {what}" if name else what


def _system(error: OSError) -> str:
    """The path is one that the caller named on the command line."""
    name = f"{error.filename}: " if error.filename else ""
    return f"{name}{error.strerror or type(error).__name__}"


def say(message: str) -> None:
    """One line on the error stream."""
    typer.echo(f"kvt: {' '.join(message.split())}", err=True)


def _stop(code: Code, message: str) -> None:
    say(message)
    sys.exit(int(code))
