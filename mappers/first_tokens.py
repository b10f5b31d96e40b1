"""The table of exact prefixes: the likely first tokens of a prompt, read by the target itself."""

from collections import Counter
from collections.abc import Sequence

import torch

from mappers.collect import cache_of_text
from mappers.corpus import Corpus, leading_tokens
from mappers.models import LoadedModel
from mappers.prefixes import ExactPrefixes, TokenIds


def prefix_ids(
    target: LoadedModel, corpus: Corpus, *, first_tokens: int, texts: Sequence[str]
) -> list[TokenIds]:
    """The token sequences whose KV the artifact shall hold exactly, none twice."""
    leading = leading_tokens(target.tokenizer)
    counted = Counter(int(window[0]) for window in corpus.windows)
    first = [(token,) for token, _ in counted.most_common(first_tokens)]
    openings = [tuple(target.tokenizer(text, verbose=False)["input_ids"]) for text in texts]
    return list(dict.fromkeys([*([leading] if leading else first), *filter(None, openings)]))


def exact_prefixes(target: LoadedModel, sequences: Sequence[TokenIds]) -> ExactPrefixes:
    """The target's own KV for each sequence, read alone from position 0."""
    entries = {ids: cache_of_text(target, torch.tensor(ids)) for ids in sequences}
    return ExactPrefixes.of(entries)
