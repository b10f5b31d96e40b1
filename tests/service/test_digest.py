"""Content-Digest: a body that was damaged on its way is refused before anything is answered."""

import asyncio
import base64
import hashlib
from collections.abc import Callable

import httpx
import pytest
from starlette.testclient import TestClient

from mappers.cache import KVCache
from service.client import AsyncClient, Client, Outcome, Reprefill, Translated
from service.digest import ContentDigest, content_digest
from service.errors import CODES, Problem
from service.schemas import TranslateRequest
from tests.service.live import Live
from tests.service.pair import cache, document, good

TOKENS = 32
TYPE = {"Content-Type": "application/vnd.safetensors"}


def field(body: bytes, name: str = "sha-256") -> str:
    digest = hashlib.new(name.replace("-", ""), body).digest()
    return f"{name}=:{base64.b64encode(digest).decode()}:"


def request() -> TranslateRequest:
    return TranslateRequest.model_validate(document(TOKENS), strict=False)


class TestField:
    def test_what_the_rfc_shows(self) -> None:
        """RFC 9530, appendix B.1: the digest of its example."""
        body = b'{"hello": "world"}\n'
        assert content_digest([body[:5], body[5:]]) == (
            "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:"
        )
        digest = ContentDigest.of_header([content_digest([body])])
        digest.update(body[:7])
        digest.update(memoryview(body)[7:])
        digest.check()

    @pytest.mark.parametrize(
        "write",
        [
            lambda body: [field(body, "sha-512")],
            lambda body: [f"{field(body)}, {field(body, 'sha-512')}"],
            lambda body: [field(body), field(body, "sha-512")],
            lambda body: ["crc32c=:AAAAAA==:"],
            lambda body: [f"new.kind-2=:YQ==:  ,\t{field(body)};note=1;flag"],
            lambda body: [f"{field(b'first')}, {field(body)}"],  # the last of a name counts
            lambda body: [],
            lambda body: [""],
        ],
    )
    def test_agreeing(self, write: Callable[[bytes], list[str]]) -> None:
        digest = ContentDigest.of_header(write(b"body"))
        digest.update(b"body")
        digest.check()

    @pytest.mark.parametrize(
        "write",
        [
            lambda body: [field(b"bodY")],
            lambda body: [f"{field(body)}, {field(b'other', 'sha-512')}"],
        ],
    )
    def test_one_that_differs_is_enough(self, write: Callable[[bytes], list[str]]) -> None:
        digest = ContentDigest.of_header(write(b"body"))
        digest.update(b"body")
        with pytest.raises(Problem) as problem:
            digest.check()
        assert problem.value.code == "digest_mismatch"

    @pytest.mark.parametrize(
        "line",
        [
            "sha-256",
            "sha-256=abc",
            "sha-256=:not base64:",
            "sha-256=:YQ=:",
            "sha-256=:YQ==:",
            "SHA-256=:YQ==:",
            "sha-256=:YQ==",
            f"{field(b'')},",
            f"{field(b'')} {field(b'')}",
            f"{field(b'')};",
            "crc32c=1",
        ],
    )
    def test_malformed(self, line: str) -> None:
        with pytest.raises(Problem) as problem:
            ContentDigest.of_header([line])
        assert problem.value.code == "bad_request"


def test_any_flipped_bit_is_refused_and_may_be_sent_again(client: TestClient) -> None:
    body = good(TOKENS).body
    headers = {**TYPE, "Content-Digest": field(body)}
    assert client.post("/translate", content=body, headers=headers).status_code == 200
    tensors = len(good(TOKENS).header)
    for place in range(tensors, len(body), 997):
        spoiled = bytearray(body)
        spoiled[place] ^= 1 << place % 8
        answer = client.post("/translate", content=bytes(spoiled), headers=headers)
        assert answer.status_code == CODES["digest_mismatch"].status == 400
        said = answer.json()
        assert (said["code"], said["decision"]) == ("digest_mismatch", "reprefill")
        assert said["retryable"]
        assert answer.headers["retry-after"] == "1"


def test_a_malformed_field_is_refused_unread(client: TestClient) -> None:
    headers = {**TYPE, "Content-Digest": "sha-256=oops"}
    answer = client.post("/translate", content=b"", headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")


def test_small_documents_are_held_to_theirs(client: TestClient) -> None:
    sent = {"Content-Type": "application/json", "Content-Digest": field(b"{}")}
    answer = client.post("/translate/plan", content=b"{ }", headers=sent)
    assert answer.json()["code"] == "digest_mismatch"


def test_the_client_sends_it(live: Live) -> None:
    with Client(str(live.client.base_url), digest=True) as running:
        assert isinstance(running.translate(cache(TOKENS), request()), Translated)


def test_the_asynchronous_client_sends_it(live: Live) -> None:
    async def exchange() -> Outcome:
        async with AsyncClient(str(live.client.base_url), digest=True) as running:
            return await running.translate(cache(TOKENS), request())

    assert isinstance(asyncio.run(exchange()), Translated)


def test_the_client_sees_what_became_of_a_damaged_body(live: Live) -> None:
    outcome = through_damage(live, cache(TOKENS))
    assert isinstance(outcome, Reprefill)
    assert (outcome.reason, outcome.retryable) == ("digest_mismatch", True)


def through_damage(live: Live, sent: KVCache) -> Outcome:
    """The service behind a transport that flips the lowest bit of the body's last byte."""

    class Damaging(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            body = bytearray(request.read())
            body[-1] ^= 1
            damaged = httpx.Request(
                request.method, request.url, headers=request.headers, content=bytes(body)
            )
            return super().handle_request(damaged)

    url = str(live.client.base_url)
    with Client(url, digest=True, transport=Damaging()) as running:
        return running.translate(sent, request())
