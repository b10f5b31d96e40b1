"""A trigram model with interpolated back-off: the bar that both demo models must clear."""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class Trigram:
    """Absolute discounting, interpolated down to uniform (Ney, Essen and Kneser 1994)."""

    def __init__(self, tokens: Ids, vocab_size: int, discount: float = 0.75) -> None:
        self.vocab_size = vocab_size
        self.discount = discount
        self._orders = [self._count(tokens, order) for order in (1, 2, 3)]

    def perplexity(self, tokens: Ids) -> float:
        """exp of the mean negative log-likelihood of every token from the third on."""
        probability = np.full(len(tokens) - 2, 1.0 / self.vocab_size)
        for order, (grams, counts, contexts, totals, kinds) in enumerate(self._orders, start=1):
            keys = self._keys(tokens, order)[3 - order :]
            gram_count = _look_up(grams, counts, keys)
            at = keys // self.vocab_size
            total, kind = _look_up(contexts, totals, at), _look_up(contexts, kinds, at)
            seen = total > 0
            direct = np.maximum(gram_count - self.discount, 0.0) / np.maximum(total, 1.0)
            back_off = np.where(seen, self.discount * kind / np.maximum(total, 1.0), 1.0)
            probability = direct + back_off * probability
        return float(np.exp(-np.log(probability).mean()))

    def _keys(self, tokens: Ids, order: int) -> Ids:
        """One integer a position: the last ``order`` tokens in base ``vocab_size``."""
        length = len(tokens) - order + 1
        keys = np.zeros(length, dtype=np.int64)
        for offset in range(order):
            keys = keys * self.vocab_size + tokens[offset : offset + length]
        return keys

    def _count(self, tokens: Ids, order: int) -> tuple[Ids, Ids, Ids, Ids, Ids]:
        grams, counts = np.unique(self._keys(tokens, order), return_counts=True)
        contexts, first, kinds = np.unique(
            grams // self.vocab_size, return_index=True, return_counts=True
        )
        return grams, counts, contexts, np.add.reduceat(counts, first), kinds


def _look_up(keys: Ids, values: Ids, wanted: Ids) -> NDArray[np.float64]:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0).astype(np.float64)
