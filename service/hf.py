"""transformers in one line: a source model's ``DynamicCache`` in, the target's out.

    cache = translate_cache(outputs.cache, client, source=small, target=large, prompt_ids=ids)
    answer = target.generate(ids, cache=cache)    # with None it prefills, as it would anyway

The cache that comes back holds the tokens before the native tail. ``generate`` sees how many those
are and reads the rest of ``ids`` itself, at the right positions; for a bare ``forward`` feed
``unread(cache, ids)``. Models before transformers 5.24 call the argument ``past_key_values``
(``mappers.hf_compat.cache_arguments`` names it for any model). With ``AsyncClient`` the line is
``cache_from(await client.translate(*request_for(outputs.cache, ...)), ids)``.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from mappers.cache import KVCache, from_hf, to_hf
from mappers.errors import LayoutError
from mappers.identity import IdentityClaim, ModelIdentity
from mappers.layouts import Layout
from mappers.probe import PROBE_TOKENS
from mappers.sample import sample_rows
from mappers.stored import AnyCache, store
from service.answer import Outcome, Translated
from service.buffer_pair import BufferPair
from service.client import Client
from service.schemas import TokenSample, TranslateRequest

PREFIX_TOKENS = 64
"""How many first token ids are sent, for the artifact's table of exact prefixes."""


def translate_cache(
    cache: Cache,
    client: Client,
    *,
    source: ModelIdentity | IdentityClaim,
    target: ModelIdentity | IdentityClaim,
    prompt_ids: Tensor,
    probe: Cache | None = None,
    buffers: BufferPair | None = None,
    device: torch.device | str | None = None,
    strict: bool = False,
    **limits: Any,
) -> DynamicCache | None:
    """The target's cache of the first tokens of ``prompt_ids`` (int64 [1, T]), or None: prefill.

    ``cache`` is the source's, of the first S <= T tokens; ``probe`` the target's own, of at least
    the first 64 (``Client.translate``). ``buffers`` are those of ``client``; what comes back is a
    copy and not in them. ``device``: where the target is (default: where ``cache`` is). ``limits``
    are further fields of the request (``max_kl``, ``domain``, ...).
    Raises LayoutError or UnsupportedModel for a cache that cannot be sent; with ``strict``,
    NotTranslated in place of None.
    """
    sent, request = request_for(
        cache, source=source, target=target, prompt_ids=prompt_ids, **limits
    )
    exact = None
    if probe is not None:
        exact = store(from_hf(probe).slice(0, PROBE_TOKENS), request.target.storage)
    outcome = client.translate(sent, request, probe=exact, buffers=buffers, strict=strict)
    return cache_from(outcome, prompt_ids, device=device or sent.positions.device)


def request_for(
    cache: Cache,
    *,
    source: ModelIdentity | IdentityClaim,
    target: ModelIdentity | IdentityClaim,
    prompt_ids: Tensor,
    **limits: Any,
) -> tuple[AnyCache, TranslateRequest]:
    """What ``Client.translate`` takes: the cache [S, H_s, D_s] a layer, and the request for it.

    It is stored as the source's identity says: as views where that changes nothing.
    """
    sent = store(from_hf(cache), claim_of(source).storage)
    return sent, request_of(sent, source=source, target=target, prompt_ids=prompt_ids, **limits)


def request_of(
    sent: AnyCache,
    *,
    source: ModelIdentity | IdentityClaim,
    target: ModelIdentity | IdentityClaim,
    prompt_ids: Tensor,
    **limits: Any,
) -> TranslateRequest:
    """The request for a cache of the first tokens of ``prompt_ids`` (int64 [1, T] or [T]): with
    the first token ids, for exact prefixes, and some others, which show whose cache it is.

    Raises LayoutError for a cache of more tokens.
    """
    if sent.tokens > prompt_ids.shape[-1]:
        raise LayoutError(f"a cache of {sent.tokens} tokens for {prompt_ids.shape[-1]} token ids")
    return TranslateRequest(
        source=claim_of(source),
        target=claim_of(target),
        tokens=sent.tokens,
        layout=Layout.NHD,
        prefix_token_ids=tuple(prompt_ids.flatten()[:PREFIX_TOKENS].tolist()),
        **{"sample_token_ids": _sampled(prompt_ids.flatten(), sent.tokens), **limits},
    )


def cache_from(
    outcome: Outcome, prompt_ids: Tensor, *, device: torch.device | str = "cpu"
) -> DynamicCache | None:
    """A ``DynamicCache`` (batch 1) of the translated tokens; None where there are none.

    At least the last token of ``prompt_ids`` is left to read: without it there are no logits.
    """
    if not isinstance(outcome, Translated):
        return None
    kept = outcome.cache.slice(0, prompt_ids.shape[-1] - 1)
    if kept.tokens == 0:
        return None
    moved = KVCache(
        tuple(keys.to(device) for keys in kept.keys),
        tuple(values.to(device) for values in kept.values),
        kept.positions,
    )
    return to_hf(moved)


def unread(cache: DynamicCache | None, prompt_ids: Tensor) -> Tensor:
    """The part of ``prompt_ids`` [1, T] that the target still has to read, at least one token."""
    return prompt_ids[:, 0 if cache is None else cache.get_seq_length() :]


def _sampled(ids: Tensor, tokens: int) -> TokenSample:
    """The token ids at up to 96 rows, which show that the cache is of this prompt."""
    rows = sample_rows(tokens)
    return TokenSample(rows=tuple(rows.tolist()), ids=tuple(ids[rows.to(ids.device)].tolist()))


def claim_of(model: ModelIdentity | IdentityClaim) -> IdentityClaim:
    """What a request says of a model that is known in full."""
    if isinstance(model, IdentityClaim):
        return model
    shared = set(IdentityClaim.model_fields) & set(ModelIdentity.model_fields)
    return IdentityClaim(
        **{name: getattr(model, name) for name in sorted(shared)},
        rope_theta=model.rope.theta,
        rope_type=model.rope.type,
        rope_parameters=dict(model.rope.parameters),
    )
