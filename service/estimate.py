"""How long a translation will take, learned from those that were made."""

MEMORY = 0.95


class RunningFit:
    """Least squares of ``seconds = fixed + slope * tokens``, old observations fading.

    Until two different lengths were seen the time is taken to be proportional to the tokens.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = 0.0
        self._tokens_tokens = self._tokens_seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """One translation of ``tokens`` tokens that took ``seconds``."""
        self._weight = MEMORY * self._weight + 1
        self._tokens = MEMORY * self._tokens + tokens
        self._seconds = MEMORY * self._seconds + seconds
        self._tokens_tokens = MEMORY * self._tokens_tokens + tokens * tokens
        self._tokens_seconds = MEMORY * self._tokens_seconds + tokens * seconds

    def seconds(self, tokens: int) -> float | None:
        """Expected time for ``tokens`` tokens; None before the first observation."""
        if self._weight == 0:
            return None
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._tokens_tokens / self._weight - mean_tokens**2
        if spread <= 1e-9 * mean_tokens**2:
            return mean_seconds * tokens / mean_tokens
        together = self._tokens_seconds / self._weight - mean_tokens * mean_seconds
        slope = max(together / spread, 0.0)
        return max(mean_seconds + slope * (tokens - mean_tokens), 0.0)
