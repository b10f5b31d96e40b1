"""The connector's line to a real service: from an exported cache to a lease with the target's."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mappers.identity import IdentityClaim
from service.buffer_pair import fill
from service.hf import claim_of
from service.vllm.engine import Geometry
from service.vllm.errors import NotLoaded
from service.vllm.link import Link
from service.vllm.params import Handle, Params
from service.vllm.seal import Sealed, mark, seal_bytes, seal_offset, write_seal
from service.vllm.translating import Translating
from tests.service.live import Live
from tests.service.pair import SOURCE, TARGET, cache, good

TOKENS, BLOCK = 40, 8
IDS = [7, 9, *range(100, 138)]
GEOMETRY = Geometry(
    layers=TARGET.num_layers, kv_heads=TARGET.num_kv_heads, head_dim=TARGET.head_dim,
    block_tokens=BLOCK, ranks=1, item_bytes=4, max_tokens=64,
)  # fmt: skip
SECONDS = 60.0


@pytest.fixture(scope="module")
def live(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("engines")
    given = {"artifacts": [str(artifacts)], "shadow_rate": 0, "buffers": str(folder / "s")}
    running = Live(json.dumps(given), folder / "log")
    yield running
    running.stop()


@pytest.fixture
def link(live: Live) -> Iterator[Link]:
    made = Link(f"http://127.0.0.1:{live.port}", SECONDS)
    yield made
    made.close()


def exported(link: Link, *, marked: bool = True, **changes: Any) -> Handle:
    """A source cache in a lease, as a worker leaves it."""
    kv, source = cache(TOKENS), claim_of(SOURCE)
    offset = seal_offset(kv.nbytes)
    leased = link.lease(offset + seal_bytes(TOKENS, 1))
    fill(leased.memory.data, tuple(part for layer in kv.layers() for part in layer))
    write_seal(leased.memory.data, offset, Sealed(source, TOKENS, ranks=1, hops=0), IDS)
    if marked:
        mark(leased.memory.data, offset, TOKENS, 0)
    leased.close()
    said = {
        "buffer": leased.id, "nbytes": leased.memory.nbytes, "tokens": TOKENS,
        "seal_offset": offset, "ranks": 1, "hops": 0, "source": source,
    }  # fmt: skip
    return Handle.model_validate(said | changes)


def mapper(live: Live) -> str:
    return str(live.client.get("/mappers").json()["mappers"][0]["digest"])


def translating(link: Link, target: IdentityClaim | None = None) -> Translating:
    return Translating(link, target or claim_of(TARGET), GEOMETRY)


def soon(seconds: float = SECONDS) -> float:
    return time.monotonic() + seconds


def test_what_lies_in_the_lease_is_what_the_body_would_have_had(live: Live, link: Link) -> None:
    params = Params(handle=exported(link), mapper=mapper(live), domain="chat")
    ready = translating(link)(params, [*IDS, 5, 6], soon())
    covered = ready.receipt.tokens
    assert ready.common_tokens == TOKENS
    assert covered == TOKENS - ready.receipt.native_tail > 0
    body = live.translate(good(tokens=TOKENS, domain="chat", prefix_token_ids=IDS[:2])).content
    tensors = body[8 + int.from_bytes(body[:8], "little") :]
    nbytes = GEOMETRY.cache_bytes(covered)
    assert ready.leased.memory.data[:nbytes].numpy().tobytes() == tensors
    link.release(ready.leased)
    with pytest.raises(NotLoaded, match="no such buffer"):  # it was for one translation
        translating(link)(params, IDS, soon())


def test_a_handle_may_be_kept_for_more(live: Live, link: Link) -> None:
    params = Params(handle=exported(link), mapper=mapper(live), keep=True)
    for _ in range(2):
        link.release(translating(link)(params, IDS, soon()).leased)


def test_a_prompt_that_goes_another_way_says_how_far_it_is_the_same(live: Live, link: Link) -> None:
    params = Params(handle=exported(link), mapper=mapper(live))
    ready = translating(link)(params, [*IDS[:20], 1, 2, 3], soon())
    assert ready.common_tokens == 20
    link.release(ready.leased)


def _refused(live: Live, link: Link, params: Params, prompt: list[int], **changes: Any) -> str:
    leases = live.metric("kvt_buffer_leases")
    target = claim_of(TARGET).model_copy(update=changes)
    with pytest.raises(NotLoaded) as refused:
        translating(link, target)(params, prompt, soon())
    assert live.metric("kvt_buffer_leases") == leases
    return refused.value.reason


def test_refusals_leave_no_lease_behind(live: Live, link: Link) -> None:
    handle, digest = exported(link), mapper(live)
    params = Params(handle=handle, mapper=digest)
    strict = params.model_copy(update={"max_kl": 1e-6})
    assert _refused(live, link, strict, IDS) == "certified_kl_exceeds_threshold"
    assert _refused(live, link, params, IDS, version="another") == "identity_mismatch"
    assert _refused(live, link, params, IDS, model="another") == "pair_not_found"
    assert _refused(live, link, params, [1, *IDS]) == "another_prompt"
    assert _refused(live, link, Params(mapper=digest), IDS) == "no_handle"
    wrong = Params(handle=handle, mapper="sha256:" + "0" * 64)
    assert _refused(live, link, wrong, IDS) == "another_mapper"


def test_handles_that_lie(live: Live, link: Link) -> None:
    handle, digest = exported(link), mapper(live)
    other = claim_of(SOURCE).model_copy(update={"version": "another"})
    lies = [
        {"source": other},
        {"nbytes": handle.nbytes + 4096},
        {"seal_offset": handle.nbytes},
        {"tokens": TOKENS - 1},
        {"ranks": 2},
        {"hops": 1},
    ]
    for lie in lies:
        forged = Params(handle=handle.model_copy(update=lie), mapper=digest)
        assert _refused(live, link, forged, IDS) == "bad_handle"
    gone = Params(handle=handle.model_copy(update={"buffer": "0" * 32}), mapper=digest)
    assert _refused(live, link, gone, IDS) == "buffer_not_found"


def test_an_export_that_is_never_complete_is_waited_for_until_the_deadline(
    live: Live, link: Link
) -> None:
    params = Params(handle=exported(link, marked=False), mapper=mapper(live))
    with pytest.raises(NotLoaded, match="deadline"):
        translating(link)(params, IDS, soon(0.05))


def test_a_service_that_is_not_there() -> None:
    link = Link("http://127.0.0.1:1", 1.0)
    with pytest.raises(NotLoaded, match="ConnectError"):
        link.lease(100)
