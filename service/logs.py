"""Logs as JSON lines (or for people), one form for our own and for uvicorn's.

An exception is logged by its type and place in our code: a traceback holds paths, and the text of a
foreign exception may hold anything.
"""

import logging
import sys
import traceback
from pathlib import PurePath
from typing import Any

import structlog
from structlog.typing import EventDict, Processor

from service.settings import Settings


def configure(settings: Settings) -> None:
    """Send all logs of this process to stdout."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _short_exception,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    last: Processor = (
        structlog.processors.JSONRenderer()
        if settings.log_json
        else structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty())
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last],
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.log_level.upper())
    # A closed pipe or a full disk must not become an error of the request that logs.
    logging.raiseExceptions = False


def _short_exception(_logger: object, _method: str, event: EventDict) -> EventDict:
    given = event.pop("exc_info", None)
    if not given:
        return event
    error = given[1] if isinstance(given, tuple) else given
    if not isinstance(error, BaseException):
        error = sys.exc_info()[1]
    if error is not None:
        event.update(described(error))
    return event


def described(error: BaseException) -> dict[str, Any]:
    """The type of an error and its innermost frames, as fields of a log line."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    places = [f"{PurePath(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return {"error": type(error).__name__, "at": places}
