"""Bad input, one case for each row of the tables: HTTP (A), safetensors (B), meaning (C).

Every case is sent to a real process and checked with the oracle ``unharmed``: the documented
answer, nothing given away, one outcome counted, the next good request answered bit for bit.
"""

import gzip
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.service.live import SAFETENSORS, Live, assert_problem, read_all, unharmed
from tests.service.pair import SOURCE, TARGET, Request, claim, document, good


def st(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors body from a header (JSON-able or raw bytes)."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def header_of(request: Request) -> dict[str, Any]:
    """The JSON header of a good body."""
    size = int.from_bytes(request.body[:8], "little")
    parsed: dict[str, Any] = json.loads(request.body[8 : 8 + size])
    return parsed


def changed(change: Callable[[dict[str, Any]], object], data: bytes | None = None) -> bytes:
    """A good body with its header changed in place."""
    request = good()
    header = header_of(request)
    change(header)
    return st(header, request.data if data is None else data)


def respec(**members: Any) -> bytes:
    """A good body whose first tensor is described otherwise."""
    return changed(lambda header: header["layers.0.k"].update(members))


def renamed(name: str) -> bytes:
    """A good body whose first tensor has another name."""

    def rename(header: dict[str, Any]) -> None:
        header[name] = header.pop("layers.0.k")

    return changed(rename)


def raw_json(text: str) -> bytes:
    """A good body whose request document is this text."""
    request = good()
    request.kvt = text
    return request.body


META = {"__metadata__": {"kvt": json.dumps(document(32))}}
MANY = b",".join(b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(18_000))
TWICE = b'{"layers.0.k":%s,"layers.0.k":%s}' % (
    (b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}',) * 2
)

BODIES: dict[str, tuple[bytes, int, str]] = {
    "B1 empty": (b"", 400, "truncated_body"),
    "B1 seven bytes": (bytes(7), 400, "truncated_body"),
    "B1 length 0": (st(b"", length=0), 400, "bad_safetensors"),
    "B1 length beyond the body": (st({}, length=1000), 400, "bad_safetensors"),
    "B1 length 2**64-1": (st({}, length=2**64 - 1), 413, "header_too_large"),
    "B2 header just over the cap": (st(b" " * ((1 << 20) + 1)), 413, "header_too_large"),
    "B2 header of spaces at the cap": (st(b"{" + b" " * ((1 << 20) - 1)), 400, "bad_safetensors"),
    "B3 many empty tensors": (st(b"{" + MANY + b"}"), 422, "bad_tensor_name"),
    "B3 many dimensions": (
        st(b'{"layers.0.k":{"dtype":"F32","shape":[' + b"1," * 400_000 + b"1]}}"),
        400,
        "bad_safetensors",
    ),
    "B4 not UTF-8": (st(b'{"\xff":1}'), 400, "bad_safetensors"),
    "B4 not JSON": (st(b'{"layers.0.k"'), 400, "bad_safetensors"),
    "B4 a list": (st(b"[]"), 400, "bad_safetensors"),
    "B4 float shape": (respec(shape=[32.0, 2, 8]), 400, "bad_safetensors"),
    "B4 negative shape": (respec(shape=[-32, 2, 8]), 400, "bad_safetensors"),
    "B4 nested": (st(b"{" + b'"a":{' * 100_000), 422, "bad_tensor_name"),
    "B4 brackets": (st(b"[" * 100_000), 400, "bad_safetensors"),
    "B5 hole": (respec(data_offsets=[4, 2052]), 400, "bad_safetensors"),
    "B5 overlap": (
        changed(lambda h: h["layers.0.v"].update(data_offsets=[0, 2048])),
        400,
        "bad_safetensors",
    ),
    "B5 negative offset": (respec(data_offsets=[-4, 2044]), 400, "bad_safetensors"),
    "B5 end before begin": (respec(data_offsets=[2048, 0]), 400, "bad_safetensors"),
    "B5 trailing bytes": (good().body + b"x", 400, "bad_safetensors"),
    "B5 short data": (good().body[:-1], 400, "truncated_body"),
    "B5 no data": (good().header, 400, "truncated_body"),
    "B6 near 2**64": (respec(shape=[2, 2**64 - 2]), 422, "bad_shape"),
    "B6 near 2**63": (respec(shape=[2, 2**63 - 1]), 422, "bad_shape"),
    "B6 zero times huge": (respec(shape=[0, 2**63 - 1]), 422, "bad_shape"),
    "B6 rank 200": (respec(shape=[1] * 200), 422, "bad_shape"),
    "B6 rank 0": (respec(shape=[], data_offsets=[0, 4]), 422, "bad_shape"),
    "B7 duplicate name": (st(TWICE, bytes(4)), 400, "bad_safetensors"),
    "B7 duplicate metadata": (
        st(b'{"__metadata__":{"kvt":"{}"},"__metadata__":{"kvt":"{}"}}'),
        400,
        "bad_safetensors",
    ),
    "B8 extra layer": (
        changed(lambda h: h.update({"layers.9.k": h.pop("layers.2.k")})),
        422,
        "layer_set",
    ),
    "B8 other layout's names": (renamed("layers.0.kv"), 422, "layer_set"),
    "B8 none": (st(META), 422, "layer_set"),
    "B9 NUL": (renamed("layers.0\0.k"), 422, "bad_tensor_name"),
    "B9 path": (renamed("../../etc/passwd"), 422, "bad_tensor_name"),
    "B9 long": (renamed("k" * 900_000), 422, "bad_tensor_name"),
    "B9 look-alike": (renamed("layers.0.\u043a"), 422, "bad_tensor_name"),
    "B9 other digits": (renamed("layers.\u0661.k"), 422, "bad_tensor_name"),
    "B9 leading zero": (renamed("layers.00.k"), 422, "bad_tensor_name"),
    **{
        f"B10 {dtype}": (respec(dtype=dtype), 422, "dtype_unsupported")
        for dtype in ("F8_E8M0", "F4", "I16", "U8", "F64", "BOOL", "C64", "NOPE")
    },
    **{
        f"B10 {dtype} of 32 bits": (respec(dtype=dtype), 400, "bad_safetensors")
        for dtype in ("F8_E4M3", "I8")
    },
    "B11 metadata null": (changed(lambda h: h.update(__metadata__=None)), 422, "bad_metadata"),
    "B11 metadata not strings": (
        changed(lambda h: h.update(__metadata__={"kvt": 1})),
        422,
        "bad_metadata",
    ),
    "B11 metadata too long": (
        changed(lambda h: h["__metadata__"].update(kvt="x" * 1_000_000)),
        422,
        "bad_metadata",
    ),
    "B11 metadata missing": (changed(lambda h: h.pop("__metadata__")), 422, "bad_metadata"),
    "B11 more than the document": (
        changed(lambda h: h["__metadata__"].update(a="b")),
        422,
        "bad_metadata",
    ),
    "B12 zip": (b"PK\x03\x04" + bytes(100), 413, "header_too_large"),
    "B12 gzip": (gzip.compress(good().body), 413, "header_too_large"),
    "B12 pickle": (b"\x80\x04\x95" + bytes(200), 413, "header_too_large"),
    "B12 gguf": (b"GGUF\x03\0\0\0" + bytes(100), 413, "header_too_large"),
    "B12 npy": (b"\x93NUMPY\x01\x00" + bytes(100), 413, "header_too_large"),
    "B15 two files": (good().body * 2, 400, "bad_safetensors"),
    "A9 nested 120 deep": (raw_json('{"a":' * 120 + "1" + "}" * 120), 400, "bad_json"),
    "A9 brackets": (raw_json("[" * 8000), 400, "bad_json"),
    "A11 duplicate key": (raw_json('{"tokens":1,"tokens":2}'), 422, "bad_document"),
    "A11 true for a number": (
        good(tokens=32).body.replace(b'tokens\\": 32', b'tokens\\": true'),
        422,
        "bad_document",
    ),
    "A11 string for a number": (
        raw_json(json.dumps(document(32) | {"tokens": "32"})),
        422,
        "bad_document",
    ),
    "A11 byte order mark": (raw_json("\ufeff" + json.dumps(document(32))), 400, "bad_json"),
    "A11 NaN": (raw_json(json.dumps(document(32, max_kl=float("nan")))), 422, "bad_document"),
    "A11 infinite by exponent": (
        raw_json(json.dumps(document(32)).replace("10000.0", "1e999")),
        422,
        "bad_document",
    ),
    "A11 4000 digits": (
        raw_json(json.dumps(document(32)).replace(" 32", " 3" + "2" * 4000)),
        422,
        "bad_document",
    ),
    "A11 lone surrogate": (
        raw_json(json.dumps(document(32, domain="\ud800"))),
        422,
        "bad_document",
    ),
    "A11 not JSON": (raw_json("tokens=3"), 400, "bad_json"),
    "A11 not an object": (raw_json("[]"), 422, "bad_document"),
    "A11 unknown field": (raw_json(json.dumps(document(32, secret_field=1))), 422, "bad_document"),
}


@pytest.mark.parametrize("case", BODIES)
def test_bad_bodies(live: Live, case: str) -> None:
    body, status, code = BODIES[case]
    with unharmed(live, ("refused", code)):
        assert_problem(live.post(body), status, code)


def said(source: dict[str, Any] | None = None, target: dict[str, Any] | None = None) -> Request:
    """A good request with other claims."""
    request = good()
    request.document["source"] = claim(SOURCE, **(source or {}))
    request.document["target"] = claim(TARGET, **(target or {}))
    return request


def edited(**changes: Any) -> Request:
    """A good request whose document is changed afterwards; ``...`` leaves a field out."""
    request = good()
    request.document = document(**{"tokens": 32} | changes)
    return request


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object], **changes: Any) -> Request:
    """A good request with other tensors."""
    request = good(**changes)
    change(request.tensors)
    return request


