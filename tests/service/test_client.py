"""The clients against the real service, and against answers that no client may believe."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

from mappers.cache import KVCache
from mappers.errors import LayoutError
from mappers.layouts import Layout
from mappers.translate import Translator
from service import wire
from service.answer import MAX_JSON_BYTES
from service.app import create_app
from service.client import AsyncClient, Client, NotTranslated, Outcome, Reprefill, Translated
from service.schemas import Receipt, TranslateRequest
from service.settings import Settings
from service.upload import CHUNK_BYTES, Upload, memory_of
from tests.service.live import Live
from tests.service.pair import KLS, PREFIX_IDS, SOURCE, TARGET, cache, document, mapper

TOKENS = 40


def request(tokens: int = TOKENS, **changes: Any) -> TranslateRequest:
    return TranslateRequest.model_validate(document(tokens, **changes), strict=False)


def wanted(sent: KVCache, tokens: int, dtype: torch.dtype = torch.float32) -> KVCache:
    """What the library gives, with the known prefix."""
    built = mapper()
    match = built.prefixes.longest_match(PREFIX_IDS)
    assert match is not None
    return Translator(built).translate(sent, tokens=tokens, prefix=match[1], dtype=dtype)


def assert_equal(given: KVCache, expected: KVCache) -> None:
    assert given.num_layers == expected.num_layers
    for ours, theirs in zip(
        given.keys + given.values, expected.keys + expected.values, strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert torch.equal(given.positions, expected.positions)


@pytest.fixture
def client(live: Live) -> Iterator[Client]:
    with Client(f"http://127.0.0.1:{live.port}") as running:
        yield running


@asynccontextmanager
async def in_process(artifacts: Path, **changes: Any) -> AsyncIterator[AsyncClient]:
    """The asynchronous client and the whole application in one event loop."""
    app = create_app(Settings(artifacts=(artifacts,), shadow_rate=0, **changes))
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        AsyncClient("http://service", transport=transport) as running,
    ):
        while not app.state.service.store.ready:
            await asyncio.sleep(0.01)
        yield running


class TestTranslate:
    def test_a_translation_is_the_librarys_bit_for_bit(self, client: Client) -> None:
        sent = cache(TOKENS)
        outcome = client.translate(sent, request())
        assert isinstance(outcome, Translated)
        assert outcome.receipt.native_tail == 1
        assert_equal(outcome.cache, wanted(sent, TOKENS - 1))

    def test_the_asynchronous_client_says_the_same(self, artifacts: Path) -> None:
        sent = cache(TOKENS)

        async def exchange() -> list[Any]:
            async with in_process(artifacts) as running:
                outcomes = [
                    await running.translate(sent, request()),
                    await running.translate(sent, request(max_kl=1e-6)),
                ]
                with pytest.raises(NotTranslated):
                    await running.translate(sent, request(max_kl=1e-6), strict=True)
                documents = [await running.plan(request()), await running.mappers()]
                return [*outcomes, *documents, await running.info(), await running.health()]

        translated, refused, plan, mappers, info, health = asyncio.run(exchange())
        assert isinstance(translated, Translated)
        assert_equal(translated.cache, wanted(sent, TOKENS - 1))
        assert refused.reason == "certified_kl_exceeds_threshold"
        assert (plan.decision, plan.native_tail) == ("translate", 1)
        assert [m.id for m in mappers.mappers] == info.mappers
        assert health.status == "ok"

    def test_a_deadline_goes_with_either_way(self, artifacts: Path, tmp_path: Path) -> None:
        async def exchange() -> list[Outcome]:
            async with in_process(artifacts, buffers=tmp_path / "s") as running:
                async with running.buffers() as shared:
                    ways: list[dict[str, Any]] = [{}, {"buffers": shared}]
                    return [
                        await running.translate(cache(TOKENS), request(), deadline_seconds=d, **way)
                        for way in ways
                        for d in (0, 600)
                    ]

        outcomes = asyncio.run(exchange())
        late = [o for o in outcomes if isinstance(o, Reprefill)]
        assert [o.reason for o in late] == ["would_miss_deadline"] * 2
        assert outcomes[::2] == late

    @pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), 1e9])
    def test_a_deadline_that_is_no_time(self, client: Client, seconds: float) -> None:
        with pytest.raises(ValueError, match="a deadline is"):
            client.translate(cache(TOKENS), request(), deadline_seconds=seconds)

    def test_sixteen_bit_storage_and_strided_layers(self, client: Client) -> None:
        sent = cache(TOKENS, dtype="bfloat16")
        strided = KVCache(
            tuple(k.transpose(0, 1).contiguous().transpose(0, 1) for k in sent.keys),
            tuple(v.transpose(0, 1).contiguous().transpose(0, 1) for v in sent.values),
            sent.positions,
        )
        assert not strided.keys[0].is_contiguous()
        said = document(TOKENS)
        for side in ("source", "target"):
            said[side]["kv_dtype"] = "bfloat16"
        outcome = client.translate(strided, TranslateRequest.model_validate(said, strict=False))
        assert isinstance(outcome, Translated)
        assert_equal(outcome.cache, wanted(sent, TOKENS - 1, torch.bfloat16))

    def test_one_client_serves_many_requests(self, client: Client) -> None:
        for seed in range(3):
            sent = cache(TOKENS, seed=seed)
            outcome = client.translate(sent, request())
            assert isinstance(outcome, Translated)
            assert_equal(outcome.cache, wanted(sent, TOKENS - 1))

    def test_a_request_must_describe_its_cache(self, client: Client) -> None:
        for sent, said in (
            (cache(TOKENS), request(TOKENS + 1)),
            (cache(TOKENS, start_position=4), request()),
            (cache(TOKENS), request(layout="HND")),
        ):
            with pytest.raises(LayoutError):
                client.translate(sent, said)


class TestReprefill:
    def test_the_gates_decision(self, client: Client) -> None:
        outcome = client.translate(cache(TOKENS), request(max_kl=1e-6))
        assert isinstance(outcome, Reprefill)
        assert (outcome.status, outcome.code) == (200, None)
        assert outcome.reason == "certified_kl_exceeds_threshold"
        assert (outcome.kl_bound, outcome.max_kl) == (KLS[True, 32], 1e-6)
        assert outcome.mapper is not None
        assert not outcome.retryable

    @pytest.mark.parametrize(
        ("field", "value", "status", "code"),
        [
            ("rope_theta", 9_999.0, 409, "identity_mismatch"),
            ("model", "another", 404, "pair_not_found"),
        ],
    )
    def test_refusals_keep_status_and_code(
        self, client: Client, field: str, value: object, status: int, code: str
    ) -> None:
        said = document(TOKENS)
        said["source"][field] = value
        outcome = client.translate(
            cache(TOKENS), TranslateRequest.model_validate(said, strict=False)
        )
        assert isinstance(outcome, Reprefill)
        assert (outcome.status, outcome.code, outcome.reason) == (status, code, code)
        assert outcome.detail
        assert not outcome.retryable

    def test_values_that_are_not_finite(self, client: Client) -> None:
        sent = cache(TOKENS)
        sent.values[1][3, 0, 0] = float("nan")
        outcome = client.translate(sent, request())
        assert isinstance(outcome, Reprefill)
        assert outcome.reason == "non_finite"

    def test_strict_raises_and_keeps_the_outcome(self, client: Client) -> None:
        with pytest.raises(NotTranslated, match="certified_kl_exceeds_threshold") as caught:
            client.translate(cache(TOKENS), request(max_kl=1e-6), strict=True)
        assert caught.value.outcome.status == 200

    def test_nobody_listens(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        with Client(f"http://127.0.0.1:{port}") as alone:
            outcome = alone.translate(cache(TOKENS), request())
            assert isinstance(outcome, Reprefill)
            assert (outcome.reason, outcome.status, outcome.retryable) == (
                "unreachable",
                None,
                True,
            )
            assert str(port) not in outcome.detail
            with pytest.raises(NotTranslated):
                alone.translate(cache(TOKENS), request(), strict=True)
            with pytest.raises(NotTranslated, match="unreachable"):
                alone.info()

    def test_a_connection_that_breaks_off_in_the_answer(self, answer: httpx.Response) -> None:
        half = answer.content[: len(answer.content) // 2]
        head = "".join(f"{k}: {v}\r\n" for k, v in answer.headers.items())
        with (
            one_answer(f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + half) as url,
            Client(url) as running,
        ):
            outcome = running.translate(cache(TOKENS), request())
        assert isinstance(outcome, Reprefill)
        assert (outcome.reason, outcome.retryable) == ("unreachable", True)

    def test_a_page_of_a_proxy(self) -> None:
        outcome = answered(502, b"<html>Bad Gateway</html>", {"content-type": "text/html"})
        assert isinstance(outcome, Reprefill)
        assert (outcome.reason, outcome.status, outcome.code) == ("http_502", 502, None)

    def test_when_to_come_again(self) -> None:
        body = (
            b'{"code": "overloaded", "detail": "full", "retryable": true, "decision": "reprefill"}'
        )
        outcome = answered(429, body, {"retry-after": "7"})
        assert isinstance(outcome, Reprefill)
        assert (outcome.code, outcome.retryable, outcome.retry_after_seconds) == (
            "overloaded",
            True,
            7,
        )

    def test_a_decision_in_the_body_alone_is_none(self, answer: httpx.Response) -> None:
        headers = {k: v for k, v in answer.headers.items() if k != "kvt-decision"}
        assert isinstance(answered(200, b"{}", headers), Reprefill)
        headers["kvt-decision"] = "translate"
        assert isinstance(answered(206, answer.content, headers), Reprefill)

    @pytest.mark.parametrize("status", [503, 500, 307])
    def test_nothing_is_sent_twice(self, status: int) -> None:
        seen: list[httpx.Request] = []

        def handle(sent: httpx.Request) -> httpx.Response:
            seen.append(sent)
            return httpx.Response(status, headers={"retry-after": "0", "location": "/again"})

        assert isinstance(through(handle), Reprefill)
        assert len(seen) == 1


class TestUpload:
    def test_the_body_is_safetensors_with_its_length_said(self) -> None:
        bodies: list[httpx.Request] = []

        def handle(sent: httpx.Request) -> httpx.Response:
            sent.read()
            bodies.append(sent)
            return httpx.Response(500)

        through(handle)
        body = bodies[0].content
        assert bodies[0].headers["content-length"] == str(len(body))
        assert "transfer-encoding" not in bodies[0].headers
        loaded = safetensors.torch.load(body)
        sent = cache(TOKENS)
        for index, (keys, values) in enumerate(zip(sent.keys, sent.values, strict=True)):
            assert torch.equal(loaded[f"layers.{index}.k"], keys)
            assert torch.equal(loaded[f"layers.{index}.v"], values)

    def test_contiguous_layers_are_not_copied_beforehand(self) -> None:
        sent = cache(TOKENS)
        single = KVCache(
            tuple(k.clone() for k in sent.keys),
            tuple(v.clone() for v in sent.values),
            sent.positions,
        )
        parts = iter(Upload.of(single, request()))
        next(parts)
        single.keys[0].fill_(3.0)
        assert torch.frombuffer(bytearray(next(parts)), dtype=torch.float32).eq(3.0).all()

    def test_chunks_are_bounded(self) -> None:
        tokens = 3 * CHUNK_BYTES // (TARGET.num_kv_heads * TARGET.head_dim * 4)
        upload = Upload.of(cache(tokens), request(tokens))
        sizes = [len(chunk) for chunk in upload]
        assert max(sizes) == CHUNK_BYTES
        assert sum(sizes) == upload.content_length


class TestDocuments:
    def test_plan_mappers_info_health(self, client: Client) -> None:
        plan = client.plan(request())
        assert (plan.decision, plan.tokens, plan.native_tail) == ("translate", TOKENS - 1, 1)
        assert plan.kl_bound == KLS[True, 1]
        listed = client.mappers().mappers
        assert [m.state for m in listed] == ["ready"]
        assert listed[0].source is not None
        assert listed[0].source.rope_theta == SOURCE.rope.theta
        assert client.info().mappers == [listed[0].id]
        assert client.health().status == "ok"

    def test_a_refused_plan_raises(self, client: Client) -> None:
        said = document(TOKENS)
        said["target"]["model"] = "another"
        with pytest.raises(NotTranslated, match="pair_not_found"):
            client.plan(TranslateRequest.model_validate(said, strict=False))

    def test_an_answer_of_another_kind_raises(self) -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"hello": 1}))
        with Client("http://service", transport=transport) as other:
            with pytest.raises(NotTranslated, match="bad_answer"):
                other.info()


@pytest.fixture
def answer(live: Live) -> httpx.Response:
    """A good answer to ``request()``, to be spoiled."""
    upload = Upload.of(cache(TOKENS), request())
    sent = live.client.post("/translate", content=b"".join(upload), headers=upload.headers)
    assert sent.headers["kvt-decision"] == "translate"
    return sent


def through(handle: Callable[[httpx.Request], httpx.Response]) -> Outcome:
    with Client("http://service", transport=httpx.MockTransport(handle)) as running:
        return running.translate(cache(TOKENS), request())


def answered(status: int, body: bytes, headers: dict[str, str], chunk: int = 1000) -> Outcome:
    """The outcome when the service answers this, in chunks that end anywhere."""

    def chunks() -> Iterator[bytes]:
        yield from (body[at : at + chunk] for at in range(0, len(body), chunk))

    return through(lambda _: httpx.Response(status, headers=headers, content=chunks()))


Spoil = Callable[[wire.Header, Receipt, bytes], tuple[list[Any], dict[str, str], bytes]]


def rebuilt(answer: httpx.Response, spoil: Spoil | None = None) -> tuple[bytes, dict[str, str]]:
    """The answer written anew, with something changed on the way."""
    size = wire.header_length(answer.content[:8])
    header = wire.parse_header(answer.content[8 : 8 + size])
    receipt = Receipt.model_validate_json(header.metadata["kvt"])
    data = answer.content[8 + size :]
    specs = [(name, s.dtype, s.shape) for name, s in header.tensors.items()]
    metadata = header.metadata
    if spoil is not None:
        specs, metadata, data = spoil(header, receipt, data)
    head, _ = wire.write_header(specs, metadata)
    body = head + data
    return body, {**answer.headers, "content-length": str(len(body))}


def said(receipt: Receipt, **changes: Any) -> dict[str, str]:
    return {"kvt": receipt.model_copy(update=changes).model_dump_json()}


def specs_of(header: wire.Header) -> list[Any]:
    return [(name, s.dtype, s.shape) for name, s in header.tensors.items()]


def renamed(header: wire.Header, old: str, new: str) -> list[Any]:
    return [(new if n == old else n, d, s) for n, d, s in specs_of(header)]


ROW = TARGET.num_kv_heads * TARGET.head_dim
SPOILED: dict[str, Spoil] = {
    "no receipt": lambda h, r, d: (specs_of(h), {}, d),
    "receipt is not JSON": lambda h, r, d: (specs_of(h), {"kvt": "{"}, d),
    "more tokens than asked": lambda h, r, d: (specs_of(h), said(r, native_tail=0), d),
    "tail does not fit": lambda h, r, d: (specs_of(h), said(r, native_tail=2), d),
    "negative tail": lambda h, r, d: (
        specs_of(h),
        said(r, native_tail=-1, tokens=r.tokens + 2),
        d,
    ),
    "another position": lambda h, r, d: (specs_of(h), said(r, start_position=1), d),
    "another layout": lambda h, r, d: (specs_of(h), said(r, layout=Layout.HND), d),
    "another dtype": lambda h, r, d: (specs_of(h), said(r, dtype="bfloat16"), d),
    "another text": lambda h, r, d: (specs_of(h), said(r, token_ids_sha256="0" * 64), d),
    "keys and values swapped": lambda h, r, d: (
        [specs_of(h)[i ^ 1] for i in range(len(h.tensors))],
        said(r),
        d,
    ),
    "a layer is missing": lambda h, r, d: (
        renamed(h, "layers.3.v", "layers.4.v"),
        said(r),
        d,
    ),
    "half a layer": lambda h, r, d: (specs_of(h)[:-1], said(r), d[: -len(d) // 8]),
    "a layer too few": lambda h, r, d: (specs_of(h)[:-2], said(r), d[: -len(d) // 4]),
    "one shape differs": lambda h, r, d: (
        [*specs_of(h)[:-1], ("layers.3.v", "float32", (TOKENS - 1, ROW // 4, 4))],
        said(r),
        d,
    ),
    "one token too few": lambda h, r, d: (
        [(n, t, (TOKENS - 2, *s[1:])) for n, t, s in specs_of(h)],
        said(r),
        d[: -len(h.tensors) * ROW * 4],
    ),
    "bytes are missing": lambda h, r, d: (specs_of(h), said(r), d[:-1]),
    "a byte too many": lambda h, r, d: (specs_of(h), said(r), d + b"\0"),
    "not finite": lambda h, r, d: (specs_of(h), said(r), d[:-4] + b"\0\0\x80\x7f"),
}


class TestBadAnswer:
    def test_the_unspoiled_answer_is_good(self, answer: httpx.Response) -> None:
        body, headers = rebuilt(answer)
        for chunk in (1, 7, 8, 1000, len(body)):
            outcome = answered(200, body, headers, chunk)
            assert isinstance(outcome, Translated)
            assert_equal(outcome.cache, wanted(cache(TOKENS), TOKENS - 1))

    @pytest.mark.parametrize("fault", SPOILED)
    def test_a_spoiled_answer_is_not_used(self, answer: httpx.Response, fault: str) -> None:
        body, headers = rebuilt(answer, SPOILED[fault])
        claimed = request(target=claimed_target()) if fault == "a layer too few" else request()

        def handle(_: httpx.Request) -> httpx.Response:
            return httpx.Response(200, headers=headers, content=iter([body]))

        with Client("http://service", transport=httpx.MockTransport(handle)) as running:
            outcome = running.translate(cache(TOKENS), claimed)
            with pytest.raises(NotTranslated):
                running.translate(cache(TOKENS), claimed, strict=True)
        assert isinstance(outcome, Reprefill)
        assert (outcome.reason, outcome.status) == ("bad_answer", 200)

    @pytest.mark.parametrize("cut", [0, 4, 8, 100, -1])
    def test_a_short_answer_is_not_used(self, answer: httpx.Response, cut: int) -> None:
        outcome = answered(200, answer.content[:cut], dict(answer.headers))
        assert isinstance(outcome, Reprefill)
        assert (outcome.reason, outcome.status) == ("bad_answer", 200)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("content-encoding", "gzip"),
            ("content-type", "application/json"),
            ("content-length", "17"),
        ],
    )
    def test_headers_that_do_not_fit(self, answer: httpx.Response, name: str, value: str) -> None:
        headers = {**answer.headers, name: value}
        outcome = answered(200, answer.content, headers)
        assert isinstance(outcome, Reprefill)
        assert outcome.reason == "bad_answer"

    def test_a_header_that_is_too_long(self, answer: httpx.Response) -> None:
        long = (wire.MAX_HEADER_BYTES + 8).to_bytes(8, "little") + answer.content[8:]
        outcome = answered(200, long, dict(answer.headers))
        assert isinstance(outcome, Reprefill)
        assert "header" in outcome.detail

    def test_a_document_that_never_ends(self) -> None:
        outcome = answered(500, b" " * (MAX_JSON_BYTES + 1), {}, 1 << 16)
        assert isinstance(outcome, Reprefill)
        assert (outcome.reason, outcome.status) == ("bad_answer", 500)


def claimed_target() -> dict[str, Any]:
    """The target as a caller names it that knows its geometry."""
    target: dict[str, Any] = document(TOKENS)["target"]
    return {**target, "num_layers": TARGET.num_layers, "num_kv_heads": TARGET.num_kv_heads}


def test_geometry_that_is_claimed_is_compared(answer: httpx.Response) -> None:
    for field in ("num_layers", "num_kv_heads", "head_dim"):
        target = {**claimed_target(), field: 3}

        def handle(_: httpx.Request) -> httpx.Response:
            return httpx.Response(200, headers=answer.headers, content=answer.content)

        with Client("http://service", transport=httpx.MockTransport(handle)) as running:
            outcome = running.translate(cache(TOKENS), request(target=target))
        assert isinstance(outcome, Reprefill)
        assert outcome.reason == "bad_answer"


def test_memory_of_is_a_view() -> None:
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    memory_of(tensor)[:2] = b"\x80\x3f"
    assert tensor.tolist() == [1.0, 0.0, 0.0]


@contextmanager
def one_answer(raw: bytes) -> Iterator[str]:
    """A server that reads one request, answers these bytes and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(5)
                received = b""
                while len(received) < Upload.of(cache(TOKENS), request()).content_length:
                    received += connection.recv(1 << 16)
                connection.sendall(raw)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()
