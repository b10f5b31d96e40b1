"""A model of lm-eval (EleutherAI's evaluation harness) whose context is a translated cache.

Needs the extra ``tasks``. lm-eval asks for the log-likelihood of each answer behind a question; the
question but its last tokens is read by the source, translated, and the target reads the rest.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from torch import Tensor

from mappers import hf_compat
from mappers.arms import exact_prefix
from mappers.cache import KVCache
from mappers.collect import cache_of_text, source_cache
from mappers.corpus import leading_tokens
from mappers.errors import UnsupportedTask
from mappers.models import LoadedModel
from mappers.prefixes import ExactPrefixes
from mappers.progress import steps
from mappers.stored import rounded
from mappers.translate import Translator

Reader = Literal["native", "translated", "source"]


class PairModel(LM):  # type: ignore[misc]  # lm-eval has no types
    """One pair as lm-eval sees a model; ``reader`` is who reads the question.

    ``native``: the target alone; ``source``: the source alone, which answers too; ``translated``:
    the target over the translated cache of all but the last ``native_tail`` tokens (a question that
    is no longer than that is read natively, as a caller would).
    """

    def __init__(
        self,
        source: LoadedModel,
        target: LoadedModel,
        translator: Translator,
        prefixes: ExactPrefixes,
        *,
        reader: Reader,
        native_tail: int,
        progress: bool = False,
    ) -> None:
        super().__init__()
        self.progress = progress
        self.source, self.reader, self.native_tail = source, reader, native_tail
        self.answering = source if reader == "source" else target
        self._translator, self._prefixes = translator, prefixes
        self._leading = list(leading_tokens(target.tokenizer))
        # The answers to one question come one after the other.
        self._context = lru_cache(maxsize=2)(self._read)

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Sum of log-probabilities of each continuation, and whether it is the greedy one."""
        numbers = steps(range(len(requests)), f"answering: {self.reader}", show=self.progress)
        return [self._score(*requests[number].args) for number in numbers]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Raises UnsupportedTask: a text without a question has no context to translate."""
        raise UnsupportedTask("only multiple-choice tasks can be scored, not perplexity")

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Raises UnsupportedTask."""
        raise UnsupportedTask("only multiple-choice tasks can be scored, not generation")

    def encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both, cut where the text is; spaces between them go to the continuation."""
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        whole, begun = (self._ids(text) for text in (context + continuation, context))
        context_ids = [*self._leading, *begun]
        if not context_ids or len(whole) <= len(begun):
            raise UnsupportedTask("a question and each of its answers need a token at least")
        return context_ids, whole[len(begun) :]

    def _ids(self, text: str) -> list[int]:
        encoded = self.answering.tokenizer(text, add_special_tokens=False, verbose=False)
        return list(encoded["input_ids"])

    def _score(self, context: str, continuation: str) -> tuple[float, bool]:
        question, answer = self.encode(context, continuation)
        cache = self._context(tuple(question))
        begin = 0 if cache is None else cache.tokens
        ids = torch.tensor([*question, *answer])
        model = self.answering.model
        before = None if cache is None else hf_compat.stacked([cache], model.dtype, model.device)
        at = torch.arange(len(question) - 1, len(ids) - 1) - begin
        logits, _ = hf_compat.read(
            model, ids[None, begin:-1], cache=before, start_position=begin, logits_at=at
        )
        log_p = logits[0].double().log_softmax(-1).cpu()
        chosen = log_p.gather(-1, ids[len(question) :, None])
        return chosen.sum().item(), torch.equal(log_p.argmax(-1), ids[len(question) :])

    def _read(self, question: tuple[int, ...]) -> KVCache | None:
        """What the answering model reads the end of the question over; None for nothing."""
        ids: Tensor = torch.tensor(question)
        translated = len(question) - self.native_tail
        if self.reader != "translated" or translated < 1:
            return cache_of_text(self.answering, ids[:-1]) if len(question) > 1 else None
        original = source_cache(self.source, ids[:translated])
        exact = exact_prefix(self._prefixes, ids, cache_of_text(self.answering, ids[:1]))
        model, kept = self.answering.model, self.answering.identity.storage
        return rounded(self._translator.translate(original, prefix=exact, dtype=model.dtype), kept)


def readers(
    source: LoadedModel,
    target: LoadedModel,
    translator: Translator,
    prefixes: ExactPrefixes,
    *,
    native_tail: int,
    progress: bool,
) -> dict[str, Any]:
    """The three models that are compared, by who reads."""
    found: tuple[Reader, ...] = ("native", "translated", "source")
    options: dict[str, Any] = {"native_tail": native_tail, "progress": progress}
    return {
        reader: PairModel(source, target, translator, prefixes, reader=reader, **options)
        for reader in found
    }