def resized(tokens: int, heads: int, dim: int) -> Request:
    """A request whose tensors all have another geometry."""
    request = good()
    request.tensors = {name: torch.zeros(tokens, heads, dim) for name in request.tensors}
    return request


MEANINGS: dict[str, tuple[Request, int, str]] = {
    "C1 unknown model": (said(source={"model": "nobody"}), 404, "pair_not_found"),
    "C1 turned around": (
        good(source=claim(TARGET), target=claim(SOURCE)),
        404,
        "pair_not_found",
    ),
    "C2 source revision": (said(source={"version": "r2"}), 409, "identity_mismatch"),
    "C2 target revision": (said(target={"version": "small-r1"}), 409, "identity_mismatch"),
    "C3 theta off by one": (said(source={"rope_theta": 10_001.0}), 409, "identity_mismatch"),
    "C3 target theta": (said(target={"rope_theta": 10_000.0}), 409, "identity_mismatch"),
    "C3 theta missing": (said(source={"rope_theta": ...}), 422, "bad_document"),
    "C3 theta zero": (said(source={"rope_theta": 0}), 422, "bad_document"),
    "C3 theta negative": (said(source={"rope_theta": -1e4}), 422, "bad_document"),
    "C3 theta huge": (said(source={"rope_theta": 1e308}), 409, "identity_mismatch"),
    "C3 scaling type": (said(source={"rope_type": "yarn"}), 409, "identity_mismatch"),
    "C3 scaling parameter": (
        said(target={"rope_parameters": {"factor": 4.0}}),
        409,
        "identity_mismatch",
    ),
    "dtype": (said(source={"dtype": "bfloat16"}), 409, "identity_mismatch"),
    "adapter": (said(target={"adapter": "lora"}), 409, "identity_mismatch"),
    "quantization": (said(source={"quantization": "gptq"}), 409, "identity_mismatch"),
    "float8 cache": (said(source={"kv_dtype": "float8_e4m3fn"}), 409, "identity_mismatch"),
    "C15 tokenizer": (said(source={"tokenizer_digest": "sha256:22"}), 409, "identity_mismatch"),
    "C4 claimed layers": (said(source={"num_layers": 4}), 409, "identity_mismatch"),
    "C4 layers": (
        with_tensors(lambda t: [t.pop(f"layers.2.{kind}") for kind in "kv"]),
        422,
        "layer_set",
    ),
    "C4 heads": (resized(32, 3, 8), 422, "bad_shape"),
    "C4 head dim": (resized(32, 2, 9), 422, "bad_shape"),
    "C5 layout undeclared": (edited(layout=...), 422, "bad_document"),
    "C5 layout unknown": (edited(layout="NDH"), 422, "bad_document"),
    "C5 paged without a block size": (edited(layout="vllm_hn2d"), 422, "layout_error"),
    "C10 no tokens": (edited(tokens=0), 422, "bad_document"),
    "C10 more than the models hold": (edited(tokens=513), 413, "too_many_tokens"),
    "C10 position beyond the models": (good(32, start_position=481), 413, "too_many_tokens"),
    "C11 V one token short": (
        with_tensors(lambda t: t.update({"layers.1.v": t["layers.1.v"][:-1]})),
        422,
        "bad_shape",
    ),
    "C11 one layer shorter": (
        with_tensors(lambda t: t.update({n: t[n][:-1] for n in ("layers.1.k", "layers.1.v")})),
        422,
        "bad_shape",
    ),
    "C13 negative position": (edited(start_position=-1), 422, "bad_document"),
    "C14 absurd sizes": (edited(block_tokens=10**12), 422, "bad_document"),
    "mixed dtypes": (
        with_tensors(lambda t: t.update({"layers.1.v": t["layers.1.v"].half()})),
        422,
        "dtype_unsupported",
    ),
    "other dtype than declared": (said(source={"kv_dtype": "float16"}), 422, "dtype_unsupported"),
    "reserved field": (good(heads=[0, 1]), 422, "bad_document"),
}


