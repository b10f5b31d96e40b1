"""The one error tree of the project.

::

    KVTranslatorError
    |-- UnsupportedModel    a model whose cache cannot be translated, with a reason code
    |-- IdentityMismatch    a cache of another model than the one that the artifact knows
    |-- LayoutError         tensors that do not have the declared layout or geometry
    |-- TooFewData          not enough rows for what was asked of them
    |-- TooLittleMemory     sums that cannot be held in the memory that was allowed
    |-- SingularSystem      rows that do not determine a map, however many they are
    |-- NonFinite           a NaN or an infinity among numbers
    |-- CorpusError         text that cannot be calibrated on
    |-- UnsupportedTask     a task that is not multiple choice
    `-- ArtifactError       a mapper on disk that must not be used

A message names what was given and what was expected, and is safe to show to any caller: no path,
no address, no raw input. ``service/errors.py`` gives each its HTTP status and renders all of them.
"""

from typing import ClassVar


class KVTranslatorError(Exception):
    """Root of the tree; ``code`` is a stable word for machines."""

    code: ClassVar[str] = "error"


class UnsupportedModel(KVTranslatorError):
    """This model's cache cannot be translated; ``reason`` is one word for machines."""

    code = "unsupported_model"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class IdentityMismatch(KVTranslatorError):
    """One field of an identity differs from what the artifact was fitted for."""

    code = "identity_mismatch"

    def __init__(self, side: str, field: str, expected: object, given: object) -> None:
        super().__init__(f"{side}.{field}: the mapper was fitted for {expected}, not {given}")
        self.side, self.field = side, field
        self.expected, self.given = expected, given


class LayoutError(KVTranslatorError):
    """Tensors whose shape, dtype or names do not fit what was declared."""

    code = "layout_error"


class TooFewData(KVTranslatorError):
    """Not enough rows; the message says how many there are and how many are needed."""

    code = "too_few_data"


class TooLittleMemory(KVTranslatorError):
    """Sums larger than the memory allowed for them, however they are cut."""

    code = "too_little_memory"

    def __init__(self, what: str, needed_bytes: int, given_bytes: int) -> None:
        super().__init__(f"{what} take {needed_bytes:,} bytes, of {given_bytes:,} that may be used")
        self.needed_bytes, self.given_bytes = needed_bytes, given_bytes


class SingularSystem(KVTranslatorError):
    """Inputs that do not determine a map: constant, or linear in one another."""

    code = "singular_system"


class NonFinite(KVTranslatorError):
    """A NaN or an infinity where numbers were expected."""

    code = "non_finite"


class CorpusError(KVTranslatorError):
    """Text that yields no usable window."""

    code = "corpus_error"


class UnsupportedTask(KVTranslatorError):
    """A task that cannot be scored over a translated cache."""

    code = "unsupported_task"


class ArtifactError(KVTranslatorError):
    """A mapper on disk that is incomplete, altered or not what it says."""

    code = "artifact_error"
