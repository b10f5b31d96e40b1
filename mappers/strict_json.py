"""JSON that means one thing: no duplicate key, no NaN or infinity, UTF-8 only."""

import json
from typing import Any, NoReturn


class BadJSON(ValueError):
    """Not the strict JSON that was expected; never quotes the input."""


def loads(raw: bytes | bytearray | memoryview) -> Any:
    """Parse; raises ``BadJSON`` for anything that some other parser might read differently."""
    try:
        return json.loads(
            str(raw, "utf-8"), object_pairs_hook=_distinct, parse_constant=_no_constant
        )
    except BadJSON:
        raise
    except (ValueError, RecursionError) as error:
        raise BadJSON("not valid JSON") from error


def dumps(value: Any) -> bytes:
    """ASCII for people: sorted keys, indented, a newline at the end; ``ValueError`` for NaN."""
    return json.dumps(value, sort_keys=True, indent=2, allow_nan=False).encode("ascii") + b"\n"


def dumps_compact(value: Any) -> bytes:
    """ASCII for machines: keys in their order, no space; ``ValueError`` for NaN."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise BadJSON("a key appears twice")
    return found


def _no_constant(_: str) -> NoReturn:
    raise BadJSON("NaN and infinity are not JSON")