@pytest.mark.parametrize("case", MEANINGS)
def test_bad_meanings(live: Live, case: str) -> None:
    request, status, code = MEANINGS[case]
    with unharmed(live, ("refused", code)):
        answer = live.translate(request)
        assert_problem(answer, status, code)
    unsupported = code in ("pair_not_found", "identity_mismatch")
    assert answer.headers.get("x-vsr-kv-transfer-status") == (
        "unsupported" if unsupported else None
    )


def test_a_mismatch_names_field_and_both_values(live: Live) -> None:
    body = live.translate(said(source={"rope_theta": 10_001.0})).json()
    given = {name: body[name] for name in ("side", "field", "expected", "given")}
    assert given == {
        "side": "source",
        "field": "rope_theta",
        "expected": "10000.0",
        "given": "10001.0",
    }


def spoiled(value: float, row: int = 5, **changes: Any) -> Request:
    """A good request with one value changed."""
    request = good(**changes)
    request.tensors["layers.1.v"][row, 1, 3] = value
    return request


REPREFILLS: dict[str, tuple[Request, str]] = {
    "C8 one NaN": (spoiled(float("nan")), "non_finite"),
    "C8 one infinity": (spoiled(float("inf")), "non_finite"),
    "C8 NaN in the native tail": (spoiled(float("nan"), row=31), "non_finite"),
    "C8 a layer of NaN": (
        with_tensors(lambda t: t["layers.0.k"].fill_(float("nan"))),
        "non_finite",
    ),
    "C9 too large to map": (
        with_tensors(lambda t: t["layers.1.v"].fill_(3e38)),
        "non_finite",
    ),
    "C10 one token": (good(1), "length_not_certified"),
    "uncertified: too short": (good(15), "length_not_certified"),
    "uncertified: too long": (good(65), "length_not_certified"),
    "C16 threshold": (good(max_kl=0.0039), "certified_kl_exceeds_threshold"),
    "tail not accepted": (good(max_kl=0.005, max_native_tail=8), "certified_kl_exceeds_threshold"),
    "hops": (good(hops=1), "drift_budget_exhausted"),
    "unknown domain": (good(domain="law"), "no_evidence"),
    "no time": (good(reprefill_ms=1e-6), "below_break_even"),
}


