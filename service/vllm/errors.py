"""Why the connector does not start, or does not load."""

from mappers.errors import KVTranslatorError


class EngineRefused(KVTranslatorError):
    """An engine, or a configuration of one, in which the connector would not be safe."""

    code = "engine_refused"


class NotLoaded(KVTranslatorError):
    """There is nothing to load, and the engine prefills; ``reason`` is one word for machines."""

    code = "not_loaded"

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason
