"""The two answers with status 200: a re-prefill as JSON, and the head of a translation."""

from typing import Any

from starlette.responses import JSONResponse, Response

from service.call import Call, Judged
from service.gate import DETAILS, Ruling
from service.policy import Policy
from service.schemas import BufferReceipt, Receipt, Reprefill, ShadowRequest, TranslateRequest
from service.side import Side
from service.transport import Approved
from service.wire import described, laid_out, write_header

SAFETENSORS = "application/vnd.safetensors"
MAPPER_HEADER = "x-vsr-kv-mapper-id"
"""Semantic Router: in a request the only mapper that will do, in an answer the one that did."""


def reprefill(judged: Judged, reason: str) -> Response:
    """200 without tensors: the caller computes the prompt itself."""
    entry, ruling = judged.entry, judged.ruling
    judged.call.ledger.close("reprefill", reason)
    body = Reprefill(
        reason=reason,
        detail=DETAILS[reason],
        kl_bound=ruling.kl_bound,
        max_kl=ruling.max_kl,
        mapper=entry.id,
        digest=entry.digest or "",
        request_id=judged.call.request_id,
    )
    return _reprefill(body, _common(judged))


def too_late(call: Call) -> Response:
    """The same of a request that nobody has read: what waits for the device is too much for it."""
    reason = "would_miss_deadline"
    call.ledger.close("reprefill", reason)
    body = Reprefill(
        reason=reason,
        detail=DETAILS[reason],
        kl_bound=None,
        max_kl=call.service.settings.max_kl,
        mapper=None,
        digest="",
        request_id=call.request_id,
    )
    return _reprefill(body, {})


def _reprefill(body: Reprefill, headers: dict[str, str]) -> Response:
    why = {
        "KVT-Decision": "reprefill",
        "KVT-Reason": body.reason,
        "x-vsr-kv-transfer-status": "fallback_reprefill",
    }
    return JSONResponse(body.model_dump(mode="json"), headers={**headers, **why})


def translated_head(approved: Approved, target: Side) -> tuple[bytes, dict[str, str]]:
    """The safetensors header that carries the receipt, and the HTTP headers."""
    receipt = _receipt(approved.judged, target, approved.shadow)
    head, _ = write_header(target.tensors, {"kvt": receipt.model_dump_json()})
    length = str(len(head) + target.nbytes)
    kind = {"Content-Type": SAFETENSORS, "Content-Length": length}
    return head, {**_translated(approved), **kind}


def translated_receipt(approved: Approved, buffer: str) -> Response:
    """The receipt of a translation that lies in its caller's buffer."""
    target = approved.running.work.target
    specs, _ = laid_out(target.tensors)
    receipt = BufferReceipt(
        **_receipt(approved.judged, target, approved.shadow).model_dump(),
        buffer=buffer,
        tensors={name: described(spec) for name, spec in specs.items()},
    )
    return JSONResponse(receipt.model_dump(mode="json"), headers=_translated(approved))


def _translated(approved: Approved) -> dict[str, str]:
    """The headers of an answer with tensors; both tokens are its one token."""
    judged, ruling = approved.judged, approved.judged.ruling
    headers = {
        **_common(judged),
        "KVT-Decision": "translate",
        "KVT-Tokens": str(ruling.tokens),
        "KVT-Native-Tail": str(ruling.native_tail),
        "KVT-Answer-Id": judged.call.request_id,
        "x-vsr-kv-transfer-status": "applied",
    }
    if ruling.kl_bound is not None:
        headers["KVT-KL-Bound"] = f"{ruling.kl_bound:.6g}"
    if ruling.unproven:
        headers["KVT-Unproven"] = "true"
    if approved.shadow is not None:
        headers |= {"KVT-Shadow": "requested", "KVT-Feedback-Token": approved.shadow.token}
    if approved.tail_token is not None:
        headers |= {"KVT-Suffix": "accepted", "KVT-Feedback-Token": approved.tail_token}
    return headers


def certified(ruling: Ruling, policy: Policy) -> dict[str, Any]:
    """The fields of ``Certified``."""
    of_policy = {name: getattr(policy, name) for name in ("risk", "alpha", "delta", "kl_clip")}
    of_ruling = {n: getattr(ruling, n) for n in ("kl_bound", "max_kl", "rows", "unproven")}
    return of_policy | of_ruling


def _common(judged: Judged) -> dict[str, str]:
    return {
        "KVT-Mapper": judged.entry.id,
        "KVT-Mapper-Digest": judged.entry.digest or "",
        MAPPER_HEADER: judged.entry.id,
    }


def _receipt(judged: Judged, target: Side, shadow: ShadowRequest | None) -> Receipt:
    request, ruling, policy = judged.request, judged.ruling, judged.standing.policy
    return Receipt(
        mapper=judged.entry.id,
        digest=judged.entry.digest or "",
        tokens=ruling.tokens,
        start_position=request.start_position,
        native_tail=ruling.native_tail,
        prefix_tokens=_exact_tokens(request, ruling),
        probe_error=ruling.probe_error,
        layout=request.layout,
        block_tokens=request.block_tokens,
        dtype=target.storage.dtype,
        kv_scales=target.storage.scales,
        kv_zero_points=target.storage.zero_points,
        expected_kl=ruling.expected_kl,
        guarantee=_guarantee(ruling, policy),
        **certified(ruling, policy),
        token_ids_sha256=request.token_ids_sha256,
        shadow=shadow,
    )


def _exact_tokens(request: TranslateRequest, ruling: Ruling) -> int:
    if request.probe is not None:
        return request.probe.tokens
    return ruling.prefix.tokens if ruling.prefix else 0


def _guarantee(ruling: Ruling, policy: Policy) -> str:
    """What is certified: the threshold in force, not ``kl_bound``, is what the tails were tested
    against, so only of it can the chosen tail's confidence be said."""
    if ruling.unproven:
        return "none: this service was told to translate without evidence"
    confidence = f"with confidence {1 - policy.delta:g}"
    if policy.risk == "mean":
        return f"mean of min(KL, {policy.kl_clip:g}) <= {ruling.max_kl:g} {confidence}"
    return f"P(KL > {ruling.max_kl:g}) <= {policy.alpha:g} {confidence}"