@pytest.mark.parametrize("case", REPREFILLS)
def test_reprefill_is_an_answer(live: Live, case: str) -> None:
    request, reason = REPREFILLS[case]
    with unharmed(live, ("reprefill", reason)):
        answer = live.translate(request)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.headers["kvt-decision"] == "reprefill"
    assert answer.headers["kvt-reason"] == answer.json()["reason"] == reason
    assert answer.headers["x-vsr-kv-transfer-status"] == "fallback_reprefill"
    assert answer.json().keys() >= {"decision", "detail", "kl_bound", "max_kl", "mapper", "digest"}


def test_zeros_and_subnormals_are_translated(live: Live) -> None:
    for fill in (0.0, 1e-40):
        request = with_tensors(lambda t, fill=fill: [x.fill_(fill) for x in t.values()])  # type: ignore[misc]
        with unharmed(live, ("translate", "")):
            answer = live.translate(request)
        size = int.from_bytes(answer.content[:8], "little")
        assert np.isfinite(np.frombuffer(answer.content[8 + size :], np.float32)).all()


# A: HTTP itself.


def head(*lines: str, method: str = "POST", path: str = "/translate") -> bytes:
    """A request head with these header lines."""
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: here", *lines, "", "")).encode()


KIND = "Content-Type: application/vnd.safetensors"


