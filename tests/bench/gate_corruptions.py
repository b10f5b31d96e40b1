"""How many spoiled caches the service refuses: one line a corruption.

Caches are the embedded source model's, of held-out documents, those first that the artifact's
evidence does not know. Most meet the content gate alone; the ``..._declared`` and
``..._with_content_digest`` ones go through the whole application, as bytes over ASGI. ``none``:
good caches.
"""

import base64
import hashlib
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from mappers.arms import read_all, read_tail
from mappers.cache import KVCache
from mappers.collect import cache_of_text
from mappers.metrics import Reference
from mappers.sample import sample_rows
from mappers.translate import Translator
from service.app import create_app
from service.content import ContentGate
from service.schemas import TranslateRequest, read_request
from service.settings import Settings
from service.upload import CONTENT_TYPE, Upload
from tests.bench.corruptions import CORRUPTIONS, Context
from tests.bench.gate_data import Family, Prefix, prefixes
from tests.bench.gate_promise import Asked, content_reason, document_for

ASKED = Asked("in_domain", "in_domain")
DIGESTED = ("none", "exponent_bit_flipped", "exponent_bit_cleared", "lowest_bit_flipped")
MET_BY_ALL = 10.0
"""A threshold, nats a token, that keeps no good cache from being translated."""
Line = dict[str, Any]


def unseen(family: Family, *, length: int, count: int) -> list[Prefix]:
    """``count`` in-domain prefixes; documents that the artifact's evidence has not come first."""
    evidence = family.artifact.evidence
    known = {row.document for row in evidence.rows} if evidence else set()
    every = prefixes("in_domain", family.source, length=length)
    return sorted(every, key=lambda prefix: prefix.document in known)[:count]


class Spoiler:
    """Good caches, each with its request, and what a corruption makes of them."""

    def __init__(self, family: Family, given: Sequence[Prefix]) -> None:
        self.family, self.given = family, given
        self.caches = [cache_of_text(family.source, p.ids[: p.length]) for p in given]

    def __len__(self) -> int:
        return len(self.given)

    def spoiled(self, name: str, index: int) -> KVCache:
        """Cache number ``index`` after this corruption; ``none`` leaves it."""
        cache = self.caches[index]
        if name == "none":
            return cache
        rope = self.family.artifact.mapper.source.rope
        return CORRUPTIONS[name](cache, Context(rope, self.caches[index - 1], seed=index))

    def request(self, index: int, cache: KVCache, **said: Any) -> TranslateRequest:
        """As the client that sends ``cache`` would ask, or with other words."""
        document = document_for(self.family.artifact.mapper, self.given[index], ASKED)
        dtype = str(cache.dtype).removeprefix("torch.")
        if dtype != document["source"]["dtype"]:
            document["source"]["kv_dtype"] = dtype
        return read_request(json.dumps(document | said))

    def named_tokens(self, index: int) -> dict[str, list[int]]:
        """96 rows of a prompt and their token ids."""
        ids = self.given[index].ids
        rows = sample_rows(self.given[index].length)
        return {"rows": rows.tolist(), "ids": ids[rows].tolist()}


def corruption_lines(family: Family, *, length: int, count: int) -> Iterator[Line]:
    """All corruptions, at one length; theta at longer ones too."""
    spoiler = Spoiler(family, unseen(family, length=length, count=count))
    yield from content_lines(spoiler)
    yield from served_lines(spoiler)
    for longer in (2 * length, 4 * length, 8 * length):
        more = Spoiler(family, unseen(family, length=longer, count=count))
        for name in ("none", "theta_off_by_2_percent"):
            yield _line(f"{name}_{longer}_tokens", _seen(more, name))
    yield made_smaller(spoiler)


def content_lines(spoiler: Spoiler) -> Iterator[Line]:
    """What the content gate sees in a cache, and what it sees when the request names tokens."""
    for name in ("none", *CORRUPTIONS):
        yield _line(name, _seen(spoiler, name))
    for name in ("none", "another_documents_cache"):
        yield _line(f"{name}_with_token_ids", _seen(spoiler, name, named=True))


def _seen(spoiler: Spoiler, name: str, *, named: bool = False) -> list[bool]:
    gate, refused = _content_gate(spoiler.family), []
    for i in range(len(spoiler)):
        cache = spoiler.spoiled(name, i)
        said = {"sample_token_ids": spoiler.named_tokens(i)} if named else {}
        request = spoiler.request(i, cache, **said)
        refused.append(content_reason(gate, cache, request) is not None)
    return refused


def _content_gate(family: Family) -> ContentGate:
    found, mapper = family.artifact, family.artifact.mapper
    return ContentGate.of(found.profile, found.evidence, mapper.source, mapper.skipped_positions)


def served_lines(spoiler: Spoiler) -> Iterator[Line]:
    """Over the whole application: with Content-Digest, and a theta that is declared as it is."""
    with serving(spoiler.family.folder, max_kl=MET_BY_ALL) as client:
        for name in DIGESTED:
            refused = [_refused_over_http(client, spoiler, name, i) for i in range(len(spoiler))]
            yield _line(f"{name}_with_content_digest", refused)
        refused = [_refused_as_declared(client, spoiler, i) for i in range(len(spoiler))]
        yield _line("theta_off_by_2_percent_declared", refused)


@contextmanager
def serving(folder: Path, *, max_kl: float) -> Iterator[TestClient]:
    """The application over an artifact, with this threshold for all requests."""
    settings = Settings(artifacts=(folder,), max_kl=max_kl, drift_budget=None, shadow_rate=0)
    with TestClient(create_app(settings)) as client:
        while client.get("/startupz").status_code != 200:
            pass
        yield client


def _refused_over_http(client: TestClient, spoiler: Spoiler, name: str, index: int) -> bool:
    """The digest is that of the good body; what arrives is the spoiled one."""
    good = _body(spoiler, index, spoiler.caches[index])
    sent = _lowest_bit(good, index) if name == "lowest_bit_flipped" else good
    if name in CORRUPTIONS:
        sent = _body(spoiler, index, spoiler.spoiled(name, index))
    digest = base64.b64encode(hashlib.sha256(good).digest()).decode()
    return _refused(client, sent, {"content-digest": f"sha-256=:{digest}:"})


def _refused_as_declared(client: TestClient, spoiler: Spoiler, index: int) -> bool:
    """The request names the theta that the cache has."""
    cache = spoiler.spoiled("theta_off_by_2_percent", index)
    request = spoiler.request(index, cache)
    source = request.source.model_copy(update={"rope_theta": 1.02 * request.source.rope_theta})
    body = b"".join(Upload.of(cache, request.model_copy(update={"source": source})))
    return _refused(client, body, {})


def _body(spoiler: Spoiler, index: int, cache: KVCache) -> bytes:
    return b"".join(Upload.of(cache, spoiler.request(index, cache)))


def _lowest_bit(body: bytes, seed: int) -> bytes:
    """The lowest bit of one of the tensors' bytes, which are most of the body."""
    at = len(body) // 4 + seed * 7919 % (len(body) // 2)
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


def _refused(client: TestClient, body: bytes, headers: dict[str, str]) -> bool:
    answer = client.post(
        "/translate", content=body, headers={"content-type": CONTENT_TYPE, **headers}
    )
    return (answer.status_code, answer.headers.get("kvt-decision")) != (200, "translate")


def made_smaller(spoiler: Spoiler) -> Line:
    """What an exponent bit that became 0 and is not seen does to the answer's KL."""
    name = "exponent_bit_cleared"
    refused = _seen(spoiler, name)
    changes = [
        kl_change(spoiler, i, spoiler.spoiled(name, i))
        for i, seen in enumerate(refused)
        if not seen
    ]
    return {
        **_line(f"{name}_kl_change", refused),
        "median": round(statistics.median(changes), 9) if changes else None,
        "largest": round(max(changes), 9) if changes else None,
    }


def kl_change(spoiler: Spoiler, index: int, cache: KVCache) -> float:
    """|KL - KL of the good cache's answer|, native tail 1, nats a token."""
    family, prefix = spoiler.family, spoiler.given[index]
    mapper, dtype = family.artifact.mapper, family.target.model.dtype
    match = mapper.prefixes.longest_match(tuple(prefix.ids.tolist()))
    translator, known = Translator(mapper), None if match is None else match[1]
    caches = [
        translator.translate(c, prefix=known, dtype=dtype) for c in (spoiler.caches[index], cache)
    ]
    _, native = read_all(family.target.model, prefix.ids, (prefix.length,))
    reference = Reference(native[0], prefix.ids[prefix.length :])
    read = read_tail(family.target, caches, prefix.ids, length=prefix.length, tail=1)
    good, spoiled = (reference.compare(logits).kl for logits in read)
    return abs(spoiled - good)


def _line(name: str, refused: Sequence[bool]) -> Line:
    return {"corruption": name, "refused": sum(refused), "total": len(refused)}