def status_of(answer: bytes) -> int:
    """Status code of a raw answer."""
    return int(answer.split(b" ", 2)[1])


def test_a1_length_over_the_cap_is_refused_unread(live: Live) -> None:
    memory = live.memory_bytes()
    with unharmed(live, ("refused", "body_too_large")):
        answer = live.raw(head(KIND, "Content-Length: 5000000000", "Expect: 100-continue"))
    assert status_of(answer) == 413
    assert b"100 Continue" not in answer
    assert b"application/problem+json" in answer
    assert live.memory_bytes() - memory < 4 << 20


def test_a2_chunked_body_over_the_cap(live: Live) -> None:
    def endless() -> Any:
        yield st(META)
        while True:
            yield bytes(1 << 16)

    with unharmed(live, ("refused", "layer_set")), httpx.Client(timeout=20) as client:
        url = f"http://127.0.0.1:{live.port}/translate"
        try:
            answer = client.post(url, content=endless(), headers=SAFETENSORS)
            assert answer.status_code == 422
        except (httpx.ReadError, httpx.WriteError):
            pass  # cut off in the middle of an endless body: just as good


def test_a2_declared_tensors_over_the_memory_budget(live: Live) -> None:
    big = good(512)
    big.document["block_tokens"] = 65536
    big.document["layout"] = "vllm_2bnhd"
    shape = (2, 1, 65536, 2, 8)
    size = 2 * 65536 * 2 * 8 * 4
    header = {
        f"layers.{i}.kv": {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i in range(3)
    }
    big.document["tokens"] = 64
    body = st({"__metadata__": {"kvt": json.dumps(big.document)}} | header)

    def chunks() -> Any:
        yield body

    with unharmed(live, ("refused", "body_too_large")):
        answer = live.client.post("/translate", content=chunks(), headers=SAFETENSORS)
        assert_problem(answer, 413, "body_too_large")


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: -1",),
        ("Content-Length: +5",),
        ("Content-Length: 0x5",),
        ("Content-Length: 12345678901234567890123",),
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: 5", "Transfer-Encoding: gzip"),
    ],
)
def test_a4_lengths_that_are_none(live: Live, lines: tuple[str, ...]) -> None:
    with unharmed(live, None):
        answer = live.raw(head(KIND, *lines), b"hello")
    assert status_of(answer) in (400, 501)
    assert b"application/problem+json" in answer


def test_a4_length_and_chunks_together(live: Live) -> None:
    """h11 lets the chunks count, as RFC 9112 6.3 says, and never reads the rest as a request."""
    with unharmed(live, ("refused", "truncated_body")):
        answer = live.raw(
            head(KIND, "Content-Length: 5", "Transfer-Encoding: chunked", "Connection: close"),
            b"0\r\n\r\nGET /livez HTTP/1.1\r\nHost: here\r\n\r\n",
        )
    assert answer.count(b"HTTP/1.1 ") == 1
    assert status_of(answer) == 400


def test_a5_huge_head(live: Live) -> None:
    for lines in (["X: " + "a" * 5_000_000], [f"X-{i}: 1" for i in range(10_000)]):
        with unharmed(live, None):
            answer = live.raw(head(KIND, *lines))
        assert answer == b"" or status_of(answer) == 431


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "deflate, gzip"])
def test_a8_compressed_bodies(live: Live, coding: str) -> None:
    with unharmed(live, ("refused", "unsupported_encoding")):
        answer = live.post(gzip.compress(bytes(1 << 20)), **{"Content-Encoding": coding})
        assert_problem(answer, 415, "unsupported_encoding")


@pytest.mark.parametrize(
    "kind",
    [
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
        "text/plain",
        "application/json",
        "",
    ],
)
def test_a12_other_content_types(live: Live, kind: str) -> None:
    with unharmed(live, ("refused", "unsupported_media_type")):
        answer = live.post(good().body, **{"Content-Type": kind})
        assert_problem(answer, 415, "unsupported_media_type")
    assert "application/vnd.safetensors" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/translate", 405, "method_not_allowed"),
        ("TRACE", "/translate", 405, "method_not_allowed"),
        ("FROBNICATE", "/mappers", 405, "method_not_allowed"),
        ("POST", "/livez", 405, "method_not_allowed"),
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/translate/", 404, "not_found"),
        ("POST", "//translate", 404, "not_found"),
        ("GET", "/mappers/%00", 404, "mapper_not_found"),
        ("GET", "/mappers/%ff", 404, "mapper_not_found"),
        ("GET", "/mappers/..%2f..%2fetc", 404, "not_found"),
    ],
)
def test_a14_methods_and_addresses(
    live: Live, method: str, path: str, status: int, code: str
) -> None:
    with unharmed(live, None):
        answer = live.client.request(method, path)
        assert_problem(answer, status, code)
    assert ("allow" in answer.headers) is (status == 405)


def test_a15_problems_ignore_accept(live: Live) -> None:
    with unharmed(live, ("refused", "truncated_body")):
        assert_problem(live.post(b"", Accept="text/html"), 400, "truncated_body")


def test_a18_absolute_form_is_routed_by_its_path(live: Live) -> None:
    with unharmed(live, None):
        answer = live.raw(
            b"GET http://elsewhere/livez HTTP/1.1\r\nHost: evil/mappers\r\n"
            b"Connection: close\r\n\r\n"
        )
    assert status_of(answer) == 404


def test_a19_request_id_with_a_line_break_never_gets_in(live: Live) -> None:
    with unharmed(live, None):
        answer = live.raw(b"GET /livez HTTP/1.1\r\nHost: a\r\nX-Request-Id: a\rb\r\n\r\n")
    assert status_of(answer) == 400


@pytest.mark.parametrize(
    "parts", [(b"\x16\x03\x01\x02\x00\x01\x00",), (b"GET\r\n\r\n",), (b"\0" * 100, b"\r\n\r\n")]
)
def test_bytes_that_are_not_http(live: Live, parts: tuple[bytes, ...]) -> None:
    with unharmed(live, None):
        answer = live.raw(*parts, shut=True)
    assert answer == b"" or (status_of(answer) == 400 and b"application/problem+json" in answer)


def test_plan_reads_json_only(live: Live) -> None:
    bad = live.client.post("/translate/plan", content=good().body, headers=SAFETENSORS)
    assert_problem(bad, 415, "unsupported_media_type")
    kind = {"Content-Type": "application/json"}
    for content, status, code in (
        (json.dumps(document(32)).encode("utf-16"), 422, "bad_document"),
        (b"\xef\xbb\xbf{}", 400, "bad_json"),
        (b"{" + b" " * 70_000, 413, "body_too_large"),
        (b"null", 422, "bad_document"),
    ):
        assert_problem(
            live.client.post("/translate/plan", content=content, headers=kind), status, code
        )


def test_refused_early_the_answer_still_arrives(live: Live) -> None:
    """The service answers in the middle of a large upload; the client must be able to read it."""
    request = good(64, max_kl=1e-9)
    body = request.body + bytes(3 << 20)
    for _ in range(5):
        answer = live.post(body)
        assert answer.headers["kvt-reason"] == "certified_kl_exceeds_threshold"
        assert answer.headers["connection"] == "close"


def test_nothing_that_was_sent_comes_back(live: Live) -> None:
    secret = "canary-4711"
    for changes in ({secret: 1}, {"domain": secret + " "}, {"layout": secret}, {"tokens": secret}):
        answer = live.translate(Request({**document(32), **changes}))
        assert answer.status_code == 422
        assert secret not in answer.text
        assert answer.json()["errors"]
    assert secret not in live.post(renamed(secret)).text


def test_unread_answers_do_not_stop_the_service(live: Live) -> None:
    with unharmed(live, ("translate", "")):
        with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
            body = good().body
            connection.sendall(
                head(KIND, f"Content-Length: {len(body)}", "Connection: close") + body
            )
            assert status_of(read_all(connection)) == 200
